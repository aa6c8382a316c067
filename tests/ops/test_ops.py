"""The operators of hf_zeropp/ops.py: the format's promises, and compiled kernels against the reference, bit for bit."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import COMPILED, bits_equal, cases, needs_compiled, unaligned, wires_equal
from torch._subclasses import FakeTensorMode

from hf_zeropp import ops
from hf_zeropp.ops import native
from hf_zeropp.ops.format import (
    CODES_AT_A_BYTE,
    FLOAT_DTYPES,
    GAP,
    QMAX,
    ROTATION_SLICE,
    SCALE_NAN,
    Segment,
    WireLayout,
)
from hf_zeropp.ops.kernels import _choose_at_import

pytestmark = pytest.mark.usefixtures("restore_kernels")

# ---- Compiled kernels against the reference.


def everything(layout, out_layout, rows, columns, values, dtype, initial):
    """Every operator, on whatever kernels are set. NaNs of raw fp32 segments are only comparable decoded."""
    rotate = layout.block % ROTATION_SLICE == 0
    wire = unaligned(ops.quantize(values, layout, slice_rows=rows))
    rotated = unaligned(ops.quantize(values, layout, slice_rows=rows, rotate=rotate))
    summed = ops.dequantize_sum_quantize(wire, layout, out_layout, num_sources=rows, initial=initial)
    sum_arguments = dict(num_sources=rows, initial=initial, scale=1 / 3, dtype=dtype)
    return {
        "wire": (wire, layout),
        "rotated": (rotated, layout),
        "decoded": (ops.dequantize(wire, layout, dtype=dtype, slice_rows=columns), None),
        "sum": (ops.dequantize_sum(wire, layout, **sum_arguments), None),
        "rotated back": (ops.dequantize_sum(rotated, layout, rotate=rotate, **sum_arguments), None),
        "summed": (summed, out_layout),
    }


@needs_compiled
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from(FLOAT_DTYPES), st.booleans())
def test_compiled_equals_reference(case, dtype, with_initial):
    layout, _, _, columns, values = case
    initial = torch.linspace(-1, 1, columns * layout.numel) if with_initial else None
    ops.set_kernels("reference")
    expected = everything(*case, dtype, initial)
    for name in COMPILED:
        ops.set_kernels(name)
        actual = everything(*case[:4], unaligned(values), dtype, None if initial is None else unaligned(initial))
        for result, (one, result_layout) in actual.items():
            other, _ = expected[result]
            equal = bits_equal(one, other) if result_layout is None else wires_equal(one, other, result_layout)
            assert equal, f"{name}, {result}"


@pytest.mark.parametrize("kernels", [*COMPILED, "reference"])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(1, 5))
def test_chunks_do_to_their_elements_what_the_whole_does(kernels, case, count):
    layout, _, rows, columns, values = case
    ops.set_kernels(kernels)
    pieces = layout.chunks(count)
    wires = [ops.quantize(values, piece, slice_rows=rows) for piece in pieces]
    whole = ops.quantize(values, layout, slice_rows=rows)
    decoded, total = torch.empty_like(values), torch.ones(columns * layout.numel)
    for wire, piece in zip(wires, pieces, strict=True):
        ops.dequantize(wire, piece, dtype=values.dtype, slice_rows=columns, out=decoded)
        ops.dequantize_sum(wire, piece, num_sources=rows, initial=total, out=total)
    assert bits_equal(decoded, ops.dequantize(whole, layout, dtype=values.dtype, slice_rows=columns))
    initial = torch.ones_like(total)
    assert bits_equal(total, ops.dequantize_sum(whole, layout, num_sources=rows, initial=initial).flatten())


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
def test_every_quotient_of_bf16(bits):
    """Every largest value of a block, and below it every value that does not plainly encode to zero."""
    below = torch.arange(0x3C80, 0x4300, dtype=torch.int16).view(torch.bfloat16)  # 2^-6 to 2^7
    first = {8: 0x4280, 4: 0x4000, 3: 0x4000, 2: 0x3F80}[bits]
    largest = torch.arange(first, first + 128, dtype=torch.int16).view(torch.bfloat16)  # every significand
    rows = [torch.cat([below[below <= top], -below[below <= top]]) for top in largest]
    block = max(map(len, rows))
    values = torch.stack([torch.nn.functional.pad(row, (0, block - len(row))) for row in rows])
    layout = WireLayout([Segment(values.numel(), bits)], block)
    ops.set_kernels("reference")
    expected = ops.quantize(values, layout)
    for name in COMPILED:
        ops.set_kernels(name)
        assert torch.equal(ops.quantize(values, layout), expected), name


def test_elements_in_gaps_are_never_made_up():
    layout = WireLayout([Segment(64, 8), Segment(64, GAP)], 32)
    with pytest.raises(ValueError, match="expected `out` for a layout with gaps"):
        ops.dequantize(ops.quantize(torch.ones(128), layout), layout, dtype=torch.float32)


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
def test_compiled_equals_reference_around_ties(bits):
    """Every scale mantissa, every code boundary, and the floats next to it: where a wrong division would show."""
    scales = (torch.arange(128, dtype=torch.int32) + 0x3F80 << 16).view(torch.float32)
    ties = torch.arange(QMAX[bits]) + 0.5
    ulps = torch.arange(-3, 4, dtype=torch.int32)
    values = ((scales[:, None] * ties).view(torch.int32)[..., None] + ulps).view(torch.float32).flatten(1)
    values = torch.cat([scales[:, None] * QMAX[bits], values, -values], dim=1)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % CODES_AT_A_BYTE))
    layout = WireLayout([Segment(values.numel(), bits)], values.shape[1])
    ops.set_kernels("reference")
    expected = ops.quantize(values, layout)
    stored = expected[: 2 * len(scales)].view(torch.bfloat16).float()
    assert torch.equal(stored, scales)
    for name in COMPILED:
        ops.set_kernels(name)
        assert torch.equal(ops.quantize(values, layout), expected), name


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
def test_every_16_bit_float_in_and_out(bits):
    """All bf16 and fp16 values, NaNs and denormals included, encoded and as raw; results of all three dtypes."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    layout = WireLayout([Segment(1 << 15, bits), Segment(1 << 15, None)], 64, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        values = patterns.view(dtype)
        for one in (values, values.flip(0)):
            results = []
            for name in ["reference", *COMPILED]:
                ops.set_kernels(name)
                wire = ops.quantize(one, layout)
                results.append([ops.dequantize(wire, layout, dtype=out) for out in FLOAT_DTYPES])
            for result in results[1:]:
                assert all(map(bits_equal, result, results[0]))


