"""The quantization format stated in plain PyTorch: the oracle of the tests and the fallback without compiled kernels.

Everything is bit for bit what `ops/format.h` does, on any device. What that takes is commented where it happens; only
*which* NaN a decoded NaN is stays open.

Encoding a block x (the paper's qwZ, with symmetric scales):

    amax  = max |x|                                    exact: an integer maximum of the bits, where NaN and Inf win
    scale = amax / qmax, rounded up to bf16            up, so that the largest element is never clipped
    code  = clamp(rint(x / scale), -qmax, qmax)        half to even, and a true division by the scale as stored

A block with NaN or Inf stores scale NaN and codes 0; a scale under 2^-100 is stored as 0 with codes 0. Decoding is
code * scale in fp32, then rounding to the output dtype: a NaN block gives NaNs, a tiny block exact +0.

Slices are permuted on the way, as the two hops of a collective need it (rank order y * N + x against [x, y]). Of
K = R * C slices with `slice_rows` R, encode writes input slice r * C + c to wire slot c * R + r; decode is the same
permutation from wire slot to output slice, so that decoding with `slice_rows` C undoes encoding with R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.format import QMAX, SCALE_MIN, SCALE_NAN, Part, WireLayout, num_blocks

_INF_BITS = 0x7F800000


def quantize(input: Tensor, layout: WireLayout, slice_rows: int = 1) -> Tensor:
    """K slices of `layout.numel` elements -> uint8 wire [K, layout.nbytes]."""
    slices = _permute(input.reshape(-1, layout.numel), slice_rows)
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
) -> Tensor:
    """uint8 wire [num_sources, P, nbytes] -> [P, numel] in `dtype`: (initial + sum over sources, in order) * scale."""
    sources = iter(wire.reshape(num_sources, -1))
    if initial is None:
        total = dequantize(next(sources), layout, torch.float32)
    else:
        total = initial.reshape(-1, layout.numel)
    for source in sources:
        total = total + dequantize(source, layout, torch.float32)
    return round_to(total if scale == 1.0 else total * scale, dtype)


def dequantize_sum_quantize(
    wire: Tensor, layout: WireLayout, out_layout: WireLayout, num_sources: int, initial: Tensor | None = None
) -> Tensor:
    """The sum of `dequantize_sum` in fp32, encoded again: uint8 wire [P, out_layout.nbytes]."""
    return quantize(dequantize_sum(wire, layout, num_sources, initial), out_layout)


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, to nearest even, a NaN becoming the canonical one (PyTorch's NaNs differ between loops)."""
    values = values.float()
    if dtype == torch.float32:
        return values
    nan = torch.full((), float("nan"), dtype=dtype, device=values.device)
    return torch.where(values.isnan(), nan, values.to(dtype))


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
    _write(wire, part.codes, _pack_nibbles(codes) if part.bits == 4 else codes.contiguous())


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
    if part.bits == 4:
        packed = _read(slots, part.codes, -(-part.numel // 2), torch.uint8)
        codes = _unpack_nibbles(packed)[:, : part.numel]
    else:
        codes = _read(slots, part.codes, part.numel, torch.int8)
    scaled = _to_blocks(codes.float(), block) * _scale_value(scale_bits.int()).unsqueeze(-1)
    return scaled.flatten(1)[:, : part.numel]


def _scale_value(bits: Tensor) -> Tensor:
    return (bits << 16).view(torch.float32)


def _to_blocks(values: Tensor, block: int) -> Tensor:
    """[K, numel] -> [K, blocks, block], the last block filled up with zeros."""
    missing = -values.shape[1] % block
    return torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, block))


def _pack_nibbles(codes: Tensor) -> Tensor:
    """int8 [K, n] -> uint8 [K, ceil(n / 2)]: two's complement nibbles, low one first, an odd tail padded with zero."""
    pairs = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).view(torch.uint8).unflatten(1, (-1, 2))
    return (pairs[..., 0] & 0xF) | (pairs[..., 1] << 4)


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [K, n] -> int8 [K, 2 n]."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1)
    return (nibbles ^ 8).view(torch.int8) - 8


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
