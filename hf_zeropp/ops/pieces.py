"""Runs the reference of an operator piece by piece, so that a large unit needs little memory beside its own.

A reference holds several copies of all its elements at once: 12 to 48 bytes for each (the least for decoding INT8, the most with
a residual), where the element itself has 2 in bf16. Blocks depend on nothing outside of them, so any run of whole blocks can be
computed alone. A *piece* is such a run within one part of the layouts, the same elements in every layout of the call.

Pieces begin where each layout has a multiple of 8 blocks and of 64 elements before them. Scales and codes of every width then
begin aligned (``ALIGNMENT``) within their part, so the bytes of a piece, padding included, are those of a layout that holds
the piece alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zeropp.ops.format import Segment, WireLayout, scale_bytes
from hf_zeropp.ops.operator import Operator

PIECE_NUMEL = 1 << 22
"""Elements of a piece, those of all rows together. A reference takes up to 200 MB for them."""

# Arguments that hold the bytes of wires, and the layout of each. Other tensors hold elements of ``layout``. A test calls every
# operator in pieces, so a new argument of another kind does not go unnoticed.
_LAYOUT_OF = {"wire": "layout", "base": "base_layout", "residual": "residual_layout"}
_LAYOUT_OF_OUT = {
    "dequantize_update": "base_layout",
    "dequantize_sum_quantize": "out_layout",
    "quantize_with_feedback": "out_layout",
}


_UPDATED = {"residual"}


class Piece(NamedTuple):
    """Elements of one part.

    Args:
        part: index among the parts of each layout of the call.
        start: first element, in the part.
        end: behind the last element, in the part.
    """

    part: int
    start: int
    end: int

    def alone(self, layout: WireLayout) -> WireLayout:
        """Return the layout of the piece alone."""
        return WireLayout(
            [Segment(self.end - self.start, layout.parts[self.part].bits or None)], layout.block, layout.raw_dtype
        )

    def columns(self, layout: WireLayout) -> slice:
        """Return where the piece's elements lie in a row of ``layout.numel`` elements."""
        element = layout.parts[self.part].element
        return slice(element + self.start, element + self.end)

    def byte_columns(self, layout: WireLayout) -> list[slice]:
        """Return where the piece's scales and its codes lie in a row of ``layout.nbytes`` bytes, in this order."""
        part = layout.parts[self.part]
        bits = part.bits or layout.raw_dtype.itemsize * 8
        is_last = self.end == part.numel
        scales, codes = (scale_bytes(self.start, bits, layout.block), self.start * bits // 8)
        scales_end = part.codes if is_last else part.scales + scale_bytes(self.end, bits, layout.block)
        codes_end = part.end if is_last else part.codes + self.end * bits // 8
        return [slice(part.scales + scales, scales_end), slice(part.codes + codes, codes_end)]


def pieces_of(layouts: Sequence[WireLayout], rows: int, piece_numel: int) -> Iterator[Piece]:
    """Yield the pieces of layouts that describe the same parts, part by part.

    Args:
        layouts: all layouts of a call.
        rows: slices that the largest tensor of the call holds.
        piece_numel: elements of a piece, over all rows. A piece is longer where no shorter one begins aligned.
    """
    step = math.lcm(64, *(8 * layout.block for layout in layouts))
    length = max(piece_numel // rows // step, 1) * step
    for index, part in enumerate(layouts[0].parts):
        for start in range(0, part.numel, length):
            yield Piece(index, start, min(start + length, part.numel))


def num_elements(operator: Operator, arguments: Sequence[Any]) -> int:
    """Return the elements of the largest tensor of a call of an operator that takes layouts."""
    tensors, layouts = _rows_of(operator, arguments)
    return _most_rows(tensors) * next(iter(layouts.values())).numel


def run_in_pieces(operator: Operator, arguments: Sequence[Any], out: Tensor, piece_numel: int) -> None:
    """Fill ``out`` with the result of an operator's reference.

    Args:
        operator: one that takes layouts.
        arguments: checked. A tensor that the operator updates is updated in place.
        out: may be one of the arguments. Elements in the gaps of a layout keep their values.
        piece_numel: elements of a piece, over all rows.
    """
    tensors, layouts = _rows_of(operator, arguments)
    filled = _Rows(out, layouts[_LAYOUT_OF_OUT.get(operator.name, "layout")], in_bytes=out.dtype == torch.uint8)
    given = {argument.name: value for argument, value in zip(operator.arguments, arguments, strict=True)}
    for piece in pieces_of(list(layouts.values()), _most_rows(tensors), piece_numel):
        cut = {name: rows.cut(piece) for name, rows in tensors.items()}
        alone = {name: piece.alone(layout) for name, layout in layouts.items()}
        # ``|`` keeps the order of the operator's arguments.
        filled.paste(piece, operator.reference(*(given | alone | cut).values()))
        for name in _UPDATED & cut.keys():
            tensors[name].paste(piece, cut[name])


class _Rows:
    """A tensor of a call as rows of elements, or of the bytes of a wire.

    Args:
        tensor: contiguous.
        layout: of a row.
        in_bytes: whether a row is a wire.
    """

    def __init__(self, tensor: Tensor, layout: WireLayout, *, in_bytes: bool) -> None:
        self._layout = layout
        self._in_bytes = in_bytes
        self._rows = tensor.view(-1, layout.nbytes if in_bytes else layout.numel)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._rows.shape[0]

    def cut(self, piece: Piece) -> Tensor:
        """Return a copy of the piece's columns, as rows of the piece's own layout."""
        return torch.cat([self._rows[:, columns] for columns in self._columns(piece)], dim=1)

    def paste(self, piece: Piece, values: Tensor) -> None:
        """Replace the piece's columns by ``values``, which ``cut`` would return."""
        columns = self._columns(piece)
        parts = values.view(self.count, -1).split([here.stop - here.start for here in columns], dim=1)
        for here, part in zip(columns, parts, strict=True):
            self._rows[:, here] = part

    def _columns(self, piece: Piece) -> list[slice]:
        return piece.byte_columns(self._layout) if self._in_bytes else [piece.columns(self._layout)]


def _rows_of(operator: Operator, arguments: Sequence[Any]) -> tuple[dict[str, _Rows], dict[str, WireLayout]]:
    """Return the tensors and the layouts of a call, by the names of the arguments."""
    given = {argument.name: value for argument, value in zip(operator.arguments, arguments, strict=True)}
    layouts = {name: value for name, value in given.items() if isinstance(value, WireLayout)}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    rows = {
        name: _Rows(tensor, layouts[_LAYOUT_OF.get(name, "layout")], in_bytes=name in _LAYOUT_OF)
        for name, tensor in tensors.items()
    }
    return rows, layouts


def _most_rows(tensors: dict[str, _Rows]) -> int:
    return max(rows.count for rows in tensors.values())
