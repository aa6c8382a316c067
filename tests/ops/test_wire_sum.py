"""Sums of slices, and error feedback, keep their promises, whichever kernels run."""

from __future__ import annotations

import pytest
import torch

from hf_zeropp import ops
from hf_zeropp.ops.blocks import rotate_slices
from hf_zeropp.ops.format import Segment, WireLayout


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


def test_accumulate_in_place():
    layout = WireLayout([Segment(70_000, 8), Segment(30, None)], 256)
    wire = ops.quantize(torch.randn(6, layout.numel), layout)
    accumulator = torch.randn(2, layout.numel)
    expected = ops.dequantize_sum(wire, layout, num_sources=3, initial=accumulator, scale=0.25)
    result = ops.dequantize_sum(wire, layout, num_sources=3, initial=accumulator, scale=0.25, out=accumulator)
    assert result is accumulator and torch.equal(accumulator, expected)


def test_sum_requantized_equals_the_steps():
    sizes = [1000, 64, 0, 333]
    layout = WireLayout([Segment(n, b) for n, b in zip(sizes, [8, None, 4, 4], strict=True)], 96)
    out_layout = WireLayout([Segment(n, b) for n, b in zip(sizes, [4, None, 8, None], strict=True)], 128, torch.float16)
    wire = ops.quantize(torch.randn(6, layout.numel), layout)
    total = ops.dequantize_sum(wire, layout, num_sources=2)
    fused = ops.dequantize_sum_quantize(wire, layout, out_layout, num_sources=2)
    assert fused.shape == (3, out_layout.nbytes)
    assert torch.equal(fused.flatten(), ops.quantize(total, out_layout))


# ---- Error feedback.


@pytest.mark.parametrize("rotate", [False, True])
def test_later_calls_add_the_error_of_earlier_ones(rotate):
    """After k rounds, the sum of all that was sent is the sum of all values, but for the residual and its own rounding."""
    torch.manual_seed(0)
    n = 4096
    layout, residual_layout = WireLayout([Segment(n, 4)], 128), WireLayout([Segment(n, 8)], 128)
    residual = torch.zeros(residual_layout.nbytes, dtype=torch.uint8)
    meant, sent, alone = torch.zeros(3, n, dtype=torch.float64)
    for _ in range(200):
        values = torch.randn(1, n) + torch.linspace(-0.05, 0.05, n)  # a trend that is lost in a step of INT4
        wire = ops.quantize_with_feedback(
            None, layout, layout, residual, residual_layout, num_sources=0, initial=values, rotate=rotate
        )
        meant += values.flatten()
        sent += ops.dequantize_sum(wire, layout, num_sources=1, rotate=rotate).flatten()
        plain = ops.quantize(values, layout, rotate=rotate)
        alone += ops.dequantize_sum(plain, layout, num_sources=1, rotate=rotate).flatten()
        left_out = ops.dequantize(residual, residual_layout, dtype=torch.float32)
    left_out = rotate_slices(left_out) if rotate else left_out
    # The residual is rounded to 127 steps each time: 200 such errors, in random directions, are a part of one of INT4.
    assert (meant - sent - left_out).abs().max() < left_out.abs().max() / 2
    assert (meant - sent).std() < (meant - alone).std() / 5


def test_decay_mixes_the_newest_error_in():
    layout, residual_layout = WireLayout([Segment(128, 4)], 128), WireLayout([Segment(128, 8)], 128)
    values, before = torch.randn(1, 128), torch.rand(128)
    residual = ops.quantize(before, residual_layout)
    left_out = ops.dequantize(residual, residual_layout, dtype=torch.float32) * 0.5
    wire = ops.quantize_with_feedback(
        *(None, layout, layout, residual, residual_layout), num_sources=0, initial=values, decay=0.25, rescale=0.5
    )
    error = values + left_out - ops.dequantize(wire.flatten(), layout, dtype=torch.float32)
    assert torch.equal(residual, ops.quantize(left_out * 0.75 + error * 0.25, residual_layout))


def test_a_poisoned_residual_is_forgotten():
    """A step that overflows leaves NaN behind, and the next one starts anew there."""
    layout, residual_layout = WireLayout([Segment(256, 4)], 128), WireLayout([Segment(256, 8)], 128)
    values = torch.randn(1, 256)
    overflown = values.clone()
    overflown[0, 5] = torch.inf

    def send(values, residual):
        return ops.quantize_with_feedback(
            None, layout, layout, residual, residual_layout, num_sources=0, initial=values
        ).flatten()

    residual = torch.zeros(residual_layout.nbytes, dtype=torch.uint8)
    sent = ops.dequantize(send(overflown, residual), layout, dtype=torch.float32)
    assert sent[:128].isnan().all() and sent[128:].isfinite().all()
    first = ops.dequantize(send(values, residual), layout, dtype=torch.float32)[:128]
    assert torch.equal(first, ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)[:128])
    assert ops.dequantize(residual, residual_layout, dtype=torch.float32).isfinite().all()


def test_raw_parts_have_no_residual():
    layout = WireLayout([Segment(100, None), Segment(100, 4)], 32)
    residual_layout = WireLayout([Segment(100, None), Segment(100, 8)], 32, torch.float16)
    residual = torch.full((residual_layout.nbytes,), 0x3A, dtype=torch.uint8)
    raw = residual_layout.parts[0].end
    initial = torch.randn(1, 200)
    wire = ops.quantize_with_feedback(
        None, layout, layout, residual, residual_layout, num_sources=0, initial=initial, rotate=True
    )
    decoded = ops.dequantize(wire.flatten(), layout, dtype=torch.float32)
    assert (residual[:raw] == 0x3A).all() and torch.equal(decoded[:100], initial[0, :100].bfloat16().float())
