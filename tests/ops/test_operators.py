"""The operators within PyTorch: ``out``, tracing, fake tensors, and checks that say what was expected."""

from __future__ import annotations

import pytest
import torch

from hf_zeropp import ops
from hf_zeropp.ops.format import Segment, WireLayout

pytestmark = pytest.mark.one_rank

LAYOUT = WireLayout([Segment(300, 8), Segment(5, None), Segment(0, 8), Segment(33, 4)], 64)
LARGE = WireLayout([Segment(6_000_001, 8), Segment(7, None), Segment(5_000_001, 4)], 256)  # results bypass the caches
BASE = WireLayout([Segment(300, None), Segment(5, None), Segment(0, 8), Segment(33, 4)], 32)
OTHER = WireLayout([Segment(LAYOUT.numel, 8)], 64)

VALUES = torch.zeros(4, LAYOUT.numel)
WIRE = torch.zeros(4 * LAYOUT.nbytes, dtype=torch.uint8)
HELD = torch.zeros(4 * BASE.nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["small", "large"])
def test_out_is_filled_completely(layout):
    values = torch.randn(2, layout.numel)
    wire = ops.quantize(values, layout)
    calls = [
        lambda **out: ops.quantize(values, layout, **out),
        lambda **out: ops.dequantize(wire, layout, dtype=torch.bfloat16, **out),
        lambda **out: ops.dequantize_sum(wire, layout, num_sources=2, **out),
        lambda **out: ops.dequantize_sum_quantize(wire, layout, layout, num_sources=2, **out),
        lambda **out: ops.quantize_difference(values, wire, layout, layout, **out),
        lambda **out: ops.dequantize_update(wire, layout, wire, layout, **out),
    ]
    for call in calls:
        expected = call()
        for poison in (0x00, 0xA5):
            guarded = torch.full((expected.nbytes + 64,), poison, dtype=torch.uint8)
            out = guarded[32:-32].view(expected.dtype)
            assert call(out=out) is out and torch.equal(out, expected.flatten())
            assert (guarded[:32] == poison).all() and (guarded[-32:] == poison).all()


def test_empty(restore_kernels):
    none = torch.empty(0, dtype=torch.uint8)
    for name in ops.kernel_info().available:
        ops.set_kernels(name)
        for layout in (WireLayout([], 64), WireLayout([Segment(0, 4), Segment(0, None)], 64)):
            assert ops.quantize(torch.empty(0), layout).shape == (0,)
            assert ops.dequantize(none, layout, dtype=torch.float16).shape == (0,)
            assert ops.dequantize_sum(none, layout, num_sources=4).shape == (0, 0)
            assert ops.quantize_difference(torch.empty(0), none, layout, layout).shape == (0,)
            assert ops.dequantize_update(none, layout, none, layout).shape == (0,)
        assert ops.quantize(torch.empty(0, 10), WireLayout([Segment(10, 8)], 64)).shape == (0,)


SUMS = torch.zeros(2, LAYOUT.numel)
HALF_WIRE = WIRE[: 2 * LAYOUT.nbytes]


@pytest.mark.parametrize(
    ("name", "arguments", "out"),
    [
        ("quantize", (VALUES, LAYOUT, 2), WIRE),
        ("dequantize", (WIRE, LAYOUT, torch.bfloat16, 2), VALUES.bfloat16()),
        ("dequantize_sum", (WIRE, LAYOUT, 2, SUMS, 0.5, torch.float16), SUMS.half()),
        ("dequantize_sum_quantize", (WIRE, LAYOUT, LAYOUT, 2, None), HALF_WIRE),
        ("quantize_difference", (VALUES, HELD, BASE, LAYOUT), WIRE),
        ("dequantize_update", (WIRE, LAYOUT, HELD, BASE), HELD),
    ],
)
def test_opcheck(name, arguments, out):
    arguments = tuple(value.spec if isinstance(value, WireLayout) else value for value in arguments)
    torch.library.opcheck(getattr(torch.ops.zeropp, name), arguments)
    torch.library.opcheck(getattr(torch.ops.zeropp, f"{name}_out"), (*arguments, out.clone()))


def test_torch_compile():
    def exchange(values, accumulator):
        wire = ops.quantize(values * 2, LAYOUT, slice_rows=2)
        ops.dequantize_sum(wire, LAYOUT, num_sources=2, initial=accumulator, out=accumulator)
        summed = ops.dequantize_sum_quantize(wire, LAYOUT, LAYOUT, num_sources=2)
        return ops.dequantize(summed, LAYOUT, dtype=torch.float32) + accumulator.flatten()

    values, accumulators = torch.randn(4, LAYOUT.numel), [torch.randn(2, LAYOUT.numel)] * 2
    accumulators[1] = accumulators[0].clone()
    expected = exchange(values, accumulators[0])
    compiled = torch.compile(exchange, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(values, accumulators[1]), expected)
    assert torch.equal(*accumulators)


# ---- Errors.


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (TypeError, "^quantize: expected input of dtype.*got torch.int32", lambda: ops.quantize(VALUES.int(), LAYOUT)),
        (ValueError, "input contiguous.*strides", lambda: ops.quantize(VALUES.t(), LAYOUT)),
        (ValueError, f"slices of {LAYOUT.numel} elements, got 7", lambda: ops.quantize(torch.zeros(7), LAYOUT)),
        (ValueError, "slice_rows.*divides 4 slices, got 3", lambda: ops.quantize(VALUES, LAYOUT, slice_rows=3)),
        (ValueError, "^quantize: expected out with .* elements", lambda: ops.quantize(VALUES, LAYOUT, out=WIRE[1:])),
        (ValueError, "on cpu, got meta", lambda: ops.quantize(VALUES, LAYOUT, out=WIRE.to("meta"))),
        (ValueError, "wire to hold whole", lambda: ops.dequantize(WIRE[1:], LAYOUT, dtype=torch.float32)),
        (TypeError, "got torch.float64", lambda: ops.dequantize(WIRE, LAYOUT, dtype=torch.float64)),
        (TypeError, "out of dtype", lambda: ops.dequantize(WIRE, LAYOUT, dtype=torch.float16, out=VALUES)),
        (ValueError, "num_sources.*got 3", lambda: ops.dequantize_sum(WIRE, LAYOUT, num_sources=3)),
        (TypeError, "initial of dtype torch.float32", lambda: sum_from(SUMS.half())),
        (ValueError, f"initial with {2 * LAYOUT.numel} elements", lambda: sum_from(VALUES)),
        (
            ValueError,
            "equal segment sizes, got .*300.* and .338.",
            lambda: ops.dequantize_sum_quantize(WIRE, LAYOUT, OTHER, num_sources=2),
        ),
        (ValueError, "base with .* elements", lambda: ops.quantize_difference(VALUES, HELD[1:], BASE, LAYOUT)),
        (TypeError, "base of dtype torch.uint8", lambda: ops.dequantize_update(WIRE, LAYOUT, HELD.char(), BASE)),
    ],
)
def test_errors_say_expected_got_and_remedy(error, match, call):
    with pytest.raises(error, match=match):
        call()


def sum_from(initial: torch.Tensor) -> torch.Tensor:
    return ops.dequantize_sum(WIRE, LAYOUT, num_sources=2, initial=initial)
