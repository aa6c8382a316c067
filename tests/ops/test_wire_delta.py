"""Weight deltas keep their promises, whichever kernels run."""

from __future__ import annotations

import pytest
import torch

from hf_zeropp import ops
from hf_zeropp.ops.format import QMAX, ROTATION_SLICE, Segment, WireLayout

BLOCKS = (1, 2, 3, 16, 63, 64, 96, 100, 128, 256, 1000, 4095, 4096)


@pytest.fixture(params=ops.kernel_info().available, autouse=True)
def kernels(request, restore_kernels):
    ops.set_kernels(request.param)


@pytest.mark.parametrize("bits", QMAX)
def test_repeated_updates_converge(bits):
    """A base of bf16 that follows a fixed target by quantized differences: half an ulp, and what coarse codes add to that.

    Of a block whose largest value has the ulp u, an update leaves half a step of its codes and half an ulp of the rounding:
    e <- e / (2 qmax) + u / 2, a contraction; and scales are rounded up by at most one part in 128.
    """
    torch.manual_seed(0)
    target = torch.randn(40, 128)
    base_layout = WireLayout([Segment(target.numel(), None)], 128)
    layout = WireLayout([Segment(target.numel(), bits)], 128)
    ulp = torch.exp2(target.abs().amax(1, keepdim=True).log2().floor() - 7)
    bound = ulp / 2 / (1 - (1 + 2.0**-7) / (2 * QMAX[bits]))
    base = torch.zeros(base_layout.nbytes, dtype=torch.uint8)
    for _ in range(50):
        wire = ops.quantize_difference(target, base, base_layout, layout)
        ops.dequantize_update(wire, layout, base, base_layout, out=base)
    reached = ops.dequantize(base, base_layout, dtype=torch.float32).view_as(target)
    assert ((reached - target).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_chunks_do_to_their_elements_what_the_whole_does(block):
    """Deltas and feedback alike: all operators that encode again what they have decoded."""
    sizes, rotate = [3 * block + 5, 700, 33], block % ROTATION_SLICE == 0
    layout, out_layout, residual_layout = (
        WireLayout([Segment(n, bits) for n, bits in zip(sizes, widths, strict=True)], block)
        for widths in ([8, None, 4], [4, 8, None], [8, 4, None])
    )
    values, initial = torch.randn(2, layout.numel), torch.randn(2, layout.numel)

    def results(layout, out_layout, residual_layout):
        wire = ops.quantize(values, layout)
        residual = torch.zeros(2, residual_layout.nbytes, dtype=torch.uint8)
        difference = ops.quantize_difference(values * 2, wire, layout, out_layout)
        sent = ops.quantize_with_feedback(
            wire, layout, out_layout, residual, residual_layout, num_sources=1, initial=initial, rotate=rotate
        )
        update = ops.dequantize_update(difference, out_layout, wire, layout)
        return (difference, out_layout), (update, layout), (sent, out_layout), (residual, residual_layout)

    chunks = zip(*(whole.chunks(3) for whole in (layout, out_layout, residual_layout)), strict=True)
    pieces = [results(*layouts) for layouts in chunks]
    for index, (wire, whole_layout) in enumerate(results(layout, out_layout, residual_layout)):
        decoded = torch.empty(2, layout.numel)
        for piece in pieces:
            ops.dequantize(piece[index][0], piece[index][1], dtype=torch.float32, out=decoded)
        assert torch.equal(decoded.flatten(), ops.dequantize(wire, whole_layout, dtype=torch.float32)), index
