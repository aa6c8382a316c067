"""Compiled kernels against the PyTorch reference, bit for bit, on every instruction set that this machine runs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import COMPILED, boundary_values, calls, make_case, needs_compiled, scale_significands
from op_checks import check_everything, placed, same_bits

from hf_zeropp import ops
from hf_zeropp.ops import native
from hf_zeropp.ops.format import CODES_AT_A_BYTE, FLOAT_DTYPES, LARGEST_LEVEL, QMAX, Segment, WireLayout
from hf_zeropp.ops.reference_kernels import ReferenceKernels
from hf_zeropp.ops.register import OPERATORS

pytestmark = [pytest.mark.usefixtures("restore_kernels"), pytest.mark.one_rank]

SEEDS = st.integers(0, 2**32 - 1)


def test_every_operator_is_compared():
    """An operator without an entry in op_cases.calls would pass every test of this file."""
    # test_frozen_format.py compares the first, test_changes.py the second.
    others = {name for name in OPERATORS if name.startswith("frozen_") or name.endswith("_changes")}
    assert calls(make_case(0)).keys() == OPERATORS.keys() - others


def test_compiled_library_is_there():
    """Everything below would be skipped without it."""
    info = ops.kernel_info()
    assert info.reason is None and info.library
    assert info.cpu != "reference" or not COMPILED


@needs_compiled
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(SEEDS, st.sampled_from([2100, 2100, 2100, 9000]))
def test_every_operator_equals_the_reference(seed, max_numel):
    kernels = [ops.CompiledKernels(native.cpu_library()[0], name) for name in COMPILED]
    check_everything(kernels, make_case(seed, max_numel=max_numel), expected=ReferenceKernels())


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
def test_every_quotient_of_bf16(bits):
    """Every largest value of a block, and below it every value that does not plainly encode to zero."""
    below = torch.arange(0x3C80, 0x4300, dtype=torch.int16).view(torch.bfloat16)  # 2^-6 to 2^7
    first = 0x3F80 + 0x80 * (LARGEST_LEVEL[bits].bit_length() - 1)  # the power of two below the largest level
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


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
def test_every_boundary_between_codes(bits):
    """Every significand of a scale, every boundary, and the floats beside it: a wrong division would show there."""
    scales = scale_significands()
    values = torch.cat([scales[:, None] * LARGEST_LEVEL[bits], boundary_values(bits)], dim=1)
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
                assert all(map(same_bits, result, results[0]))


@pytest.mark.parametrize("bits", QMAX)
def test_the_largest_floats_make_no_nan(bits):
    """Rounded up to bf16, the scale of a block with the largest floats in 2 bits would be Inf, and 0 times it NaN.

    Wider codes times their scale may pass the largest float by the scale's rounding, and are Inf then.
    """
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([largest, -largest, 0.0, 1.0] + [3.39e38] * 28)
    layout = WireLayout([Segment(values.numel(), bits)], 32)
    for name in ops.kernel_info().available:
        ops.set_kernels(name)
        decoded = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
        assert not decoded.isnan().any() and decoded[2] == decoded[3] == 0, name
        assert torch.equal(decoded.clamp(-largest, largest).sign(), values.where(values.abs() > 1, 0.0).sign()), name
        if bits == 2:
            assert (decoded - values).abs().max() <= largest / 128, name


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
            assert same_bits(decoded, values.to(dtype)), name


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
@pytest.mark.parametrize("bits", QMAX)
def test_threads_and_streaming_change_nothing(bits):
    """Slices large enough for several threads, and for results that bypass the caches; addresses aligned and not."""
    layout = WireLayout([Segment(9_000_001, bits), Segment(77, None), Segment(2_000_000, 4)], 128)
    base_layout = WireLayout([Segment(segment.numel, None) for segment in layout.segments], 128)
    values, threads = torch.randn(layout.numel), torch.get_num_threads()
    results = []
    try:
        for name, count in ((COMPILED[0], 1), (COMPILED[0], 2), (COMPILED[-1], 2)):
            ops.set_kernels(name)
            torch.set_num_threads(count)
            input = placed(values, len(results))
            base = ops.quantize(input * 0.9, base_layout)
            wire = ops.quantize_difference(input, base, base_layout, layout)
            ops.dequantize_update(wire, layout, base, base_layout, out=base)
            decoded = ops.dequantize(wire, layout, dtype=torch.bfloat16)
            total = ops.dequantize_sum(wire, layout, num_sources=1)
            sent = ops.dequantize_sum_quantize(wire, layout, layout, num_sources=1, initial=input)
            results.append((ops.quantize(input, layout), wire, base, decoded, total, sent))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
