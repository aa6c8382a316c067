"""The byte arithmetic of hf_zeropp/ops/format.py: sizes, alignment, and where the parts of a slice lie."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import widths_of

from hf_zeropp.ops.format import ALIGNMENT, FLOAT_DTYPES, MAX_BLOCK, Segment, WireLayout

pytestmark = pytest.mark.one_rank


@st.composite
def layouts(draw):
    block = draw(st.integers(1, MAX_BLOCK))
    segments = st.builds(Segment, st.integers(0, 5000), st.sampled_from(widths_of(block)))
    return WireLayout(draw(st.lists(segments, max_size=6)), block, draw(st.sampled_from(FLOAT_DTYPES)))


LAYOUTS = layouts()


def bytes_of_segment(numel: int, bits: int, block: int) -> int:
    """Return the bytes that a segment takes on the wire. With 16 or 32 bits it travels unquantized."""
    raw_dtype = torch.float32 if bits == 32 else torch.bfloat16
    return WireLayout([Segment(numel, bits if bits < 16 else None)], block, raw_dtype).nbytes


@pytest.mark.parametrize(
    ("numel", "bits", "block", "expected"),
    [
        (0, 8, 256, 0),
        (1, 8, 256, 16 + 16),
        (257, 8, 256, 16 + 272),
        (4096, 4, 128, 64 + 2048),
        (33, 4, 64, 16 + 32),  # 17 bytes of nibbles
        (43, 3, 64, 16 + 32),  # 17 bytes again
        (65, 2, 64, 16 + 32),
        (7, 16, 256, 16),
        (9, 32, 256, 48),
    ],
)
def test_bytes_of_a_segment(numel, bits, block, expected):
    assert bytes_of_segment(numel, bits, block) == expected


@given(LAYOUTS)
def test_parts_tile_the_slice(layout):
    element = offset = block = 0
    for segment, part in zip(layout.segments, layout.parts, strict=True):
        bits = segment.bits or layout.raw_dtype.itemsize * 8
        assert part.element == element and part.numel == segment.numel and part.bits == (segment.bits or 0)
        assert part.scales == offset and part.first_block == block
        assert part.scales % ALIGNMENT == part.codes % ALIGNMENT == part.end % ALIGNMENT == 0
        blocks = -(-segment.numel // layout.block)
        assert part.codes - part.scales >= (2 * blocks if segment.bits else 0)
        assert part.end - part.codes >= segment.numel * bits / 8
        assert part.end - part.scales == bytes_of_segment(segment.numel, bits, layout.block)
        element, offset, block = element + segment.numel, part.end, block + blocks
    assert (layout.numel, layout.nbytes) == (element, offset)


@given(LAYOUTS)
def test_spec_round_trips(layout):
    assert WireLayout.from_spec(layout.spec) == layout
    assert WireLayout.from_spec(layout.spec) is WireLayout.from_spec(layout.spec)
    assert hash(WireLayout(list(layout.segments), layout.block, layout.raw_dtype)) == hash(layout)


def test_layouts_that_differ_are_unequal():
    layout = WireLayout([Segment(64, 8)], 32)
    assert layout != WireLayout([Segment(64, 4)], 32)
    assert layout != WireLayout([Segment(64, 8)], 64)
    assert layout != WireLayout([Segment(64, 8)], 32, torch.float32)


def test_errors_name_what_was_expected():
    with pytest.raises(ValueError, match="bits 8, 7, 6, 5, 4, 3, 2 or None.*got 9"):
        Segment(10, 9)
    for bits in (7, 6, 5, 3, 2):
        with pytest.raises(ValueError, match=rf"\[{bits}\] bits need a block that is a multiple of 8, got 100"):
            WireLayout([Segment(10, bits)], 100)
    with pytest.raises(ValueError, match="numel >= 0, got -1"):
        Segment(-1, 8)
    for block in (0, MAX_BLOCK + 1):
        with pytest.raises(ValueError, match=f"1..{MAX_BLOCK} elements, got {block}"):
            WireLayout([], block)
    with pytest.raises(TypeError, match="float32, bfloat16 or float16, got torch.int8"):
        WireLayout([], 64, torch.int8)
