"""The operators of the wire in plain PyTorch: the oracle of the tests, and the fallback without compiled kernels.

Compiled kernels do the same bit for bit: [Note: bitwise agreement] in ``blocks.py``, which holds the mathematics of a block.

Slices are permuted on the way, as the two hops of a collective need it (rank order y * N + x against [x, y]). With K = R * C
slices and ``slice_rows`` R, encode writes slice r * C + c of the input to slice c * R + r of the wire. Decode permutes in the
same way from wire to output, so decoding with ``slice_rows`` C undoes encoding with R.

Every function takes the arguments of the operator of its name, in that order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops.blocks import (
    codes_of,
    levels_of,
    pack_codes,
    round_to,
    scale_bits,
    scale_value,
    to_blocks,
    unpack_codes,
)
from hf_zeropp.ops.format import Part, WireLayout, num_blocks


def quantize(input: Tensor, layout: WireLayout, slice_rows: int = 1) -> Tensor:
    """K slices of ``layout.numel`` elements -> uint8 wire [K, layout.nbytes]."""
    slices = _permute(input.reshape(-1, layout.numel), slice_rows)
    # Zeros, because padding is part of the wire: equal inputs give equal bytes.
    wire = torch.zeros(slices.shape[0], layout.nbytes, dtype=torch.uint8, device=input.device)
    for part in _parts(layout):
        values = slices[:, part.element : part.element + part.numel]
        if part.bits:
            _encode(values.float(), part, layout.block, wire)
        else:
            _write(wire, part.codes, round_to(values, layout.raw_dtype))
    return wire


def dequantize(wire: Tensor, layout: WireLayout, dtype: torch.dtype, slice_rows: int = 1) -> Tensor:
    """uint8 wire of K slices -> [K, layout.numel] in ``dtype``."""
    slots = _permute(wire.reshape(-1, layout.nbytes), slice_rows)
    output = torch.zeros(slots.shape[0], layout.numel, dtype=dtype, device=wire.device)
    for part in _parts(layout):
        if part.bits:
            values = _decode(slots, part, layout.block)
        else:
            values = _read(slots, part.codes, part.numel, layout.raw_dtype)
        output[:, part.element : part.element + part.numel] = round_to(values, dtype)
    return output


def dequantize_sum(
    wire: Tensor,
    layout: WireLayout,
    num_sources: int,
    initial: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """uint8 wire [num_sources, P, nbytes] -> [P, numel] in ``dtype``: (initial + sum over sources, in order) * scale."""
    total = _sum(wire, layout, num_sources, initial)
    return round_to(total if scale == 1.0 else total * scale, dtype)


def dequantize_sum_quantize(
    wire: Tensor, layout: WireLayout, out_layout: WireLayout, num_sources: int, initial: Tensor | None = None
) -> Tensor:
    """Encode the fp32 sum of ``dequantize_sum`` again: uint8 wire [P, out_layout.nbytes]."""
    return quantize(dequantize_sum(wire, layout, num_sources, initial), out_layout)


def quantize_difference(input: Tensor, base: Tensor, base_layout: WireLayout, layout: WireLayout) -> Tensor:
    """K slices of values and uint8 base [K, base_layout.nbytes] -> uint8 wire [K, layout.nbytes] of input - base.

    Parts that travel raw carry the values themselves.
    """
    values = input.reshape(-1, layout.numel).float()
    difference = values - dequantize(base, base_layout, torch.float32)
    # A raw difference would take as many bytes as the value, and adding it up would round at every step.
    difference = torch.where(_is_quantized(layout, input.device), difference, values)
    return quantize(difference, layout)


def dequantize_update(wire: Tensor, layout: WireLayout, base: Tensor, base_layout: WireLayout) -> Tensor:
    """uint8 wire and base of K slices -> uint8 [K, base_layout.nbytes], base + wire encoded again.

    Parts that travel raw replace those of the base.
    """
    change = dequantize(wire, layout, torch.float32)
    updated = dequantize(base, base_layout, torch.float32) + change
    updated = torch.where(_is_quantized(layout, wire.device), updated, change)
    return quantize(updated, base_layout)


def _sum(wire: Tensor, layout: WireLayout, num_sources: int, initial: Tensor | None) -> Tensor:
    """fp32 [P, numel]: initial + sources, in this order."""
    sources = iter(wire.reshape(num_sources, -1))
    # The sum starts from source 0 and not from zeros, since 0.0 + -0.0 is +0.0: a sum of one source keeps its bits.
    if initial is None:
        total = dequantize(next(sources), layout, torch.float32)
    else:
        total = initial.reshape(-1, layout.numel)
    for source in sources:
        total = total + dequantize(source, layout, torch.float32)
    return total


def _is_quantized(layout: WireLayout, device: torch.device) -> Tensor:
    """Return bool [numel]: whether an element travels as a code."""
    mask = torch.zeros(layout.numel, dtype=torch.bool, device=device)
    for part in _parts(layout):
        mask[part.element : part.element + part.numel] = bool(part.bits)
    return mask


def _parts(layout: WireLayout) -> list[Part]:
    return [part for part in layout.parts if part.numel]


def _encode(values: Tensor, part: Part, block: int, wire: Tensor) -> None:
    """Write fp32 values [K, part.numel] as scales and codes into ``wire`` [K, nbytes]."""
    blocks = to_blocks(values, block)
    stored = scale_bits(blocks, part.bits)
    codes = codes_of(blocks, scale_value(stored), part.bits).flatten(1)[:, : part.numel]
    _write(wire, part.scales, stored.to(torch.int16))
    _write(wire, part.codes, codes.contiguous() if part.bits == 8 else pack_codes(codes, part.bits))


def _decode(slots: Tensor, part: Part, block: int) -> Tensor:
    """uint8 wire [K, nbytes] -> fp32 [K, part.numel]."""
    # Scales are read as int16, because PyTorch shifts integers and not floats.
    stored = _read(slots, part.scales, num_blocks(part.numel, block), torch.int16)
    if part.bits == 8:
        codes = _read(slots, part.codes, part.numel, torch.int8)
    else:
        packed = _read(slots, part.codes, -(-part.numel * part.bits // 8), torch.uint8)
        codes = unpack_codes(packed, part.bits)[:, : part.numel]
    scaled = to_blocks(levels_of(codes, part.bits), block) * scale_value(stored.int()).unsqueeze(-1)
    return scaled.flatten(1)[:, : part.numel]


def _read(slots: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    data = slots[:, offset : offset + count * dtype.itemsize]
    return data.clone(memory_format=torch.contiguous_format).view(dtype)  # a wire buffer may begin anywhere


def _write(wire: Tensor, offset: int, values: Tensor) -> None:
    data = values.contiguous().view(torch.uint8)
    wire[:, offset : offset + data.shape[1]] = data


def _permute(slices: Tensor, slice_rows: int) -> Tensor:
    """[K, ...]: slice r * C + c moves to c * R + r, for R = slice_rows and C = K / R."""
    return slices.unflatten(0, (slice_rows, -1)).transpose(0, 1).flatten(0, 1)
