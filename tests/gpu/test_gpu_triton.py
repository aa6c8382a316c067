"""Triton's kernels on a GPU, which run where nvcc was not there at install: the bits of the CPU's kernels.

Triton compiles a kernel for each width, block and dtype, which takes a second each. So four layouts stand for all; Triton's
interpreter has gone through many more (tests/ops/test_triton.py).
"""

from __future__ import annotations

import pytest
import torch
from op_cases import Case
from op_checks import check_everything

from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.ops.kernels import triton_kernels

pytestmark = pytest.mark.gpu

SIZES = (1000, 7, 20_000)


@pytest.mark.parametrize(
    ("bits", "block", "dtype"),
    [(8, 256, torch.bfloat16), (4, 128, torch.float32), (3, 96, torch.float16), (2, 128, torch.bfloat16)],
)
def test_four_layouts(bits, block, dtype):
    kernels, why_not = triton_kernels("cuda")
    assert kernels is not None, why_not
    layout = WireLayout(map(Segment, SIZES, (bits, None, bits)), block, dtype)
    values = torch.randn(2 * layout.numel, generator=torch.Generator().manual_seed(bits)).to(dtype)
    values[5], values[-5] = float("nan"), float("inf")
    check_everything([kernels], Case(layout, layout, 2, 1, values, None, torch.float32, 0.5, 0), "cuda")
