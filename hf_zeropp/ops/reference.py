"""The quantization format stated in plain PyTorch: the oracle of the tests and the fallback without compiled kernels.

Everything is bit for bit what `ops/format.h` does, on any device. What that takes is commented where it happens; only
*which* NaN a decoded NaN is stays open.

Encoding a block x (the paper's qwZ, with symmetric scales):

    amax  = max |x|                                    exact: an integer maximum of the bits, where NaN and Inf win
    scale = amax / qmax, rounded up to bf16            up, so that the largest element is never clipped
    code  = clamp(rint(x / scale), -qmax, qmax)        half to even, and a true division by the scale as stored

A block with NaN or Inf stores scale NaN and codes 0; a scale under 2^-100 is stored as 0 with codes 0. Decoding is
code * scale in fp32, then rounding to the output dtype: a NaN block gives NaNs, a tiny block exact +0.

A rotation multiplies each whole 32-slice of a quantized part by the orthonormal Hadamard matrix, which is its own inverse: a
large element is spread over its slice before a block's scale is taken of it. What is left of a part behind its last whole
slice stays as it is.

Slices are permuted on the way, as the two hops of a collective need it (rank order y * N + x against [x, y]). Of
K = R * C slices with `slice_rows` R, encode writes input slice r * C + c to wire slot c * R + r; decode is the same
permutation from wire slot to output slice, so that decoding with `slice_rows` C undoes encoding with R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops.format import (
    CODES_AT_A_BYTE,
    QMAX,
    ROTATION_SLICE,
    SCALE_MIN,
    SCALE_NAN,
    Part,
    WireLayout,
    num_blocks,
)

_INF_BITS = 0x7F800000
_ROTATION_NORM = ROTATION_SLICE**-0.5


def quantize(input: Tensor, layout: WireLayout, slice_rows: int = 1, rotate: bool = False) -> Tensor:
    """K slices of `layout.numel` elements -> uint8 wire [K, layout.nbytes]."""
    slices = _permute(input.reshape(-1, layout.numel), slice_rows)
    if rotate:
        slices = _rotate_parts(slices.float(), layout)
    wire = torch.zeros(slices.shape[0], layout.nbytes, dtype=torch.uint8, device=input.device)
    for part in _parts(layout):
        values = slices[:, part.element : part.element + part.numel]
        if part.bits:
            _encode(values.float(), part, layout.block, wire)
        else:
            _write(wire, part.codes, round_to(values, layout.raw_dtype))
    return wire


def dequantize(wire: Tensor, layout: WireLayout, dtype: torch.dtype, slice_rows: int = 1) -> Tensor:
    """uint8 wire of K slices -> [K, layout.numel] in `dtype`."""
    slots = _permute(wire.reshape(-1, layout.nbytes), slice_rows)
    output = torch.zeros(slots.shape[0], layout.numel, dtype=dtype, device=wire.device)
    for part in _parts(layout):
        values = _decode(slots, part, layout.block) if part.bits else _read_raw(slots, part, layout.raw_dtype)
        output[:, part.element : part.element + part.numel] = round_to(values, dtype)
    return output


def dequantize_sum(
    wire: Tensor,
    layout: WireLayout,
    num_sources: int,
    initial: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    rotate: bool = False,
) -> Tensor:
    """uint8 wire [num_sources, P, nbytes] -> [P, numel] in `dtype`: (initial + sum over sources, in order) * scale."""
    total = _sum(wire, layout, num_sources, initial)
    if rotate:
        total = _rotate_parts(total, layout)
    return round_to(total if scale == 1.0 else total * scale, dtype)


def dequantize_sum_quantize(
    wire: Tensor, layout: WireLayout, out_layout: WireLayout, num_sources: int, initial: Tensor | None = None
) -> Tensor:
    """The sum of `dequantize_sum` in fp32, encoded again: uint8 wire [P, out_layout.nbytes]."""
    return quantize(dequantize_sum(wire, layout, num_sources, initial), out_layout)


def quantize_difference(input: Tensor, base: Tensor, base_layout: WireLayout, layout: WireLayout) -> Tensor:
    """K slices of values and uint8 base [K, base_layout.nbytes] -> uint8 wire [K, layout.nbytes] of input - base.

    Of parts that travel raw the values themselves.
    """
    values = input.reshape(-1, layout.numel).float()
    difference = values - dequantize(base, base_layout, torch.float32)
    difference = torch.where(_is_quantized(layout, input.device), difference, values)
    return quantize(difference, layout)


def dequantize_update(wire: Tensor, layout: WireLayout, base: Tensor, base_layout: WireLayout) -> Tensor:
    """uint8 wire and base of K slices -> uint8 [K, base_layout.nbytes], base + wire encoded again.

    Of parts that travel raw the values of the wire.
    """
    change = dequantize(wire, layout, torch.float32)
    updated = dequantize(base, base_layout, torch.float32) + change
    updated = torch.where(_is_quantized(layout, wire.device), updated, change)
    return quantize(updated, base_layout)


def quantize_with_feedback(
    wire: Tensor | None,
    layout: WireLayout,
    out_layout: WireLayout,
    residual_layout: WireLayout,
    num_sources: int,
    initial: Tensor | None,
    rotate: bool,
    decay: float,
    rescale: float,
    residual: Tensor,
) -> Tensor:
    """Sum, add what earlier calls left out, encode; residual <- what this call leaves out. uint8 wire [P, out nbytes].

    With t = (initial + sum over sources, rotated if asked) and e the residual times `rescale`, the wire is that of t + e,
    and with r = (t + e) - the decoded wire the residual becomes that of r, or of (1 - decay) e + decay r for a decay other
    than 1. A residual block that is not finite counts as zero. Raw parts take no part: their residual stays.
    """
    total = _sum(wire, layout, num_sources, initial)
    if rotate:
        total = _rotate_parts(total, out_layout)
    left_out = dequantize(residual, residual_layout, torch.float32)
    left_out = torch.where(left_out.isnan(), 0.0, left_out)
    if rescale != 1.0:
        left_out = left_out * rescale
    for part in _parts(out_layout):
        if not part.bits:
            left_out[:, part.element : part.element + part.numel] = 0.0
    compensated = torch.where(_is_quantized(out_layout, total.device), total + left_out, total)
    out = quantize(compensated, out_layout)
    error = compensated - dequantize(out, out_layout, torch.float32)
    if decay != 1.0:
        newest = torch.tensor(decay, dtype=torch.float32, device=total.device)
        error = left_out * (1.0 - newest) + error * newest
    updated = quantize(error, residual_layout).view(-1, residual_layout.nbytes)
    kept = residual.view(-1, residual_layout.nbytes)
    for part, out_part in zip(residual_layout.parts, out_layout.parts, strict=True):
        if part.numel and out_part.bits:
            kept[:, part.scales : part.end] = updated[:, part.scales : part.end]
    return out


def rotate_slices(values: Tensor) -> Tensor:
    """fp32 [..., n], n a multiple of 32: each 32-slice times the orthonormal Hadamard matrix.

    Sums and differences of elements 1, 2, 4, 8 and 16 apart, in this order, then one multiplication: the bits depend on it.
    """
    shape = values.shape
    step = 1
    while step < ROTATION_SLICE:
        low, high = values.reshape(-1, 2, step).unbind(1)
        values = torch.stack([low + high, low - high], dim=1)
        step *= 2
    return values.reshape(shape) * torch.tensor(_ROTATION_NORM, dtype=torch.float32, device=values.device)


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, to nearest even, a NaN becoming the canonical one (PyTorch's NaNs differ between loops)."""
    values = values.float()
    if dtype == torch.float32:
        return values
    nan = torch.full((), float("nan"), dtype=dtype, device=values.device)
    return torch.where(values.isnan(), nan, values.to(dtype))


