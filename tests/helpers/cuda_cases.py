"""Random and adversarial cases of the operators, for whoever compares CUDA kernels with those of the CPU."""

from __future__ import annotations

import dataclasses
import math
import random

import torch

from hf_zeropp.ops.format import (
    CODES_AT_A_BYTE,
    FLOAT_DTYPES,
    GAP,
    MAX_BLOCK,
    QMAX,
    ROTATION_SLICE,
    Segment,
    WireLayout,
)

SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 2.0**-100, 2.0**-93, 65519.0, 65520.0, 6e-8, 3e38)
ROW_BLOCKS = (32, 64, 128, 256, 512, 1024)  # of the kernels with 16-byte accesses
OTHER_BLOCKS = (1, 2, 3, 16, 63, 96, 100, 160, 1000, 2048, MAX_BLOCK - 1, MAX_BLOCK)
KINDS = ("normal", "spread", "ties", "zeros", "bits")
GUARD = 64
POISON = 0xA5


@dataclasses.dataclass
class Case:
    """Two layouts of the same segment sizes and rows * columns slices of values; `dtype` is what is decoded to.

    The new values that quantize_difference takes differ from `values` by a few percent. quantize_with_feedback encodes what
    `out_layout` says, `columns` slices, and keeps a residual of `residual_layout`, to begin with that of `left_out`.
    """

    layout: WireLayout
    out_layout: WireLayout
    rows: int
    columns: int
    values: torch.Tensor
    initial: torch.Tensor | None
    dtype: torch.dtype
    scale: float
    offset: int  # elements that tensors lie behind an aligned address
    rotate: bool = False  # where blocks are right for it
    residual_layout: WireLayout | None = None
    left_out: torch.Tensor | None = None
    decay: float = 1.0
    rescale: float = 1.0
    without_wire: bool = False  # the sum of quantize_with_feedback is `initial` alone

    def rotates(self, layout: WireLayout) -> bool:
        return self.rotate and layout.block % ROTATION_SLICE == 0

    def __str__(self) -> str:
        return (
            f"{self.layout.spec!r} -> {self.out_layout.spec!r}, {self.rows} x {self.columns} slices of "
            f"{self.values.dtype}, to {self.dtype}, offset {self.offset}, initial {self.initial is not None}, rotate "
            f"{self.rotate}, residual {self.residual_layout}, decay {self.decay}, rescale {self.rescale}"
        )


def make_case(seed: int, blocks: tuple[int, ...] = ROW_BLOCKS + OTHER_BLOCKS, max_numel: int = 2100) -> Case:
    choose = random.Random(seed)
    block, out_block = choose.choice(blocks), choose.choice(blocks)
    numels = make_sizes(block, choose, max_numel)
    gaps = [choose.random() < 0.1 for _ in numels]
    if not any(n for n, gap in zip(numels, gaps, strict=True) if not gap):
        gaps = [False] * len(numels)
    layout, out_layout = (make_layout(numels, gaps, b, choose) for b in (block, out_block))
    rows, columns = choose.choice((1, 1, 2, 3, 5)), choose.choice((1, 1, 2, 3))
    generator = torch.Generator().manual_seed(seed)
    values = make_values(rows * columns * layout.numel, choose, generator).to(choose.choice(FLOAT_DTYPES))
    initial = make_values(columns * layout.numel, choose, generator) if choose.random() < 0.5 else None
    return Case(
        layout,
        out_layout,
        rows,
        columns,
        values,
        initial,
        dtype=choose.choice(FLOAT_DTYPES),
        scale=choose.choice((1.0, 1 / 3, 0.125)),
        offset=choose.choice((0, 0, 0, 1)),
        rotate=choose.random() < 0.5,
        residual_layout=make_residual_layout(out_layout, choose),
        left_out=make_values(columns * layout.numel, choose, generator),
        decay=choose.choice((1.0, 0.9, 0.3)),
        rescale=choose.choice((1.0, 0.5, 1 / 3)),
        without_wire=initial is not None and choose.random() < 0.3,
    )


def make_sizes(block: int, choose: random.Random, max_numel: int) -> list[int]:
    sizes = (0, 1, 2, 15, 63, block - 1, block, block + 1, 1023, 1024, 1025, choose.randrange(max_numel))
    numels = [min(choose.choice(sizes), max_numel) for _ in range(choose.choice((1, 1, 2, 3, 5, 40)))]
    if len(numels) == 40:  # more parts than a warp has lanes, all of them small
        numels = [numel % 70 for numel in numels]
    numels[0] += sum(numels) == 0
    return numels


