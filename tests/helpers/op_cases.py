"""What the tests of the operators share: random and adversarial cases, and comparisons bit for bit."""

import math
import os

import pytest
import torch
from hypothesis import strategies as st

from hf_zeropp import ops
from hf_zeropp.ops.format import CODES_AT_A_BYTE, FLOAT_DTYPES, MAX_BLOCK, QMAX, Segment, WireLayout

COMPILED = [name for name in ops.kernel_info().available if name != "reference"]
if os.environ.get("ZEROPP_KERNELS") == "reference":
    COMPILED = []
needs_compiled = pytest.mark.skipif(not COMPILED, reason="ZEROPP_KERNELS=reference: nothing to compare")

SPECIALS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 2.0**-100, 2.0**-93, 65519.0, 65520.0, 6e-8, 3e38]
BLOCKS = [1, 2, 3, 16, 63, 64, 96, 100, 128, 256, 1000, MAX_BLOCK - 1, MAX_BLOCK]


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, whichever NaN a NaN is."""
    a, b = (torch.where(t.isnan(), 1.0, t).view(torch.uint8) if t.is_floating_point() else t for t in (a, b))
    return torch.equal(a, b)


def wires_equal(a: torch.Tensor, b: torch.Tensor, layout: WireLayout) -> bool:
    """Byte for byte; where fp32 travels raw, as far as decoding tells: any NaN may stand for another."""
    if layout.raw_dtype == torch.float32 and any(part.bits == 0 for part in layout.parts if part.numel):
        a, b = (ops.dequantize(wire.flatten(), layout, dtype=torch.float32) for wire in (a, b))
    return bits_equal(a.flatten(), b.flatten())


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element further in memory: no vector of them is aligned."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:]


def codecs(block: int) -> list[int | None]:
    """What a segment may travel as in blocks of this size."""
    return [*(bits for bits in QMAX if bits >= 4 or block % CODES_AT_A_BYTE == 0), None]


@st.composite
def cases(draw):
    """Two layouts of the same segment sizes, and K = rows * columns slices of values of every magnitude."""
    block, out_block = draw(st.sampled_from(BLOCKS)), draw(st.sampled_from(BLOCKS))
    sizes = st.sampled_from([0, 1, 2, 15, 63, 65, block - 1, block, block + 1, 2 * block + 33, 5000])
    numels = draw(st.lists(sizes, min_size=1, max_size=5))
    layout, out_layout = (
        WireLayout(
            [Segment(n, draw(st.sampled_from(codecs(b)))) for n in numels], b, draw(st.sampled_from(FLOAT_DTYPES))
        )
        for b in (block, out_block)
    )
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return layout, out_layout, rows, columns, draw(slices(rows * columns * layout.numel))


@st.composite
def slices(draw, numel, dtypes=FLOAT_DTYPES):
    """`numel` values of one magnitude among many, some of them special."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=generator)
    values *= 10.0 ** draw(st.integers(-32, 5))
    if numel:
        for special in draw(st.lists(st.sampled_from(SPECIALS), max_size=3)):
            values[torch.randint(numel, (1,), generator=generator)] = special
    return values.to(draw(st.sampled_from(dtypes)))
