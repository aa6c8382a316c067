"""The quantization format: how many bytes a slice takes on the wire, and where each of its parameters lies.

A rank's flat shard of a unit is one *slice*. It holds several parameters, one after the other. On the wire each parameter
becomes a *segment*, and the segments follow each other in one run of bytes:

    segment 0             segment 1               segment 2 (raw)
    | scales | codes      | scales | codes        | bytes            |      every part starts 16-byte aligned

- A quantized segment holds one bf16 scale per block, then codes of 2 to 8 bits. Blocks never straddle segments, so
  one parameter's large values cannot spoil the scale of its neighbour. A raw segment travels unquantized in the raw dtype.
- Offsets are aligned relative to the start of the slice. This keeps 16-byte loads aligned and costs at most 30 bytes a
  segment.
- Padding is always written, as zeros. Equal inputs therefore give equal wires, byte for byte.

This module is the only place that knows these sizes and offsets. The mathematics, by which a block becomes a scale and
codes, is in ``reference.py`` and, for compiled code, in ``ops/format.h``. tests/ops/test_abi.py checks that the constants
below equal those of the C headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

QMAX = {bits: (1 << bits - 1) - 1 for bits in range(8, 1, -1)}
"""Largest code of every width of codes, in bits. Codes are symmetric, so -128 does not occur in 8 bits. All operators take
all of these widths; ``config.py`` lists those that settings offer."""

ROOT_WIDTHS = (4, 3)
"""Widths whose codes are square roots: a code c stands for c |c| scales. Codes of all other widths stand for c scales."""

LARGEST_LEVEL = {bits: qmax**2 if bits in ROOT_WIDTHS else qmax for bits, qmax in QMAX.items()}
"""The scales that the largest code of every width stands for."""

WEIGHT_BLOCK = 256
"""Weights that share one scale."""

GRAD_BLOCK = 128
"""Gradients that share one scale."""

DELTA_BLOCK = 128
"""Differences of weights that share one scale."""

MIN_BLOCK = 32
"""Elements. The least block of frozen weights."""

MAX_BLOCK = 4096
"""Elements. A block must fit a core's first-level cache, and the registers of a CUDA thread block."""

BLOCK_MULTIPLE = 32
"""Blocks of frozen weights are multiples of it. Codes of every width then fill whole bytes in them."""

ALIGNMENT = 16
"""Bytes. Every part of a slice, and every slice of a wire buffer, starts at a multiple of it."""

CODES_AT_A_BYTE = 8
"""Runs of this many codes fill whole bytes in every width. Blocks of codes of other widths than 8 and 4 are multiples of it."""

SCALE_NAN = 0x7FC0
"""bf16 bits stored as the scale of a block that holds a NaN or an Inf. All its elements decode to NaN."""

SCALE_MIN = (127 - 100) << 7
"""bf16 bits of 2^-100. A smaller scale is stored as zero, so neither encode nor decode ever meets a denormal."""

SCALE_MAX = 0x7F7F
"""bf16 bits of the largest finite bf16, which is the scale where rounding up would make it Inf: in blocks of 2-bit codes."""

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that encode reads, decode writes and raw segments travel in. Positions are the dtype codes of ops/abi.h."""


def needs_whole_bytes(bits: int | None) -> bool:
    """Return whether codes of this width need blocks that fill whole bytes: kernels pack eight of them at a time."""
    return bits not in (8, 4, None)


def align(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def num_blocks(numel: int, block: int) -> int:
    """Return how many blocks ``numel`` elements fill; the last one may be shorter."""
    return -(-numel // block)


@dataclass(frozen=True)
class Segment:
    """One parameter of a slice, as it travels.

    Args:
        numel: elements of the parameter that lie in this slice; zero is legal.
        bits: bits of a code (a key of ``QMAX``), or None for a raw segment.

    Raises:
        ValueError: negative ``numel``, or unknown ``bits``.
    """

    numel: int
    bits: int | None

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"Segment: expected numel >= 0, got {self.numel}")
        if self.bits not in (*QMAX, None):
            raise ValueError(f"Segment: expected bits {', '.join(map(str, QMAX))} or None (raw), got {self.bits}")


class Part(NamedTuple):
    """Offsets of one segment. Bytes count from the start of the slice's wire. A row of ``WireLayout.table``."""

    element: int  # first element, in the slice
    numel: int
    bits: int  # of a code; 0 for raw
    scales: int  # byte offset of the scales
    codes: int  # byte offset of the codes or raw bytes
    end: int  # byte offset behind the padding
    first_block: int  # index of its first block, in the slice; raw segments count blocks too