def make_layout(numels: list[int], gaps: list[bool], block: int, choose: random.Random) -> WireLayout:
    widths = (*widths_of(block), None)
    segments = [Segment(n, GAP if gap else choose.choice(widths)) for n, gap in zip(numels, gaps, strict=True)]
    return lasting(WireLayout(segments, block, choose.choice(FLOAT_DTYPES)))


def make_residual_layout(layout: WireLayout, choose: random.Random) -> WireLayout:
    """Of the same blocks, some width for each quantized segment."""
    widths = widths_of(layout.block)
    segments = [Segment(one.numel, choose.choice(widths) if one.bits else one.bits) for one in layout.segments]
    return lasting(WireLayout(segments, layout.block, choose.choice(FLOAT_DTYPES)))


def widths_of(block: int) -> tuple[int, ...]:
    return tuple(QMAX) if block % CODES_AT_A_BYTE == 0 else (8, 4)


def lasting(layout: WireLayout) -> WireLayout:
    """The object that operators keep for this layout, whose table of parts compiled kernels may point to."""
    return WireLayout.from_spec(layout.spec)


def make_values(numel: int, choose: random.Random, generator: torch.Generator) -> torch.Tensor:
    """fp32 [numel] of one of KINDS, up to three of them special."""
    kind = choose.choice(KINDS)
    if kind == "bits":
        values = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).int()
        values = values.view(torch.float32)
        return torch.where(torch.rand(numel, generator=generator) < 0.9, values.nan_to_num(1.0, 2.0, 3.0), values)
    values = torch.randn(numel, generator=generator) * 10.0 ** choose.randint(-32, 5)
    if kind == "zeros":
        values *= torch.rand(numel, generator=generator) < 0.01
    if kind == "spread":
        values *= torch.exp2(torch.randint(-40, 20, (numel,), generator=generator).float())
    if kind == "ties":  # under a scale of one: each value half-way between codes, or a place beside it
        ties = torch.randint(-14, 15, (numel,), generator=generator) / 2 * choose.choice((1.0, 18.0))
        values = (ties.view(torch.int32) + torch.randint(-1, 2, (numel,), generator=generator).int()).view(
            torch.float32
        )
        values = torch.where(values.abs() < 1e-30, 7.0, values) * 2.0 ** choose.randint(-90, 90)
    for _ in range(choose.randrange(4) if numel else 0):
        values[torch.randint(numel, (1,), generator=generator)] = choose.choice(SPECIALS)
    return values


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy, `offset` elements behind an aligned address."""
    base = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)
    base[offset:] = tensor.flatten()
    return base[offset:]


class Guarded:
    """Memory for a result of `numel` elements, poisoned, between guards that nothing may touch."""

    def __init__(self, numel: int, dtype: torch.dtype, offset: int, device: str = "cpu") -> None:
        begin, nbytes = GUARD + offset * dtype.itemsize, numel * dtype.itemsize
        self.bytes = torch.full((begin + nbytes + GUARD,), POISON, dtype=torch.uint8, device=device)
        self.begin, self.end = begin, begin + nbytes
        self.tensor = self.bytes[begin : self.end].view(dtype)

    def is_intact(self) -> bool:
        return bool((self.bytes[: self.begin] == POISON).all() and (self.bytes[self.end :] == POISON).all())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; in fp32, whichever NaN a NaN is: processors make different ones."""
    if one.dtype == torch.float32:
        one, other = (torch.where(tensor.isnan(), 1.0, tensor) for tensor in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def same_wire(one: torch.Tensor, other: torch.Tensor, layout: WireLayout) -> bool:
    """Bit for bit, but for the NaNs of raw fp32 elements."""
    if layout.raw_dtype != torch.float32:
        return torch.equal(one, other)
    wires = [wire.view(-1, layout.nbytes).clone() for wire in (one, other)]
    same = True
    for part in layout.parts:
        if part.bits == 0:
            raw = [wire[:, part.codes : part.codes + 4 * part.numel].contiguous() for wire in wires]
            same &= same_bits(*(elements.view(torch.float32) for elements in raw))
            for wire in wires:
                wire[:, part.codes : part.codes + 4 * part.numel] = 0
    return same and torch.equal(*wires)
