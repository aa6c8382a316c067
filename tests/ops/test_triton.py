"""The fallback on GPUs has the reference's bits, and compiles for GPUs to exact instructions. test_native.py chooses it.

Its bits are those of Triton's interpreter here; ``tests/gpu`` runs what Triton compiles.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed (no wheel for this platform)"
    ),
    pytest.mark.one_rank,
]
PROGRAM = Path(__file__).parents[1] / "helpers/triton_cases.py"


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "end"), [(0, 6), pytest.param(1000, 1300, marks=pytest.mark.long)])
def test_interpreted_kernels_have_the_bits_of_the_cpu(first: int, end: int) -> None:
    # numpy warns of NaNs in the cases.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    arguments = [sys.executable, str(PROGRAM), str(first), str(end)]
    run = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and f"{end - first} cases have the same bits" in run.stdout, run.stdout + run.stderr


# ---- What Triton makes of them for GPUs.


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["encode", "decode", "encode_sum", "update"])
def test_compiled_kernels_round_as_the_reference(name, capability):
    """They compile without a GPU, with exact division, and nothing fused or flushed to zero."""
    ptx = compiled_ptx(name, capability)
    floats = set(re.findall(r"\b((?:fma|mad|div|mul|add|sub|rcp|ex2)\.[a-z.]*f32)\b", ptx))
    assert floats <= {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"}, floats
    assert not re.search(r"\.ftz\b", ptx)
    assert ("div.rn.f32" in floats) == (name in ("encode", "encode_sum"))


def compiled_ptx(name: str, capability: int) -> str:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_zeropp.ops import triton_device

    kernel = getattr(triton_device, name)
    words = "*i16" if name == "decode" else "*u8"
    types = {"wire": "*u8", "base": "*u8", "initial": "*fp32", "input": "*i16", "out": words}
    types |= {"scale": "fp32", "num_sources": "i32"}
    constants: dict[str, Any] = {"DTYPE": tl.bfloat16, "PADDED": 128, "ROWS": 8, "TILE": 1024}
    constants |= {"BITS": 3, "BLOCK": 256, "RAW": tl.float16}
    constants |= {"O_BITS": 5, "O_BLOCK": 96, "O_RAW": tl.bfloat16}
    constants |= {"B_BITS": 0, "B_BLOCK": 256, "B_RAW": tl.bfloat16}
    signature = {one: types.get(one, "i64") for one in kernel.arg_names if not one.isupper()}
    # The other constants are questions that are answered with yes.
    constant = {one: constants.get(one, True) for one in kernel.arg_names if one.isupper()}
    source = ASTSource(kernel, signature | dict.fromkeys(constant, "constexpr"), constexprs=constant)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    return compiled.asm["ptx"]