@dataclass(frozen=True)
class WireLayout:
    """Offsets of all parts of one slice in its wire buffer. Immutable and hashable: equal layouts describe equal bytes.

    Args:
        segments: the slice's parameters in order. They are kept as a tuple.
        block: elements that share one scale, 1 to ``MAX_BLOCK``.
        raw_dtype: dtype in which raw segments travel: fp32, bf16 or fp16.

    Raises:
        ValueError: a block out of range, or one in which codes of other widths than 8 and 4 bits do not fill whole bytes.
        TypeError: an unknown ``raw_dtype``.
    """

    segments: Sequence[Segment]
    block: int
    raw_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"WireLayout: expected a block of 1..{MAX_BLOCK} elements, got {self.block}")
        if self.raw_dtype not in FLOAT_DTYPES:
            raise TypeError(f"WireLayout: expected raw_dtype float32, bfloat16 or float16, got {self.raw_dtype}")
        # Empty segments stay: callers match segments with parameters by position, and a rank may hold none of a parameter.
        # Assignment is closed, since the class is frozen. Layouts key caches and travel as text, so none may ever change.
        object.__setattr__(self, "segments", tuple(self.segments))
        bits = sorted({segment.bits or 0 for segment in self.segments if needs_whole_bytes(segment.bits)})
        if bits and self.block % CODES_AT_A_BYTE:
            raise ValueError(f"WireLayout: codes of {bits} bits need a block that is a multiple of 8, got {self.block}")
        # They are made now, since ``torch.compile`` reads what is there and cannot trace how a cached property is made.
        _ = self.parts, self.numel, self.nbytes, self.spec

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The place of each segment."""
        parts: list[Part] = []
        element = offset = first_block = 0
        for segment in self.segments:
            numel, bits, blocks = segment.numel, segment.bits, num_blocks(segment.numel, self.block)
            # Raw elements lie where codes would, behind no scales.
            codes = offset + (align(2 * blocks) if bits else 0)
            end = codes + align(-(-numel * (bits or 8 * self.raw_dtype.itemsize) // 8))
            parts.append(Part(element, numel, bits or 0, offset, codes, end, first_block))
            element, offset, first_block = element + numel, end, first_block + blocks
        return tuple(parts)

    @cached_property
    def numel(self) -> int:
        """Elements of one slice."""
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one slice on the wire."""
        return self.parts[-1].end if self.parts else 0

    @cached_property
    def spec(self) -> str:
        """The block, the raw dtype, then one word for each segment: for example "256 bfloat16 int8*4096 raw*64".

        The registered operators take this text as an argument, because graphs of ``torch.compile`` can hold text but no layout.
        """
        words = (f"{f'int{segment.bits}' if segment.bits else 'raw'}*{segment.numel}" for segment in self.segments)
        return " ".join([str(self.block), str(self.raw_dtype).removeprefix("torch."), *words])

    # The cache keeps its layouts for the life of the process. They are few: a unit has some for each kind of wire.
    # Every call of an operator comes through here, so a text is parsed once and then looked up.
    @staticmethod
    @cache
    def from_spec(spec: str) -> WireLayout:
        """Return the layout that ``spec`` describes, always the same object."""
        block, raw_dtype, *words = spec.split(" ")
        segments = (word.split("*") for word in words)
        bits = {f"int{bits}": bits for bits in QMAX} | {"raw": None}
        return WireLayout(
            [Segment(int(numel), bits[codec]) for codec, numel in segments], int(block), getattr(torch, raw_dtype)
        )

    @cached_property
    def alone(self) -> tuple[tuple[slice, WireLayout], ...]:
        """Each segment's bytes in the wire, and a layout that encodes this segment alone to the same bytes.

        The bytes are the same because every part begins aligned and no scale depends on another segment.
        """
        layouts = (WireLayout([segment], self.block, self.raw_dtype) for segment in self.segments)
        return tuple((slice(part.scales, part.end), layout) for part, layout in zip(self.parts, layouts, strict=True))

    @cached_property
    def quantizes(self) -> bool:
        """Whether any segment travels in codes."""
        return any(segment.bits is not None for segment in self.segments)

    def table(self, device: torch.device | str) -> torch.Tensor:
        """Return ``parts`` as an int64 tensor [num_parts, len(Part._fields)] on ``device``."""
        return torch.tensor(self.parts, dtype=torch.int64).reshape(-1, len(Part._fields)).to(device)
