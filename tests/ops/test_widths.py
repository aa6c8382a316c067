"""Every width of codes from 2 to 8, offered by a setting or not: kernels take it, and touch nothing behind a wire."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import cuda_emulation
import pytest
import torch
from op_cases import COMPILED, Case, calls, needs_compiled
from op_checks import check_everything

from hf_zeropp import ops
from hf_zeropp.ops import native
from hf_zeropp.ops.blocks import pack_codes, unpack_codes
from hf_zeropp.ops.format import MAX_BLOCK, QMAX, Segment, WireLayout
from hf_zeropp.ops.reference_kernels import ReferenceKernels
from hf_zeropp.ops.register import OPERATORS

SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 255, 1023, 1025, 2 * MAX_BLOCK - 1, 2 * MAX_BLOCK, 2 * MAX_BLOCK + 9)
BLOCKS = (8, 128, 1024, MAX_BLOCK)  # CUDA kernels with 16-byte accesses take up to 1024
PAGE = mmap.PAGESIZE
EMULATED = "cuda, emulated"
NAMES = [*COMPILED, EMULATED] if cuda_emulation.compiler() else COMPILED

pytestmark = pytest.mark.usefixtures("restore_kernels")


def kernels_named(name: str) -> ops.CompiledKernels:
    if name == EMULATED:
        return ops.CompiledKernels(cuda_emulation.library(), "cuda")
    return ops.CompiledKernels(native.cpu_library()[0], name)


class Fenced:
    """Memory of ``nbytes`` that ends where a page begins which may not be touched: reading or writing there ends the process."""

    def __init__(self, nbytes: int) -> None:
        pages = -(-nbytes // PAGE) + 1
        self._memory = mmap.mmap(-1, pages * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(address + (pages - 1) * PAGE), PAGE, 0) == 0, "mprotect"
        self.tensor = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=nbytes, offset=(pages - 1) * PAGE - nbytes
        )

    @classmethod
    def copy(cls, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        fenced = cls(data.numel()).tensor
        fenced.copy_(data)
        return fenced.view(tensor.dtype)


@pytest.mark.parametrize("bits", QMAX)
def test_the_reference_packs_every_width(bits):
    codes = torch.randint(-QMAX[bits], QMAX[bits] + 1, (3, 41), dtype=torch.int8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, -(-41 * bits // 8))
    assert torch.equal(unpack_codes(packed, bits)[:, :41], codes)


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_operator_in_every_width(bits, dtype):
    """Blocks up to the largest, whose tiles fill the buffers of a thread."""
    kernels = [kernels_named(name) for name in NAMES]
    for block in BLOCKS:
        segments = [Segment(size, bits) for size in (1, 7, 9, 16, 255, 1025, 2 * block + 9)]
        layout = WireLayout(segments, block)
        out_layout = WireLayout([Segment(one.numel, 8) for one in segments], 128)
        values = torch.randn(2 * layout.numel).to(dtype)
        case = Case(layout, out_layout, 2, 1, values, torch.randn(layout.numel), dtype, 0.5, 0)
        check_everything(kernels, case, expected=ReferenceKernels())
        check_everything(
            kernels, Case(out_layout, layout, 2, 1, values, None, dtype, 1.0, 1), expected=ReferenceKernels()
        )


@needs_compiled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", QMAX)
def test_nothing_behind_a_wire_is_touched(bits, name):
    """Every tensor of every operator ends at a protected page. A wire's last part ends with as little padding as there is."""
    kernels = kernels_named(name)
    for size in (*SIZES, *(16 * 8 * n // bits for n in (1, 2, 3, 65, 600))):
        for block in BLOCKS:
            layout = WireLayout([Segment(size, bits)], block)
            case = Case(layout, layout, 1, 1, torch.randn(size).bfloat16(), torch.randn(size), torch.float32, 0.5, 0)
            for operator, call in calls(case).items():
                arguments = [Fenced.copy(one) if isinstance(one, torch.Tensor) else one for one in call.arguments]
                result = OPERATORS[operator].check(arguments)
                ((shape, dtype),) = result.filled
                out = Fenced(torch.Size(shape).numel() * dtype.itemsize).tensor.view(dtype)
                kernels.run(OPERATORS[operator], arguments, result.counts, [out])


def test_the_fence_holds(tmp_path):
    """A read behind the end would end the process: in a child, it does."""
    code = (
        "import ctypes, sys; sys.path[:0] = [%r, %r]; from test_widths import Fenced\n"
        "ctypes.string_at(Fenced(100).tensor.data_ptr(), 101)"
    )
    helpers = __file__.replace("ops/test_widths.py", "helpers")
    child = subprocess.run(
        [sys.executable, "-c", code % (helpers, __file__.removesuffix("/test_widths.py"))], capture_output=True
    )
    assert child.returncode == -11
