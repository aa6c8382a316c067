"""Starts the Triton kernels of ``triton_device.py``: the fallback on GPUs where the compiled library is missing.

In PyTorch code, one operator is some hundred launches, each of which reads and writes all elements. Here an operator is one
launch for each part of a layout, reads its arguments once, and needs no memory beside its own. The operators of changed words
and of frozen weights stay PyTorch code.

This module imports Triton, so ``kernels.py`` imports it only where there is no compiled library for a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_zeropp.ops import triton_device
from hf_zeropp.ops.format import CODES_AT_A_BYTE, Part, Segment, WireLayout
from hf_zeropp.ops.operator import Operator
from hf_zeropp.ops.reference import quantize
from hf_zeropp.ops.reference_kernels import ReferenceKernels

TILE = 1024
"""Elements of a program, unless a block is larger."""

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class _Wire(NamedTuple):
    """One part of one wire, as kernels take it: the offsets of its slice, and the constants that they are compiled for."""

    offsets: tuple[int, int, int]  # bytes of a slice; where its scales begin, and its codes
    constants: tuple[int, int, Any]  # bits, block, raw dtype

    @classmethod
    def of(cls, layout: WireLayout, part: Part) -> _Wire:
        return cls((layout.nbytes, part.scales, part.codes), (part.bits, layout.block, _DTYPES[layout.raw_dtype]))


class TritonKernels(ReferenceKernels):
    """The operators of the wire in Triton; others, and blocks that are not multiples of 8, as the reference."""

    name = "triton"

    def run(self, operator: Operator, arguments: Sequence[Any], counts: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Fill ``outs`` with the result of the operator; see ``CompiledKernels.run``."""
        start = _STARTERS.get(operator.name)
        layouts = [value for value in arguments if isinstance(value, WireLayout)]
        # Rows of a tile hold whole runs of codes. The package's own blocks are multiples of 32.
        if start is None or any(layout.block % CODES_AT_A_BYTE for layout in layouts):
            super().run(operator, arguments, counts, outs)
            return
        given = {argument.name: value for argument, value in zip(operator.arguments, arguments, strict=True)}
        with _on(outs[0].device):
            start(given, outs[0])


def check_a_case(device_type: str) -> None:
    """Raise unless Triton compiles here and has the bits of the CPU's kernels on a small case."""
    layout = WireLayout([Segment(1000, 4), Segment(7, None)], 128)
    values = torch.linspace(-3.0, 3.0, layout.numel)
    wire = torch.empty(layout.nbytes, dtype=torch.uint8, device=device_type)
    _encode({"input": values.to(device_type), "layout": layout}, wire)
    if not torch.equal(wire.cpu(), quantize(values, layout).flatten()):
        raise RuntimeError("it computes other bits than the CPU: please report this with the output of `hf-zeropp env`")


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Triton launches on the current device, in PyTorch's current stream.
    return torch.cuda.device(device) if device.type == "cuda" else torch.device(device)


def _launch(kernel: Any, tiles: int, slices: int, *arguments: Any) -> None:
    # A fused multiply-add rounds once where the reference rounds twice.
    kernel[(tiles, slices)](*arguments, enable_fp_fusion=False)


def _bits(values: Tensor) -> Tensor:
    """Return floats as integers: their bits, with no conversion that could change a NaN or a denormal."""
    return values.view(torch.int32 if values.dtype.itemsize == 4 else torch.int16)


def _parts(*layouts: WireLayout) -> Iterator[tuple[Part, tuple[_Wire, ...]]]:
    """Yield each part that has elements, and how it lies in the wire of each layout."""
    for parts in zip(*(layout.parts for layout in layouts), strict=True):
        if parts[0].numel:
            yield parts[0], tuple(_Wire.of(layout, part) for layout, part in zip(layouts, parts, strict=True))


def _blocks(numel: int, block: int) -> tuple[int, int, int]:
    """Return the number of tiles of whole blocks, and the shape of a tile: elements of a row, rows."""
    padded = triton.next_power_of_2(block)
    rows = max(1, TILE // padded)
    return triton.cdiv(numel, block * rows), padded, rows


def _encode(given: dict[str, Any], out: Tensor) -> None:
    """``quantize``, ``quantize_difference``."""
    input, layout, base = given["input"], given["layout"], given.get("base")
    slices, rows = input.numel() // layout.numel, given.get("slice_rows", 1)
    out.zero_()  # padding
    for part, (wire, base_wire) in _parts(layout, given.get("base_layout", layout)):
        tiles, *shape = _blocks(part.numel, layout.block)
        _launch(
            triton_device.encode, tiles, slices, _bits(input), out, out if base is None else base,
            part.element, part.numel, layout.numel, rows, slices // rows, *wire.offsets, *base_wire.offsets,
            _DTYPES[input.dtype], base is not None, *base_wire.constants, *wire.constants, *shape,
        )  # fmt: skip


def _decode(given: dict[str, Any], out: Tensor) -> None:
    """``dequantize``, ``dequantize_sum``."""
    wire, layout, initial = given["wire"], given["layout"], given.get("initial")
    sources = given.get("num_sources", 1)
    slices, rows = wire.numel() // layout.nbytes // sources, given.get("slice_rows", 1)
    words = _bits(out)
    for part, (one,) in _parts(layout):
        _launch(
            triton_device.decode, triton.cdiv(part.numel, TILE), slices, wire, words if initial is None else initial, words,
            given.get("scale", 1.0), part.element, part.numel, layout.numel, rows, slices // rows,
            sources, slices * layout.nbytes, *one.offsets,
            initial is not None, _DTYPES[given["dtype"]], *one.constants, TILE,
        )  # fmt: skip


def _encode_sum(given: dict[str, Any], out: Tensor) -> None:
    """``dequantize_sum_quantize``."""
    wire, initial = given["wire"], given["initial"]
    layout, out_layout, sources = given["layout"], given["out_layout"], given["num_sources"]
    slices = out.numel() // out_layout.nbytes
    out.zero_()  # padding
    for part, (one, sent) in _parts(layout, out_layout):
        tiles, *shape = _blocks(part.numel, out_layout.block)
        _launch(
            triton_device.encode_sum, tiles, slices, wire, out if initial is None else initial, out,
            part.element, part.numel, layout.numel, sources, slices * layout.nbytes, *one.offsets, *sent.offsets,
            initial is not None, *one.constants, *sent.constants, *shape,
        )  # fmt: skip


def _update(given: dict[str, Any], out: Tensor) -> None:
    """``dequantize_update``."""
    wire, layout, base, base_layout = given["wire"], given["layout"], given["base"], given["base_layout"]
    if out.data_ptr() != base.data_ptr():
        out.zero_()  # padding, which a base has already
    for part, (change, kept) in _parts(layout, base_layout):
        tiles, *shape = _blocks(part.numel, base_layout.block)
        _launch(
            triton_device.update, tiles, wire.numel() // layout.nbytes, wire, base, out, part.numel,
            *change.offsets, *kept.offsets, *change.constants, *kept.constants, *shape,
        )  # fmt: skip


_STARTERS = {
    "quantize": _encode,
    "quantize_difference": _encode,
    "dequantize": _decode,
    "dequantize_sum": _decode,
    "dequantize_sum_quantize": _encode_sum,
    "dequantize_update": _update,
}