def _sum(wire: Tensor | None, layout: WireLayout, num_sources: int, initial: Tensor | None) -> Tensor:
    """fp32 [P, numel]: initial + sources, in this order."""
    sources = iter(() if wire is None else wire.reshape(num_sources, -1))
    if initial is None:
        total = dequantize(next(sources), layout, torch.float32)
    else:
        total = initial.reshape(-1, layout.numel)
    for source in sources:
        total = total + dequantize(source, layout, torch.float32)
    return total


def _rotate_parts(values: Tensor, layout: WireLayout) -> Tensor:
    """fp32 [K, numel], the whole 32-slices of every quantized part rotated."""
    values = values.clone()
    for part in _parts(layout):
        if part.bits:
            whole = slice(part.element, part.element + part.numel // ROTATION_SLICE * ROTATION_SLICE)
            values[:, whole] = rotate_slices(values[:, whole])
    return values


def _is_quantized(layout: WireLayout, device: torch.device) -> Tensor:
    """bool [numel]: whether an element travels as a code."""
    mask = torch.zeros(layout.numel, dtype=torch.bool, device=device)
    for part in _parts(layout):
        mask[part.element : part.element + part.numel] = bool(part.bits)
    return mask


def _parts(layout: WireLayout) -> list[Part]:
    return [part for part in layout.parts if part.numel]


def _encode(values: Tensor, part: Part, block: int, wire: Tensor) -> None:
    """values: fp32 [K, part.numel], written as scales and codes into wire [K, nbytes]."""
    qmax = QMAX[part.bits]
    blocks = _to_blocks(values, block)
    scale_bits = _scale_bits(blocks, qmax)
    scale = _scale_value(scale_bits).unsqueeze(-1)
    codes = (blocks / scale).round().clamp(-qmax, qmax)
    codes = torch.where(scale > 0, codes, 0.0).to(torch.int8).flatten(1)[:, : part.numel]
    _write(wire, part.scales, scale_bits.to(torch.int16))
    _write(wire, part.codes, codes.contiguous() if part.bits == 8 else pack_codes(codes, part.bits))


def _scale_bits(blocks: Tensor, qmax: int) -> Tensor:
    """fp32 [K, blocks, block] -> the bf16 bits of each block's scale, int32 [K, blocks]."""
    amax = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    # A tensor divisor: for a number, PyTorch's CUDA division multiplies by the reciprocal.
    scale = amax.view(torch.float32) / torch.full_like(amax, qmax, dtype=torch.float32)
    bits = (scale.view(torch.int32) + 0xFFFF) >> 16  # up: positive floats are ordered as their bits
    bits = torch.where(bits < SCALE_MIN, 0, bits)
    return torch.where(amax >= _INF_BITS, SCALE_NAN, bits)


def _decode(slots: Tensor, part: Part, block: int) -> Tensor:
    """uint8 wire [K, nbytes] -> fp32 [K, part.numel]."""
    scale_bits = _read(slots, part.scales, num_blocks(part.numel, block), torch.int16)
    if part.bits == 8:
        codes = _read(slots, part.codes, part.numel, torch.int8)
    else:
        packed = _read(slots, part.codes, -(-part.numel * part.bits // 8), torch.uint8)
        codes = unpack_codes(packed, part.bits)[:, : part.numel]
    scaled = _to_blocks(codes.float(), block) * _scale_value(scale_bits.int()).unsqueeze(-1)
    return scaled.flatten(1)[:, : part.numel]


def _scale_value(bits: Tensor) -> Tensor:
    return (bits << 16).view(torch.float32)


def _to_blocks(values: Tensor, block: int) -> Tensor:
    """[K, numel] -> [K, blocks, block], the last block filled up with zeros."""
    missing = -values.shape[1] % block
    return torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, block))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """int8 [K, n] -> uint8 [K, ceil(n bits / 8)]: two's complement codes, the first in the lowest bits; zeros behind."""
    numel = codes.shape[1]
    padded = torch.nn.functional.pad(codes, (0, -numel % CODES_AT_A_BYTE)).long() & ((1 << bits) - 1)
    runs = padded.unflatten(1, (-1, CODES_AT_A_BYTE)) << bits * torch.arange(CODES_AT_A_BYTE, device=codes.device)
    words = runs.sum(-1, keepdim=True)
    data = (words >> 8 * torch.arange(bits, device=codes.device)) & 0xFF
    return data.flatten(1)[:, : -(-numel * bits // 8)].to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [K, n] -> int8 [K, codes], more than were packed where those do not fill their last bytes."""
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[1] % bits)).long().unflatten(1, (-1, bits))
    words = (padded << 8 * torch.arange(bits, device=packed.device)).sum(-1, keepdim=True)
    codes = (words >> bits * torch.arange(CODES_AT_A_BYTE, device=packed.device)) & ((1 << bits) - 1)
    sign = 1 << bits - 1
    return ((codes.flatten(1) ^ sign) - sign).to(torch.int8)


def _read_raw(slots: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    return _read(slots, part.codes, part.numel, dtype)


def _read(slots: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    data = slots[:, offset : offset + count * dtype.itemsize]
    return data.clone(memory_format=torch.contiguous_format).view(dtype)  # a wire buffer may begin anywhere


def _write(wire: Tensor, offset: int, values: Tensor) -> None:
    data = values.contiguous().view(torch.uint8)
    wire[:, offset : offset + data.shape[1]] = data


def _permute(slices: Tensor, slice_rows: int) -> Tensor:
    """[K, ...]: slice r * C + c moves to c * R + r, for R = slice_rows and C = K / R."""
    return slices.unflatten(0, (slice_rows, -1)).transpose(0, 1).flatten(0, 1)
