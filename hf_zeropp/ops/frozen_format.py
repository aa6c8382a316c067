"""How frozen weights are stored: codes and scales in two tensors, and the operators that make and read them.

A weight [..., columns] (a matrix, or 3-D for fused experts) becomes, row by row,

    codes   uint8 [..., ceil(columns * bits / 8)]     INT8, or two INT4 codes in a byte, the low nibble first
    scales  uint8 [..., 2 * ceil(columns / block)]    the bytes of a bf16 for each block of consecutive columns

Both are uint8 because ``model.to(dtype)`` and its like cast floats, and gloo and NCCL move no int16.
Rows stay rows: FSDP2 shards both tensors along dim 0, and what a rank holds is the packed form of its rows. A block never
straddles rows. Elements decode to code * scale in fp32, rounded to the dtype asked for. NaN, Inf, zero and tiny blocks are
treated as on the wire (reference.py). INT8 scales too are the wire's. INT4 is not: nobody waits for a weight that is packed
once, so [Note: the scale of a frozen INT4 block] in ops/frozen_format.h:

    for t in +-6.5 .. 10:                          where the largest magnitude may land; beyond 8 it is clipped
        q = clamp(rint(x / amax * t), -8, 7)       16 codes; the scale's sign decides which end has the eighth
        s = sum(x q) / sum(q q)                    the best scale for these codes
    keep the s with the largest sum(x q)^2 / sum(q q), that is with the least squared error; round it to bf16, encode with it

Sums are taken over x / amax as 16-bit integers: exact, in whatever order a machine adds. So the compiled kernels
(ops/cpu/frozen_*.cpp) and the PyTorch code below agree bit for bit. Measured against other searches and formats:
scripts/results/quantizers.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from hf_zeropp import ops
from hf_zeropp.ops import reference
from hf_zeropp.ops.format import FLOAT_DTYPES, QMAX, SCALE_MIN, SCALE_NAN

FROZEN_BITS = (8, 4)
DEFAULT_BLOCK = 128
FIXED_ONE = 32768
TRIALS = tuple(sign * t for sign in (1, -1) for t in (6.5, 7.0, 7.5, 8.0, 8.5, 9.0, 10.0))
LANES = 32
"""Partial sums of `matmul`: a part of its definition, as the order of additions is."""
MAX_INPUTS = 4
"""Rows of x up to which `matmul` may be called: with more, decoding once and multiplying dense is faster."""


@dataclasses.dataclass(frozen=True)
class FrozenFormat:
    """Bits per code, and columns that share one scale (a multiple of 32)."""

    bits: int
    block: int = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in FROZEN_BITS:  # a checkpoint's config may hold 8.0 or "8"
            raise ValueError(
                f"Frozen weights are packed in 8 or 4 bits, got bits={self.bits!r}. None leaves them as they are."
            )
        if type(self.block) is not int or not 32 <= self.block <= 4096 or self.block % 32:
            raise ValueError(
                f"The block of frozen weights must be a multiple of 32 from 32 to 4096, got {self.block!r}."
            )

    def code_columns(self, columns: int) -> int:
        return -(-columns * self.bits // 8)

    def scale_columns(self, columns: int) -> int:
        return 2 * -(-columns // self.block)

    def nbytes(self, shape: torch.Size | tuple[int, ...]) -> int:
        """Bytes of codes and scales of a weight of this shape."""
        rows = torch.Size(shape[:-1]).numel()
        return rows * (self.code_columns(shape[-1]) + self.scale_columns(shape[-1]))


def pack(weight: Tensor, format: FrozenFormat) -> tuple[Tensor, Tensor]:
    """Encode a weight [..., columns] in fp32, bf16 or fp16. Returns codes and scales."""
    if weight.dtype not in FLOAT_DTYPES:
        raise TypeError(f"Frozen weights are packed from float32, bfloat16 or float16, got {weight.dtype}.")
    return torch.ops.zeropp.frozen_pack(weight.contiguous(), format.bits, format.block)


def unpack(
    codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Decode to [..., columns] in `dtype`, or into `out`, a contiguous tensor of that shape and dtype."""
    if out is None:
        return torch.ops.zeropp.frozen_unpack(codes, scales, columns, format.bits, format.block, dtype)
    torch.ops.zeropp.frozen_unpack_out(codes, scales, format.bits, format.block, out)
    return out


def matmul(x: Tensor, codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat) -> Tensor:
    """x [M <= MAX_INPUTS, columns] times the transposed weight: [M, rows] in x's dtype. Sums are fp32.

    Reads codes instead of a dense weight: a quarter of the bytes of bf16 at 4 bits, and nothing is written.
    """
    return torch.ops.zeropp.frozen_matmul(x.contiguous(), codes, scales, format.bits, format.block)


def has_fast_matmul(x: Tensor) -> bool:
    """Whether `matmul` takes x [M, columns] and runs compiled."""
    return x.shape[0] <= MAX_INPUTS and ops.compiled_kernels(x.device.type) is not None


