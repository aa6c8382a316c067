"""Every width of codes from 2 to 8, offered by a setting or not: kernels take it, and touch nothing behind a wire."""

from __future__ import annotations

import subprocess
import sys

import cuda_emulation
import pytest
import torch
from changes_cases import before_forbidden_page
from op_cases import COMPILED, Case, calls, needs_compiled
from op_checks import same

from hf_zeropp import ops
from hf_zeropp.ops import native
from hf_zeropp.ops.format import MAX_BLOCK, QMAX, Segment, WireLayout
from hf_zeropp.ops.reference_kernels import ReferenceKernels
from hf_zeropp.ops.register import OPERATORS

SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 255, 1023, 1025, 2 * MAX_BLOCK - 1, 2 * MAX_BLOCK, 2 * MAX_BLOCK + 9)
BLOCKS = (8, 128, 1024, MAX_BLOCK)  # CUDA kernels with 16-byte accesses take up to 1024
EMULATED = "cuda, emulated"
NAMES = [*COMPILED, EMULATED] if cuda_emulation.compiler() else COMPILED

pytestmark = [pytest.mark.usefixtures("restore_kernels"), pytest.mark.one_rank]


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat copy that ends where a page begins that may not be touched."""
    return before_forbidden_page(tensor.contiguous().view(-1).view(torch.uint8)).view(tensor.dtype)


def kernels_named(name: str) -> ops.CompiledKernels:
    if name == EMULATED:
        return ops.CompiledKernels(cuda_emulation.library(), "cuda")
    return ops.CompiledKernels(native.cpu_library()[0], name)


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
def test_every_operator_in_every_width_touches_nothing_behind_a_wire(bits):
    """Every tensor ends at a protected page, and a wire's last part with as little padding as there is. Results are right.

    Tiles of the largest blocks fill the buffers of a thread.
    """
    kernels = [kernels_named(name) for name in NAMES]
    for size in (*SIZES, *(16 * 8 * n // bits for n in (1, 2, 3, 65, 600))):
        for block in BLOCKS:
            layout = WireLayout([Segment(size, bits)], block)
            case = Case(layout, layout, 1, 1, torch.randn(size).bfloat16(), torch.randn(size), torch.float32, 0.5, 0)
            for operator, call in calls(case).items():
                arguments = [fenced(one) if isinstance(one, torch.Tensor) else one for one in call.arguments]
                result = OPERATORS[operator].check(arguments)
                ((shape, dtype),) = result.filled
                expected = torch.zeros(shape, dtype=dtype)
                ReferenceKernels().run(OPERATORS[operator], arguments, result.counts, [expected])
                for one in kernels:
                    out = fenced(torch.zeros(shape, dtype=dtype))
                    one.run(OPERATORS[operator], arguments, result.counts, [out])
                    assert same(out, expected, call.layout), f"{operator} by {one.name}: {case}"


def test_the_fence_holds():
    """A read behind the end would end the process: in a child, which holds the memory and may read the rest of it, it does."""
    code = (
        "import ctypes, sys, torch; sys.path.insert(0, %r); from changes_cases import before_forbidden_page\n"
        "held = before_forbidden_page(torch.zeros(100, dtype=torch.uint8))\n"
        "assert ctypes.string_at(held.data_ptr(), 100) == bytes(100)\n"
        "ctypes.string_at(held.data_ptr(), 101)"
    )
    helpers = __file__.replace("ops/test_widths.py", "helpers")
    child = subprocess.run([sys.executable, "-c", code % helpers], capture_output=True)
    assert child.returncode == -11
