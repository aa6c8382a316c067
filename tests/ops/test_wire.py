"""The operators of the wire keep the format's promises, whichever kernels run."""

from __future__ import annotations

import math

import pytest
import torch
from op_cases import largest_error

from hf_zeropp import ops
from hf_zeropp.ops.format import FLOAT_DTYPES, LARGEST_LEVEL, QMAX, ROOT_WIDTHS, SCALE_NAN, Segment, WireLayout

pytestmark = pytest.mark.one_rank


@pytest.fixture(params=ops.kernel_info().available, autouse=True)
def kernels(request, restore_kernels):
    ops.set_kernels(request.param)


@pytest.mark.parametrize("bits", QMAX)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_round_trip_error_is_half_a_step(bits, dtype):
    """Between squares, those of k and k + 1, it is k + 3/4 scales at most: the root of a value there is k + 1/2 or more."""
    block, n = 64, 64 * 100
    values = (torch.randn(n) * torch.logspace(-3, 3, n)).to(dtype)
    layout = WireLayout([Segment(n, bits)], block)
    decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
    amax = values.float().view(-1, block).abs().amax(1, keepdim=True)
    scale = amax / LARGEST_LEVEL[bits] * (1 + 2.0**-7)  # rounding the scale up to bf16 costs at most one part in 128
    sizes = values.float().view(-1, block).abs()
    bound = (sizes * scale).sqrt() + scale / 4 if bits in ROOT_WIDTHS else scale / 2
    error = (decoded - values.float()).view(-1, block).abs()
    assert (error <= bound * (1 + 1e-5)).all()
    assert (error > bound / 4).any()


@pytest.mark.parametrize("bits", QMAX)
def test_the_maximum_is_never_clipped(bits):
    """A block of equal values is coded as qmax, and is off by the rounding of the scale at most, or by half a step."""
    values = (torch.rand(512) + 1.0).repeat_interleave(8)
    layout = WireLayout([Segment(4096, bits)], 8)
    decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
    error = 2.0**-7 if bits in ROOT_WIDTHS else (1 + 2.0**-7) / (2 * QMAX[bits])
    assert ((decoded - values).abs() <= values * error).all()
    scales = ops.quantize(values, layout)[: 2 * 512].view(torch.bfloat16).double()
    assert (scales * LARGEST_LEVEL[bits] >= values[::8].double() * (1 - 2.0**-24)).all()


@pytest.mark.parametrize("bits", QMAX)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_block_with_nan_or_inf_decodes_to_nan(bits, poison):
    values = torch.ones(3 * 64)
    values[64 + 5] = poison
    layout = WireLayout([Segment(3 * 64, bits)], 64)
    wire = ops.quantize(values, layout)
    assert wire[:6].view(torch.int16)[1] == SCALE_NAN and not wire[layout.parts[0].codes :][8 * bits : 16 * bits].any()
    decoded = ops.dequantize(wire, layout, dtype=torch.bfloat16).view(3, 64)
    assert decoded[1].isnan().all() and not decoded[[0, 2]].isnan().any()


@pytest.mark.parametrize("bits", QMAX)
def test_tiny_blocks_decode_to_positive_zero(bits):
    just_below = LARGEST_LEVEL[bits] * 2.0**-100 * (1 - 2.0**-7)
    values = torch.tensor([-0.0, 1e-45, -1e-38, -just_below, -LARGEST_LEVEL[bits] * 2.0**-100]).repeat_interleave(64)
    layout = WireLayout([Segment(values.numel(), bits)], 64)
    decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
    assert torch.equal(decoded[: 4 * 64].view(torch.int32), torch.zeros(4 * 64, dtype=torch.int32))
    assert torch.equal(decoded[4 * 64 :], values[4 * 64 :])


@pytest.mark.parametrize(
    ("bits", "values", "packed"),
    [
        (4, [49.0, -49.0, 1.0, 0.0, -9.0], [0x97, 0x01, 0x0D]),
        (3, [9.0, -9.0, 1.0, 0.0, -1.0], [0b01_101_011, 0b0_111_000_0]),
        (2, [1.0, -1.0, 1.0, 0.0, -1.0], [0b00_01_11_01, 0b11]),
    ],
)
def test_first_codes_are_in_the_lowest_bits(bits, values, packed):
    wire = ops.quantize(torch.tensor(values), WireLayout([Segment(5, bits)], 8))
    assert wire.tolist() == [0x80, 0x3F, *[0] * 14, *packed, *[0] * (16 - len(packed))]


def test_slice_rows_permute():
    """Rank order y * N + x to [x, y] and back."""
    num_nodes, ranks_per_node, n = 3, 2, 40
    layout = WireLayout([Segment(n, 8)], 8)
    values = torch.randn(num_nodes, ranks_per_node, n)
    wire = ops.quantize(values, layout, slice_rows=num_nodes)
    assert torch.equal(wire, ops.quantize(values.transpose(0, 1).contiguous(), layout))
    back = ops.dequantize(wire, layout, dtype=torch.float32, slice_rows=ranks_per_node)
    assert torch.equal(back, ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32))


def test_sum_is_fp32_in_source_order():
    layout = WireLayout([Segment(64, None)], 64, torch.float32)
    sources = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])[:, None, None].expand(4, 2, 64).contiguous()
    wire = ops.quantize(sources, layout)
    total = ops.dequantize_sum(wire, layout, num_sources=4, scale=0.5)
    assert total.shape == (2, 64) and (total == 0.0).all()  # 2^24 + 1 + 1 is 2^24 in this order
    total = ops.dequantize_sum(wire, layout, num_sources=4, initial=torch.full((2, 64), -(2.0**24)))
    assert (total == 2.0 - 2.0**24).all()


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