def test_fp32_to_16_bit_conversion():
    """Around every rounding boundary of fp16, as raw; also the large and the small."""
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middle = (halves[:-1] + halves[1:]) / 2
    values = (middle.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)).flatten()
    values = torch.cat([values.view(torch.float32), torch.tensor([65519.99, 65520.0, 1e30, 1e-30, math.inf])])
    for dtype in (torch.bfloat16, torch.float16):
        layout = WireLayout([Segment(values.numel(), None)], 64, dtype)
        for name in ops.kernel_info().available:
            ops.set_kernels(name)
            decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=dtype)
            assert bits_equal(decoded, values.to(dtype)), name


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("name", ops.kernel_info().available)
def test_flush_to_zero_changes_nothing(name, flush):
    exponents = torch.linspace(-149, 120, 64 * 256)
    values = torch.exp2(exponents) * torch.where(torch.arange(64 * 256) % 2 == 0, 1.0, -1.0)
    layout = WireLayout([Segment(values.numel(), 8), Segment(values.numel(), 4)], 64)
    values = values.repeat(2)
    ops.set_kernels("reference")
    expected = ops.quantize(values, layout)
    ops.set_kernels(name)
    if not torch.set_flush_denormal(flush) and flush:
        pytest.skip("this machine has no flush-to-zero mode")
    try:
        wire = ops.quantize(values, layout)
        decoded = ops.dequantize(wire, layout, dtype=torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(wire, expected)
    assert torch.equal(decoded, ops.dequantize(wire, layout, dtype=torch.float32))


@needs_compiled
def test_threads_change_nothing():
    layout = WireLayout([Segment(300_001, 8), Segment(77, None), Segment(200_000, 4)], 128)
    values = torch.randn(2 * layout.numel)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            wire = ops.quantize(values, layout, slice_rows=2)
            results.append(
                [
                    wire,
                    ops.dequantize(wire, layout, dtype=torch.bfloat16),
                    ops.dequantize_sum(wire, layout, num_sources=2),
                    ops.dequantize_sum_quantize(wire, layout, layout, num_sources=2),
                ]
            )
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


def test_compiled_library_is_there():
    """Everything above would pass without it, slowly."""
    if os.environ.get("ZEROPP_KERNELS") == "reference":
        pytest.skip("ZEROPP_KERNELS=reference asks for none")
    info = ops.kernel_info()
    assert info.reason is None and info.library and info.cpu != "reference"


# ---- What the format promises, whichever kernels run.


@pytest.mark.parametrize("bits", QMAX)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_round_trip_error_is_half_a_step(bits, dtype):
    block, n = 64, 64 * 100
    values = (torch.randn(n) * torch.logspace(-3, 3, n)).to(dtype)
    layout = WireLayout([Segment(n, bits)], block)
    decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
    amax = values.float().view(-1, block).abs().amax(1, keepdim=True)
    step = amax / QMAX[bits] * (1 + 2.0**-7)  # rounding the scale up to bf16 costs at most one part in 128
    error = (decoded - values.float()).view(-1, block).abs()
    assert (error <= step / 2 * (1 + 1e-5)).all()
    assert (error > step / 8).any()


@pytest.mark.parametrize("bits", QMAX)
def test_the_maximum_is_never_clipped(bits):
    """In a block of its like, a value is coded as qmax; the scale was rounded up, so it decodes to no less."""
    values = (torch.rand(512) + 1.0).repeat_interleave(8)
    layout = WireLayout([Segment(4096, bits)], 8)
    decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
    assert ((decoded - values).abs() <= values / (2 * QMAX[bits]) * (1 + 2.0**-7)).all()
    scales = ops.quantize(values, layout)[: 2 * 512].view(torch.bfloat16).double()
    assert (scales * QMAX[bits] >= values[::8].double() * (1 - 2.0**-24)).all()


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
    just_below = QMAX[bits] * 2.0**-100 * (1 - 2.0**-7)
    values = torch.tensor([-0.0, 1e-45, -1e-38, -just_below, -QMAX[bits] * 2.0**-100]).repeat_interleave(64)
    layout = WireLayout([Segment(values.numel(), bits)], 64)
    decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
    assert torch.equal(decoded[: 4 * 64].view(torch.int32), torch.zeros(4 * 64, dtype=torch.int32))
    assert torch.equal(decoded[4 * 64 :], values[4 * 64 :])


@pytest.mark.parametrize(
    ("bits", "values", "packed"),
    [
        (4, [7.0, -7.0, 1.0, 0.0, -3.0], [0x97, 0x01, 0x0D]),
        (3, [3.0, -3.0, 1.0, 0.0, -1.0], [0b01_101_011, 0b0_111_000_0]),
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


def test_empty():
    for layout in (WireLayout([], 64), WireLayout([Segment(0, 4), Segment(0, None)], 64)):
        wire = ops.quantize(torch.empty(0), layout)
        assert wire.shape == (0,)
        assert ops.dequantize(wire, layout, dtype=torch.float16).shape == (0,)
        assert ops.dequantize_sum(wire, layout, num_sources=4).shape == (0, 0)
    layout = WireLayout([Segment(10, 8)], 64)
    assert ops.quantize(torch.empty(0, 10), layout).shape == (0,)


# ---- `out`, checks, and life inside PyTorch.

LAYOUT = WireLayout([Segment(300, 8), Segment(5, None), Segment(0, 8), Segment(33, 4)], 64)
LARGE = WireLayout([Segment(6_000_001, 8), Segment(7, None), Segment(5_000_001, 4)], 256)  # results are streamed


@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["small", "large"])
def test_out_is_filled_completely(layout):
    values = torch.randn(2, layout.numel)
    wire = ops.quantize(values, layout)
    calls = [
        (wire, lambda out: ops.quantize(values, layout, out=out)),
        (
            ops.dequantize(wire, layout, dtype=torch.bfloat16),
            lambda out: ops.dequantize(wire, layout, dtype=torch.bfloat16, out=out),
        ),
        (
            ops.dequantize_sum(wire, layout, num_sources=2),
            lambda out: ops.dequantize_sum(wire, layout, num_sources=2, out=out),
        ),
        (
            ops.dequantize_sum_quantize(wire, layout, layout, num_sources=2),
            lambda out: ops.dequantize_sum_quantize(wire, layout, layout, num_sources=2, out=out),
        ),
    ]
    for expected, call in calls:
        for poison in (0x00, 0xA5):
            guarded = torch.full((expected.nbytes + 64,), poison, dtype=torch.uint8)
            out = guarded[32:-32].view(expected.dtype)
            assert call(out) is out and torch.equal(out, expected.flatten())
            assert (guarded[:32] == poison).all() and (guarded[-32:] == poison).all()


def operator_arguments(layout):
    values = torch.randn(4, layout.numel)
    wire = ops.quantize(values, layout)
    initial = torch.randn(2, layout.numel)
    spec = layout.spec
    return {
        "quantize": ((values, spec, 2, True), wire),
        "dequantize": ((wire, spec, torch.bfloat16, 2), values.bfloat16()),
        "dequantize_sum": ((wire, spec, 2, initial, 0.5, torch.float16, True), initial.half()),
        "dequantize_sum_quantize": ((wire, spec, spec, 2, None), wire[: len(wire) // 2].clone()),
    }


@pytest.mark.parametrize("name", ["quantize", "dequantize", "dequantize_sum", "dequantize_sum_quantize"])
def test_opcheck(name):
    args, out = operator_arguments(LAYOUT)[name]
    torch.library.opcheck(getattr(torch.ops.zeropp, name), args)
    torch.library.opcheck(getattr(torch.ops.zeropp, f"{name}_out"), (*args, out))


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


def test_fake_tensors():
    with FakeTensorMode():
        values = torch.empty(4, LAYOUT.numel)
        wire = ops.quantize(values, LAYOUT, slice_rows=2)
        assert wire.shape == (4 * LAYOUT.nbytes,) and wire.dtype == torch.uint8
        total = ops.dequantize_sum(wire, LAYOUT, num_sources=2, dtype=torch.bfloat16)
        assert total.shape == (2, LAYOUT.numel) and total.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="whole slices"):
            ops.quantize(values[:, 1:].contiguous(), LAYOUT)


WIRE = torch.zeros(4 * LAYOUT.nbytes, dtype=torch.uint8)
VALUES = torch.zeros(4, LAYOUT.numel)
OTHER = WireLayout([Segment(LAYOUT.numel, 8)], 64)
LAYOUT_WITH_GAP = WireLayout([*LAYOUT.segments[:-1], Segment(33, GAP)], 64)
BLOCKS_OF_48 = WireLayout(LAYOUT.segments, 48)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (TypeError, "input of dtype.*got torch.int32", lambda: ops.quantize(VALUES.int(), LAYOUT)),
        (ValueError, "input contiguous.*strides", lambda: ops.quantize(VALUES.t(), LAYOUT)),
        (ValueError, f"slices of {LAYOUT.numel} elements, got 7", lambda: ops.quantize(torch.zeros(7), LAYOUT)),
        (ValueError, "slice_rows.*divides 4 slices, got 3", lambda: ops.quantize(VALUES, LAYOUT, slice_rows=3)),
        (ValueError, "multiple of 32 to rotate, got 48", lambda: ops.quantize(VALUES, BLOCKS_OF_48, rotate=True)),
        (
            ValueError,
            "dequantize_sum: expected a block that is a multiple of 32",
            lambda: ops.dequantize_sum(WIRE, BLOCKS_OF_48, num_sources=2, rotate=True),
        ),
        (ValueError, "slice_rows >= 1", lambda: ops.quantize(VALUES, LAYOUT, slice_rows=0)),
        (ValueError, "out with .* elements", lambda: ops.quantize(VALUES, LAYOUT, out=WIRE[1:])),
        (TypeError, "out of dtype torch.uint8", lambda: ops.quantize(VALUES, LAYOUT, out=WIRE.char())),
        (ValueError, "on cpu, got meta", lambda: ops.quantize(VALUES, LAYOUT, out=WIRE.to("meta"))),
        (TypeError, "wire of dtype torch.uint8", lambda: ops.dequantize(VALUES, LAYOUT, dtype=torch.float32)),
        (ValueError, "wire to hold whole", lambda: ops.dequantize(WIRE[1:], LAYOUT, dtype=torch.float32)),
        (TypeError, "got torch.float64", lambda: ops.dequantize(WIRE, LAYOUT, dtype=torch.float64)),
        (TypeError, "out of dtype", lambda: ops.dequantize(WIRE, LAYOUT, dtype=torch.float16, out=VALUES)),
        (ValueError, "num_sources.*got 3", lambda: ops.dequantize_sum(WIRE, LAYOUT, num_sources=3)),
        (
            TypeError,
            "initial of dtype torch.float32",
            lambda: ops.dequantize_sum(WIRE, LAYOUT, num_sources=2, initial=VALUES.half()),
        ),
        (
            ValueError,
            f"initial with {2 * LAYOUT.numel} elements",
            lambda: ops.dequantize_sum(WIRE, LAYOUT, num_sources=2, initial=VALUES),
        ),
        (
            ValueError,
            "equal segment sizes, got .*300.* and .338.",
            lambda: ops.dequantize_sum_quantize(WIRE, LAYOUT, OTHER, num_sources=2),
        ),
        (
            ValueError,
            "with the same gaps",
            lambda: ops.dequantize_sum_quantize(WIRE, LAYOUT, LAYOUT_WITH_GAP, num_sources=2),
        ),
        (ValueError, "expected auto, avx512.*got 'sse9'", lambda: ops.set_kernels("sse9")),
    ],
)
def test_errors_say_expected_got_and_remedy(error, match, call):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("name", ["reference", *COMPILED])
def test_environment_forces_kernels(name, recwarn):
    _choose_at_import({"ZEROPP_KERNELS": name})
    assert ops.kernel_info().cpu == name and not recwarn


def test_environment_is_read_at_import():
    code = "import warnings; warnings.simplefilter('error'); from hf_zeropp import ops; print(ops.kernel_info().cpu)"
    name = (COMPILED or ["reference"])[-1]
    environment = {**os.environ, "ZEROPP_KERNELS": name}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == name, run.stderr


def test_without_library_the_reference_runs_with_one_warning(monkeypatch):
    monkeypatch.setattr(native, "library_path", lambda device_type: None)
    native.cpu_library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="ZEROPP_KERNELS=avx2.*compiler.*available here: reference"):
            ops.set_kernels("avx2")
        with pytest.warns(UserWarning, match="C\\+\\+ compiler") as caught:
            _choose_at_import({})
        assert len(caught) == 1 and ops.kernel_info().cpu == "reference" and ops.kernel_info().library is None
    finally:
        monkeypatch.undo()
        native.cpu_library.cache_clear()
