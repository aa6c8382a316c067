"""The operators of weight deltas and of error feedback, and rotations: compiled kernels against the reference, and promises."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import BLOCKS, COMPILED, cases, codecs, needs_compiled, slices, unaligned, wires_equal
from torch._subclasses import FakeTensorMode

from hf_zeropp import ops
from hf_zeropp.ops.format import FLOAT_DTYPES, QMAX, ROTATION_SLICE, Segment, WireLayout
from hf_zeropp.ops.reference import rotate_slices

pytestmark = pytest.mark.usefixtures("restore_kernels")
every_example = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def each_kernels():
    for name in ["reference", *COMPILED]:
        ops.set_kernels(name)
        yield name


# ---- Compiled kernels against the reference.


@needs_compiled
@every_example
@given(cases(), st.data())
def test_deltas_equal_reference(case, data):
    layout, base_layout, _, _, values = case
    ops.set_kernels("reference")
    base = unaligned(ops.quantize(data.draw(slices(values.numel())), base_layout))
    wire = unaligned(ops.quantize(data.draw(slices(values.numel())), layout))
    expected_difference = ops.quantize_difference(values, base, base_layout, layout)
    expected_update = ops.dequantize_update(wire, layout, base, base_layout)
    for name in COMPILED:
        ops.set_kernels(name)
        difference = ops.quantize_difference(unaligned(values), base, base_layout, layout)
        assert wires_equal(difference, expected_difference, layout), name
        update = ops.dequantize_update(wire, layout, base, base_layout)
        assert wires_equal(update, expected_update, base_layout), name
        in_place = unaligned(base)
        assert ops.dequantize_update(wire, layout, in_place, base_layout, out=in_place) is in_place
        assert wires_equal(in_place, expected_update, base_layout), f"{name}, in place"


@st.composite
def residual_layouts(draw, out_layout):
    """For the parts that `out_layout` quantizes, in its blocks."""
    widths = [bits for bits in codecs(out_layout.block) if bits]
    segments = [
        Segment(segment.numel, draw(st.sampled_from(widths)) if segment.bits else None)
        for segment in out_layout.segments
    ]
    return WireLayout(segments, out_layout.block, draw(st.sampled_from(FLOAT_DTYPES)))


@needs_compiled
@every_example
@given(
    cases(),
    st.data(),
    st.sampled_from([1.0, 0.8]),
    st.sampled_from([1.0, 0.3]),
    st.sampled_from(["wire", "both", "sum"]),
)
def test_feedback_equals_reference(case, data, decay, rescale, start):
    layout, out_layout, rows, columns, values = case
    residual_layout = data.draw(residual_layouts(out_layout))
    ops.set_kernels("reference")
    left_out = ops.quantize(data.draw(slices(columns * layout.numel)), residual_layout)
    wire = None if start == "sum" else unaligned(ops.quantize(values, layout))
    initial = None if start == "wire" else unaligned(data.draw(slices(columns * layout.numel, [torch.float32])))
    rotate = out_layout.block % ROTATION_SLICE == 0
    results = {}
    for name in each_kernels():
        residual = unaligned(left_out)
        wires = [
            ops.quantize_with_feedback(
                *(wire, layout, out_layout, residual, residual_layout),
                num_sources=0 if wire is None else rows,
                **dict(initial=initial, rotate=rotate, decay=decay, rescale=rescale),
            )
            for _ in range(2)
        ]
        results[name] = *wires, residual
    for name in COMPILED:
        for one, other in zip(results[name][:2], results["reference"][:2], strict=True):
            assert wires_equal(one, other, out_layout), f"{name}, wire"
        assert torch.equal(results[name][2], results["reference"][2]), f"{name}, residual"


@needs_compiled
@pytest.mark.parametrize("bits", QMAX)
def test_threads_and_streaming_change_nothing(bits):
    """Slices large enough for several threads, and for results that bypass the caches."""
    layout = WireLayout([Segment(9_000_001, bits), Segment(77, None), Segment(2_000_000, 4)], 128)
    base_layout = WireLayout([Segment(segment.numel, None) for segment in layout.segments], 128)
    residual_layout = WireLayout([Segment(s.numel, s.bits and 8) for s in layout.segments], 128)
    values, threads = torch.randn(layout.numel), torch.get_num_threads()
    results = []
    try:
        for name, count in ((COMPILED[0], 1), (COMPILED[0], 2), (COMPILED[-1], 2)):
            ops.set_kernels(name)
            torch.set_num_threads(count)
            base, residual = (
                ops.quantize(values * 0.9, base_layout),
                torch.zeros(residual_layout.nbytes, dtype=torch.uint8),
            )
            wire = ops.quantize_difference(values, base, base_layout, layout)
            ops.dequantize_update(wire, layout, base, base_layout, out=base)
            sent = ops.quantize_with_feedback(
                wire, layout, layout, residual, residual_layout, num_sources=1, initial=values, rotate=True
            )
            results.append((ops.quantize(values, layout, rotate=True), wire, base, sent, residual))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("block", BLOCKS)
def test_chunks_do_to_their_elements_what_the_whole_does(block):
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

    for _ in each_kernels():
        pieces = [
            results(*chunks)
            for chunks in zip(*(x.chunks(3) for x in (layout, out_layout, residual_layout)), strict=True)
        ]
        for index, (wire, whole_layout) in enumerate(results(layout, out_layout, residual_layout)):
            decoded = torch.empty(2, layout.numel)
            for piece in pieces:
                ops.dequantize(piece[index][0], piece[index][1], dtype=torch.float32, out=decoded)
            assert torch.equal(decoded.flatten(), ops.dequantize(wire, whole_layout, dtype=torch.float32)), index


# ---- What the operators promise, whichever kernels run.


def test_rotating_twice_gives_the_values_back():
    """The matrix is its own inverse, and each of 5 sums and a product loses half an ulp: of 32 values of norm r, 6 * 2^-24 r.

    Two rotations may be off by 12 * 2^-24 of a slice's norm, and so may any element of it.
    """
    values = torch.randn(1000, ROTATION_SLICE) * torch.logspace(-10, 10, 1000)[:, None]
    twice = rotate_slices(rotate_slices(values))
    norms = values.double().norm(dim=1, keepdim=True)
    assert ((twice.double() - values.double()).abs() <= 12 * 2.0**-24 * norms).all()
    assert torch.allclose(rotate_slices(values).double().norm(dim=1, keepdim=True), norms, rtol=1e-6)


def test_rotation_is_the_hadamard_matrix():
    matrix = torch.ones(1, 1)
    while len(matrix) < ROTATION_SLICE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    assert torch.equal(rotate_slices(torch.eye(ROTATION_SLICE)), matrix * torch.tensor(ROTATION_SLICE**-0.5))


@pytest.mark.parametrize("bits", [8, 4, 3])  # with 2 bits, errors are as large as values either way
def test_rotation_spreads_a_large_element(bits):
    """One element among small ones takes the codes of its whole block; rotated, every element of its slice shares it."""
    torch.manual_seed(0)
    values = torch.randn(64, 128)
    values[:, 5] = 20.0
    layout = WireLayout([Segment(values.numel(), bits), Segment(8, bits), Segment(40, None)], 128)
    values = torch.cat([values.flatten(), torch.ones(48)])
    for _ in each_kernels():
        rotated = ops.quantize(values, layout, rotate=True)
        back = ops.dequantize_sum(rotated, layout, num_sources=1, rotate=True).flatten()
        straight = ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)
        assert (back - values).square().mean() < (straight - values).square().mean() / 2
        assert torch.equal(back[-48:], straight[-48:]), "what is no whole slice, and raw parts, stay"


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
    for _ in each_kernels():
        base = torch.zeros(base_layout.nbytes, dtype=torch.uint8)
        for _ in range(50):
            wire = ops.quantize_difference(target, base, base_layout, layout)
            ops.dequantize_update(wire, layout, base, base_layout, out=base)
        reached = ops.dequantize(base, base_layout, dtype=torch.float32).view_as(target)
        assert ((reached - target).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("rotate", [False, True])
def test_what_one_call_leaves_out_later_ones_add(rotate):
    """After k rounds, the sum of what was sent is the sum of what was meant, but for the residual and its own rounding."""
    torch.manual_seed(0)
    n = 4096
    layout, residual_layout = WireLayout([Segment(n, 4)], 128), WireLayout([Segment(n, 8)], 128)
    for _ in each_kernels():
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
    for _ in each_kernels():
        residual = ops.quantize(before, residual_layout)
        left_out = ops.dequantize(residual, residual_layout, dtype=torch.float32) * 0.5
        wire = ops.quantize_with_feedback(
            *(None, layout, layout, residual, residual_layout), num_sources=0, initial=values, decay=0.25, rescale=0.5
        )
        error = values + left_out - ops.dequantize(wire.flatten(), layout, dtype=torch.float32)
        assert torch.equal(residual, ops.quantize(left_out * 0.75 + error * 0.25, residual_layout))


def test_a_poisoned_residual_is_forgotten():
    """A step that overflows leaves NaN behind; the next one starts anew there."""
    layout, residual_layout = WireLayout([Segment(256, 4)], 128), WireLayout([Segment(256, 8)], 128)
    values = torch.randn(1, 256)
    overflown = values.clone()
    overflown[0, 5] = torch.inf

    def send(values, residual):
        return ops.quantize_with_feedback(
            None, layout, layout, residual, residual_layout, num_sources=0, initial=values
        ).flatten()

    for _ in each_kernels():
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
    for _ in each_kernels():
        wire = ops.quantize_with_feedback(
            None, layout, layout, residual, residual_layout, num_sources=0, initial=initial, rotate=True
        )
        decoded = ops.dequantize(wire.flatten(), layout, dtype=torch.float32)
        assert (residual[:raw] == 0x3A).all() and torch.equal(decoded[:100], initial[0, :100].bfloat16().float())


# ---- Checks, and life inside PyTorch.

LAYOUT = WireLayout([Segment(300, 8), Segment(5, None), Segment(0, 8), Segment(33, 3)], 64)
BASE = WireLayout([Segment(300, None), Segment(5, None), Segment(0, 8), Segment(33, 4)], 32)
RESIDUAL = WireLayout([Segment(300, 8), Segment(5, None), Segment(0, 8), Segment(33, 8)], 64)
VALUES = torch.zeros(2, LAYOUT.numel)
WIRE, LEFT_OUT = torch.zeros(2 * LAYOUT.nbytes, dtype=torch.uint8), torch.zeros(2 * RESIDUAL.nbytes, dtype=torch.uint8)
HELD = torch.zeros(2 * BASE.nbytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "args", "out"),
    [
        ("quantize_difference", (VALUES, HELD, BASE.spec, LAYOUT.spec), WIRE),
        ("dequantize_update", (WIRE, LAYOUT.spec, HELD, BASE.spec), HELD.clone()),
        (
            "quantize_with_feedback",
            (WIRE, LAYOUT.spec, LAYOUT.spec, RESIDUAL.spec, 1, VALUES, True, 0.9, 0.5, LEFT_OUT),
            WIRE.clone(),
        ),
        (
            "quantize_with_feedback",
            (None, LAYOUT.spec, LAYOUT.spec, RESIDUAL.spec, 0, VALUES, False, 1.0, 1.0, LEFT_OUT),
            WIRE.clone(),
        ),
    ],
)
def test_opcheck(name, args, out):
    torch.library.opcheck(getattr(torch.ops.zeropp, name), args)
    torch.library.opcheck(getattr(torch.ops.zeropp, f"{name}_out"), (*args, out))


def test_fake_tensors():
    with FakeTensorMode():
        values, held = torch.empty(2, LAYOUT.numel), torch.empty(2, BASE.nbytes, dtype=torch.uint8)
        wire = ops.quantize_difference(values, held, BASE, LAYOUT)
        assert wire.shape == (2 * LAYOUT.nbytes,) and wire.dtype == torch.uint8
        assert ops.dequantize_update(wire, LAYOUT, held, BASE).shape == (2 * BASE.nbytes,)
        residual = torch.empty(2 * RESIDUAL.nbytes, dtype=torch.uint8)
        sent = ops.quantize_with_feedback(wire, LAYOUT, BASE_QUANTIZED, residual, RESIDUAL, num_sources=1)
        assert sent.shape == (2, BASE_QUANTIZED.nbytes) and sent.dtype == torch.uint8


def test_empty():
    layout, none = WireLayout([Segment(0, 4)], 64), torch.empty(0, dtype=torch.uint8)
    for _ in each_kernels():
        assert ops.quantize_difference(torch.empty(0), none, layout, layout).shape == (0,)
        assert ops.dequantize_update(none, layout, none, layout).shape == (0,)
        assert ops.quantize_with_feedback(none, layout, layout, none, layout, num_sources=2).shape == (0, 0)


BASE_QUANTIZED = WireLayout([Segment(300, 4), Segment(5, None), Segment(0, 8), Segment(33, 2)], 64)
OTHER = WireLayout([Segment(LAYOUT.numel, 8)], 64)


def feedback(wire=WIRE, out_layout=LAYOUT, residual=LEFT_OUT, residual_layout=RESIDUAL, num_sources=1, **options):
    return ops.quantize_with_feedback(
        wire, LAYOUT, out_layout, residual, residual_layout, num_sources=num_sources, **options
    )


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "equal segment sizes", lambda: ops.quantize_difference(VALUES, HELD, OTHER, LAYOUT)),
        (ValueError, "base with .* elements", lambda: ops.quantize_difference(VALUES, HELD[1:], BASE, LAYOUT)),
        (TypeError, "input of dtype", lambda: ops.quantize_difference(VALUES.int(), HELD, BASE, LAYOUT)),
        (ValueError, "equal segment sizes", lambda: ops.dequantize_update(WIRE, LAYOUT, HELD, OTHER)),
        (TypeError, "base of dtype torch.uint8", lambda: ops.dequantize_update(WIRE, LAYOUT, HELD.char(), BASE)),
        (ValueError, "wire to hold whole slices", lambda: ops.dequantize_update(WIRE[1:], LAYOUT, HELD, BASE)),
        (ValueError, r"a decay in \(0, 1\], got 0", lambda: feedback(decay=0.0)),
        (ValueError, r"a decay in \(0, 1\], got 1.5", lambda: feedback(decay=1.5)),
        (ValueError, "a wire, or num_sources=0 and what to start from", lambda: feedback(None, num_sources=0)),
        (
            ValueError,
            "a wire, or num_sources=0 and what to start from",
            lambda: feedback(None, num_sources=1, initial=VALUES),
        ),
        (ValueError, "quantize the parts that out_layout quantizes", lambda: feedback(out_layout=BASE)),
        (
            ValueError,
            "blocks of out_layout, 64, got 32",
            lambda: feedback(residual_layout=WireLayout(RESIDUAL.segments, 32)),
        ),
        (ValueError, "residual with .* elements", lambda: feedback(residual=LEFT_OUT[1:])),
        (
            ValueError,
            "multiple of 32 to rotate, got 48",
            lambda: feedback(
                out_layout=WireLayout(LAYOUT.segments, 48),
                residual_layout=WireLayout(RESIDUAL.segments, 48),
                rotate=True,
            ),
        ),
    ],
)
def test_errors_say_expected_got_and_remedy(error, match, call):
    with pytest.raises(error, match=match):
        call()
