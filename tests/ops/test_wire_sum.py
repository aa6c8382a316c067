"""Sums of slices keep their promises, whichever kernels run."""

from __future__ import annotations

import pytest
import torch

from hf_zeropp import ops
from hf_zeropp.ops.format import Segment, WireLayout

pytestmark = pytest.mark.one_rank


@pytest.fixture(params=ops.kernel_info().available, autouse=True)
def kernels(request, restore_kernels):
    ops.set_kernels(request.param)


def test_sum_is_fp32_in_source_order():
    layout = WireLayout([Segment(64, None)], 64, torch.float32)
    sources = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])[:, None, None].expand(4, 2, 64).contiguous()
    wire = ops.quantize(sources, layout)
    total = ops.dequantize_sum(wire, layout, num_sources=4, scale=0.5)
    assert total.shape == (2, 64) and (total == 0.0).all()  # 2^24 + 1 + 1 is 2^24 in this order
    total = ops.dequantize_sum(wire, layout, num_sources=4, initial=torch.full((2, 64), -(2.0**24)))
    assert (total == 2.0 - 2.0**24).all()


def test_sum_requantized_equals_the_steps():
    sizes = [1000, 64, 0, 333]
    layout = WireLayout([Segment(n, b) for n, b in zip(sizes, [8, None, 4, 4], strict=True)], 96)
    out_layout = WireLayout([Segment(n, b) for n, b in zip(sizes, [4, None, 8, None], strict=True)], 128, torch.float16)
    wire = ops.quantize(torch.randn(6, layout.numel), layout)
    total = ops.dequantize_sum(wire, layout, num_sources=2)
    fused = ops.dequantize_sum_quantize(wire, layout, out_layout, num_sources=2)
    assert fused.shape == (3, out_layout.nbytes)
    assert torch.equal(fused.flatten(), ops.quantize(total, out_layout))