# ------------------------------------------------------------------------------------------------------------- kernels


def _pack_op(weight: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    codes, scales = _pack_fake(weight, bits, block)
    if not weight.numel():
        return codes, scales
    if (kernels := ops.compiled_kernels(weight.device.type)) is None:
        return _pack_in_pieces(weight, FrozenFormat(bits, block))
    columns = weight.shape[-1]
    rows = weight.numel() // columns
    dtype = FLOAT_DTYPES.index(weight.dtype)
    outputs = codes.data_ptr(), scales.data_ptr()
    kernels.call("frozen_pack", weight.device, weight.data_ptr(), dtype, rows, columns, block, bits, *outputs)
    return codes, scales


def _pack_fake(weight: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    format, columns = FrozenFormat(bits, block), weight.shape[-1]
    codes = weight.new_empty((*weight.shape[:-1], format.code_columns(columns)), dtype=torch.uint8)
    return codes, weight.new_empty((*weight.shape[:-1], format.scale_columns(columns)), dtype=torch.uint8)


def _unpack_op(codes: Tensor, scales: Tensor, columns: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    out = _unpack_fake(codes, scales, columns, bits, block, dtype)
    _unpack_out_op(codes, scales, bits, block, out)
    return out


def _unpack_fake(codes: Tensor, scales: Tensor, columns: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)


def _check_packed(codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat) -> None:
    """Raise ``ValueError`` unless codes and scales are those of a weight [..., columns]: kernels would read past their end."""
    rows = codes.shape[:-1]
    for name, tensor, width in (
        ("codes", codes, format.code_columns(columns)),
        ("scales", scales, format.scale_columns(columns)),
    ):
        if tensor.dtype != torch.uint8 or tensor.shape != (*rows, width):
            raise ValueError(
                f"Expected {name} of shape {(*rows, width)} and dtype uint8 for {columns} columns in {format.bits} bits and "
                f"blocks of {format.block}, got {tuple(tensor.shape)} and {tensor.dtype}."
            )


def _unpack_out_op(codes: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    _check_packed(codes, scales, out.shape[-1], FrozenFormat(bits, block))
    if out.shape[:-1] != codes.shape[:-1] or not out.is_contiguous():
        raise ValueError(f"Expected a contiguous output with rows {tuple(codes.shape[:-1])}, got {tuple(out.shape)}.")
    if not out.numel():
        return
    if (kernels := ops.compiled_kernels(codes.device.type)) is None:
        out.copy_(reference_unpack(codes, scales, out.shape[-1], FrozenFormat(bits, block), out.dtype))
        return
    columns = out.shape[-1]
    codes, scales, dtype = codes.contiguous(), scales.contiguous(), FLOAT_DTYPES.index(out.dtype)
    shape = out.numel() // columns, columns, block, bits
    kernels.call("frozen_unpack", codes.device, codes.data_ptr(), scales.data_ptr(), *shape, out.data_ptr(), dtype)


def _matmul_op(x: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int) -> Tensor:
    _check_packed(codes, scales, x.shape[1], FrozenFormat(bits, block))
    padded = _padded_blocks(x, block)
    out = torch.empty(x.shape[0], codes.shape[0], dtype=torch.float32, device=x.device)
    if not out.numel():
        return out.to(x.dtype)
    if (kernels := ops.compiled_kernels(x.device.type)) is None:
        return reference_matmul(x, codes, scales, FrozenFormat(bits, block))
    shape = codes.shape[0], x.shape[1], block, bits
    inputs = padded.data_ptr(), x.shape[0], codes.data_ptr(), scales.data_ptr()
    kernels.call("frozen_matmul", x.device, *inputs, *shape, out.data_ptr())
    return out.to(x.dtype)


def _matmul_fake(x: Tensor, codes: Tensor, scales: Tensor, bits: int, block: int) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


def _padded_blocks(x: Tensor, block: int) -> Tensor:
    """[M, columns] -> fp32 [M, num_blocks, block], zeros behind the last block. (Blocks are multiples of 32 lanes.)"""
    missing = -x.shape[1] % block
    x = x.float() if missing == 0 else torch.nn.functional.pad(x.float(), (0, missing))
    return x.unflatten(1, (-1, block))


# ----------------------------------------------------------------------------------------------------------- reference


PIECE = 2**18
"""Weights that PyTorch packs at once, rounded down to rows: its temporaries take about a hundred bytes for each."""


def _pack_in_pieces(weight: Tensor, format: FrozenFormat) -> tuple[Tensor, Tensor]:
    """`reference_pack`, without temporaries many times as large as the weight."""
    rows = weight.reshape(-1, weight.shape[-1])
    pieces = [reference_pack(piece, format) for piece in rows.split(max(1, PIECE // rows.shape[1]))]
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return codes.view(*weight.shape[:-1], codes.shape[-1]), scales.view(*weight.shape[:-1], scales.shape[-1])


def reference_pack(weight: Tensor, format: FrozenFormat) -> tuple[Tensor, Tensor]:
    rows = weight.reshape(-1, weight.shape[-1]).float()
    blocks = reference._to_blocks(rows, format.block)
    bound = reference._scale_bits(blocks, QMAX[format.bits])
    has_codes = (bound != 0) & (bound != SCALE_NAN)
    bits = bound if format.bits == 8 else torch.where(has_codes, _search_scale_bits(blocks, has_codes), bound)
    has_codes &= bits != 0
    scale = torch.where(has_codes, reference._scale_value(bits), 1.0).unsqueeze(-1)
    low = -8 if format.bits == 4 else -127
    codes = (blocks / scale).clamp(low, QMAX[format.bits]).round()
    codes = torch.where(has_codes.unsqueeze(-1), codes, 0.0).to(torch.int8).flatten(1)[:, : rows.shape[1]]
    packed = reference.pack_codes(codes, 4) if format.bits == 4 else codes.contiguous().view(torch.uint8)
    scales = bits.to(torch.int16).view(torch.uint8)
    return packed.view(*weight.shape[:-1], packed.shape[-1]), scales.view(*weight.shape[:-1], scales.shape[-1])


def _search_scale_bits(blocks: Tensor, has_codes: Tensor) -> Tensor:
    """fp32 [rows, blocks, block] -> bf16 bits of the scale with the least squared error, int32 [rows, blocks]."""
    amax = torch.where(has_codes, blocks.abs().amax(-1), 1.0)
    fixed = (torch.where(has_codes.unsqueeze(-1), blocks, 0.0) / amax.unsqueeze(-1) * FIXED_ONE).round()
    best = torch.full_like(amax, -1, dtype=torch.float64)
    scale = torch.zeros_like(best)
    for trial in TRIALS:
        codes = (fixed * (trial / FIXED_ONE)).round().clamp(-8, 7)
        # Integers of at most 31 bits: exact in fp64.
        xq, qq = (fixed.double() * codes.double()).sum(-1), (codes.double() ** 2).sum(-1)
        score = xq * xq / qq
        scale = torch.where(score > best, xq / qq, scale)
        best = torch.where(score > best, score, best)
    bits = (scale * (amax.double() / FIXED_ONE)).float().to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    return torch.where((bits & 0x7FFF) < SCALE_MIN, 0, bits)


def reference_unpack(codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat, dtype: torch.dtype) -> Tensor:
    values = _decoded_codes(codes.reshape(-1, codes.shape[-1]), columns, format)
    scaled = reference._to_blocks(values, format.block) * _scale_values(scales).view(values.shape[0], -1, 1)
    return reference.round_to(scaled.flatten(1)[:, :columns], dtype).view(*codes.shape[:-1], columns)


def reference_matmul(x: Tensor, codes: Tensor, scales: Tensor, format: FrozenFormat) -> Tensor:
    """Products are summed in lanes, per block; blocks are scaled and added in order; then the lanes are folded in halves."""
    columns = x.shape[1]
    inputs = _padded_blocks(x, format.block).unflatten(-1, (-1, LANES)).unsqueeze(1)
    weights = reference._to_blocks(_decoded_codes(codes, columns, format), format.block).unflatten(-1, (-1, LANES))
    lanes = torch.zeros(x.shape[0], codes.shape[0], LANES, device=x.device)
    for b in range(weights.shape[1]):
        sums = torch.zeros_like(lanes)
        for i in range(-(-min(format.block, columns - b * format.block) // LANES)):
            sums = sums + inputs[:, :, b, i] * weights[:, b, i]
        lanes = lanes + sums * _scale_values(scales)[:, b, None]
    while lanes.shape[-1] > 1:
        first, second = lanes.chunk(2, dim=-1)
        lanes = first + second
    return lanes.squeeze(-1).to(x.dtype)


def _scale_values(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.bfloat16).float()


def _decoded_codes(codes: Tensor, columns: int, format: FrozenFormat) -> Tensor:
    """uint8 [rows, bytes] -> fp32 [rows, columns], unscaled."""
    integers = reference.unpack_codes(codes, 4) if format.bits == 4 else codes.view(torch.int8)
    return integers[:, :columns].float()


# ------------------------------------------------------------------------------------------------------- registration

_LIBRARY = torch.library.Library("zeropp", "FRAGMENT")


def _define(schema: str, implementation: Callable, fake: Callable) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zeropp::{name}", fake, lib=_LIBRARY)


_define("frozen_pack(Tensor weight, int bits, int block) -> (Tensor, Tensor)", _pack_op, _pack_fake)
_define(
    "frozen_unpack(Tensor codes, Tensor scales, int columns, int bits, int block, ScalarType dtype) -> Tensor",
    _unpack_op,
    _unpack_fake,
)
_define(
    "frozen_unpack_out(Tensor codes, Tensor scales, int bits, int block, Tensor(a!) out) -> ()",
    _unpack_out_op,
    lambda codes, scales, bits, block, out: None,
)
_define("frozen_matmul(Tensor x, Tensor codes, Tensor scales, int bits, int block) -> Tensor", _matmul_op, _matmul_fake)
