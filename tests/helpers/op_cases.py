"""Random and adversarial cases for the operators of the wire, and what each operator is called with.

Every comparison of kernels goes through ``make_case`` and ``calls``: instruction sets with the PyTorch reference
(tests/ops/test_kernels.py), emulated CUDA kernels (tests/ops/test_cuda_emulation.py) and those on a GPU
(tests/gpu/test_gpu_kernels.py) with the CPU's. A new operator needs one entry in ``calls``.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
from typing import Any, NamedTuple

import pytest
import torch

from hf_zeropp import ops
from hf_zeropp.ops.format import (
    CODES_AT_A_BYTE,
    FLOAT_DTYPES,
    LARGEST_LEVEL,
    MAX_BLOCK,
    QMAX,
    ROOT_WIDTHS,
    Segment,
    WireLayout,
    needs_whole_bytes,
)

COMPILED = [name for name in ops.kernel_info().available if name != "reference"]
if os.environ.get("ZEROPP_KERNELS") == "reference":
    COMPILED = []
needs_compiled = pytest.mark.skipif(not COMPILED, reason="ZEROPP_KERNELS=reference: nothing to compare")

SPECIALS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 2.0**-100, 2.0**-93, 65519.0, 65520.0, 6e-8, 3e38)
ROW_BLOCKS = (32, 64, 128, 256, 512, 1024)  # CUDA kernels with 16-byte accesses take these
OTHER_BLOCKS = (1, 2, 3, 16, 63, 96, 100, 160, 1000, 2048, MAX_BLOCK - 1, MAX_BLOCK)
KINDS = ("normal", "spread", "ties", "zeros", "bits")


@dataclasses.dataclass
class Case:
    """Two layouts of the same segment sizes and rows * columns slices of values.

    Args:
        layout: of the wires that are decoded.
        out_layout: of the wires that sums are encoded to, and of the base of differences.
        rows: sources of a sum, or R of a permutation.
        columns: slices per source, or C of a permutation.
        values: rows * columns slices.
        initial: columns slices that sums start from, or None.
        dtype: decoded to.
        scale: factor of a sum.
        offset: elements that tensors lie behind an aligned address.
    """

    layout: WireLayout
    out_layout: WireLayout
    rows: int
    columns: int
    values: torch.Tensor
    initial: torch.Tensor | None
    dtype: torch.dtype
    scale: float
    offset: int

    def __str__(self) -> str:
        return (
            f"{self.layout.spec!r} -> {self.out_layout.spec!r}, {self.rows} x {self.columns} slices of "
            f"{self.values.dtype}, to {self.dtype}, offset {self.offset}, initial {self.initial is not None}"
        )


class Call(NamedTuple):
    """One call of an operator.

    Args:
        arguments: in the order of its declaration, layouts as ``WireLayout``.
        layout: of the wire that it fills; None if it fills elements.
        in_place: index of the argument that may also be filled, or None.
    """

    arguments: tuple[Any, ...]
    layout: WireLayout | None
    in_place: int | None = None


def calls(case: Case) -> dict[str, Call]:
    """Each operator of the wire, called on the slices of one case."""
    layout, out_layout, rows, columns, initial = case.layout, case.out_layout, case.rows, case.columns, case.initial
    wire = ops.quantize(case.values, layout)
    base = ops.quantize((case.values.float() * 0.97).to(case.values.dtype), out_layout)
    can_accumulate = initial is not None and case.dtype == torch.float32
    return {
        "quantize": Call((case.values, layout, rows), layout),
        "dequantize": Call((wire, layout, case.dtype, columns), None),
        "dequantize_sum": Call(
            (wire, layout, rows, initial, case.scale, case.dtype), None, in_place=3 if can_accumulate else None
        ),
        "dequantize_sum_quantize": Call((wire, layout, out_layout, rows, initial), out_layout),
        "quantize_difference": Call((case.values, base, out_layout, layout), layout),
        "dequantize_update": Call((wire, layout, base, out_layout), out_layout, in_place=2),
    }


def make_case(seed: int, blocks: tuple[int, ...] = ROW_BLOCKS + OTHER_BLOCKS, max_numel: int = 2100) -> Case:
    choose = random.Random(seed)
    block, out_block = choose.choice(blocks), choose.choice(blocks)
    numels = make_sizes(block, choose, max_numel)
    layout, out_layout = (make_layout(numels, b, choose) for b in (block, out_block))
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
    )


def make_sizes(block: int, choose: random.Random, max_numel: int) -> list[int]:
    sizes = (0, 1, 2, 15, 63, block - 1, block, block + 1, 1023, 1024, 1025, choose.randrange(max_numel))
    numels = [min(choose.choice(sizes), max_numel) for _ in range(choose.choice((1, 1, 2, 3, 5, 40)))]
    if len(numels) == 40:  # more parts than a warp has lanes, all of them small
        numels = [numel % 70 for numel in numels]
    numels[0] += sum(numels) == 0
    return numels


def make_layout(numels: list[int], block: int, choose: random.Random) -> WireLayout:
    widths = widths_of(block)
    return WireLayout([Segment(n, choose.choice(widths)) for n in numels], block, choose.choice(FLOAT_DTYPES))


def widths_of(block: int) -> tuple[int | None, ...]:
    """The bits that segments may have in blocks of this size; None for raw."""
    return (*(bits for bits in QMAX if not needs_whole_bytes(bits) or block % CODES_AT_A_BYTE == 0), None)


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
    if kind == "ties":  # under a scale of one, each value is half-way between codes, or a place beside it
        ties = torch.randint(-14, 15, (numel,), generator=generator) / 2 * choose.choice((1.0, 18.0))
        values = (ties.view(torch.int32) + torch.randint(-1, 2, (numel,), generator=generator).int()).view(
            torch.float32
        )
        values = torch.where(values.abs() < 1e-30, 7.0, values) * 2.0 ** choose.randint(-90, 90)
    for _ in range(choose.randrange(4) if numel else 0):
        values[torch.randint(numel, (1,), generator=generator)] = choose.choice(SPECIALS)
    return values


def boundary_values(bits: int) -> torch.Tensor:
    """fp32 [128, values]: for every significand of a scale, all boundaries between codes and the floats beside them."""
    steps = 2 if bits in ROOT_WIDTHS else 1  # of a scale
    ties = (torch.arange(steps * LARGEST_LEVEL[bits]) + 0.5) / steps
    ulps = torch.arange(-3, 4, dtype=torch.int32)
    values = ((scale_significands()[:, None] * ties).view(torch.int32)[..., None] + ulps).view(torch.float32)
    return torch.cat([values.flatten(1), -values.flatten(1)], dim=1)


def error_in_scales(bits: int) -> float:
    """The largest error of codes of this width, in scales.

    It is half the distance between levels, or with roots what lies between (qmax - 1/2)^2 and the level above it.
    """
    return QMAX[bits] - 0.25 if bits in ROOT_WIDTHS else 0.5


def largest_error(bits: int) -> float:
    """The same over the largest magnitude of a block, whose scale was rounded up to bf16, by a factor of 1 + 2^-7 at most."""
    return error_in_scales(bits) / LARGEST_LEVEL[bits] * (1 + 2.0**-7) * (1 + 1e-5)


def scale_significands() -> torch.Tensor:
    """fp32 [128]: the bf16 numbers from 1 to 2."""
    return (torch.arange(128, dtype=torch.int32) + 0x3F80 << 16).view(torch.float32)
