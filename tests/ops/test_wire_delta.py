"""Weight deltas keep their promises, whichever kernels run."""

from __future__ import annotations

import pytest
import torch
from op_cases import largest_error

from hf_zeropp import ops
from hf_zeropp.ops.format import QMAX, Segment, WireLayout

pytestmark = pytest.mark.one_rank


@pytest.fixture(params=ops.kernel_info().available, autouse=True)
def kernels(request, restore_kernels):
    ops.set_kernels(request.param)


@pytest.mark.parametrize("bits", QMAX)
def test_repeated_updates_converge(bits):
    """A base of bf16 that follows a fixed target by quantized differences: half an ulp, and what coarse codes add to that.

    Of a block whose largest value has the ulp u, an update leaves the error of its codes and half an ulp of the rounding:
    e <- r e + u / 2, a contraction with the largest relative error r of codes.
    """
    torch.manual_seed(0)
    target = torch.randn(40, 128)
    base_layout = WireLayout([Segment(target.numel(), None)], 128)
    layout = WireLayout([Segment(target.numel(), bits)], 128)
    ulp = torch.exp2(target.abs().amax(1, keepdim=True).log2().floor() - 7)
    bound = ulp / 2 / (1 - largest_error(bits))
    base = torch.zeros(base_layout.nbytes, dtype=torch.uint8)
    for _ in range(50):
        wire = ops.quantize_difference(target, base, base_layout, layout)
        ops.dequantize_update(wire, layout, base, base_layout, out=base)
    reached = ops.dequantize(base, base_layout, dtype=torch.float32).view_as(target)
    assert ((reached - target).abs() <= bound * (1 + 1e-5)).all()
