"""The operators of frozen weights in plain PyTorch: the oracle of the tests, and the fallback without compiled kernels.

Every function takes the arguments of the operator of its name (``frozen_format.py``), in that order. Compiled kernels do the
same bit for bit, but for ``matmul`` on CUDA, whose additions have another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops.blocks import pack_codes, round_to, scale_bits, scale_value, to_blocks, unpack_codes
from hf_zeropp.ops.format import QMAX, SCALE_MIN, SCALE_NAN

FIXED_ONE = 32768
"""A block's largest magnitude, in fixed point."""
TRIALS = tuple(sign * t for sign in (1, -1) for t in (6.5, 7.0, 7.5, 8.0, 8.5, 9.0, 10.0))
"""Codes at which the largest magnitude lands, in the order in which they are tried: the first of equals wins."""
MIN_CODE_4 = -8
"""The smallest INT4 code. The wire leaves it unused, since its codes are symmetric."""
LANES = 32
"""Partial sums of ``matmul``. They are a part of its definition, because the order of additions is."""
MAX_INPUTS = 32
"""Rows of x that ``matmul`` takes. ``frozen_format.has_fast_matmul`` says up to how many it is faster than a dense product."""
PIECE = 2**18
"""Weights that PyTorch packs at once, rounded down to rows: its temporaries take about a hundred bytes for each."""


def pack(weight: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Weight [..., columns] -> codes and scales, uint8 [..., bytes of a row]. A large weight is packed in pieces."""
    rows = weight.reshape(-1, weight.shape[-1])
    pieces = [_pack_rows(piece, bits, block) for piece in rows.split(max(1, PIECE // rows.shape[1]))]
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return codes.view(*weight.shape[:-1], codes.shape[-1]), scales.view(*weight.shape[:-1], scales.shape[-1])


def _pack_rows(rows: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    blocks = to_blocks(rows.float(), block)
    bound = scale_bits(blocks, QMAX[bits])  # also finds NaN, Inf, and blocks too small to have codes
    has_codes = (bound != 0) & (bound != SCALE_NAN)
    stored = bound if bits == 8 else torch.where(has_codes, _search_scale_bits(blocks, has_codes), bound)
    has_codes &= stored != 0  # a searched scale may be smaller than the bound, and flushed to zero
    # The sign of an INT4 scale is free, so ``scale > 0`` does not tell blocks with codes here, as it does on the wire.
    # Blocks without codes divide by 1, and their codes are set to zero below.
    scale = torch.where(has_codes, scale_value(stored), 1.0).unsqueeze(-1)
    low = MIN_CODE_4 if bits == 4 else -QMAX[bits]
    # INT4 must clamp, because the searched scale may clip the largest magnitude. The bounds are integers, so clamping
    # before rounding gives the same codes as clamping after it.
    codes = (blocks / scale).clamp(low, QMAX[bits]).round()
    codes = torch.where(has_codes.unsqueeze(-1), codes, 0.0).to(torch.int8).flatten(1)[:, : rows.shape[1]]
    packed = pack_codes(codes, 4) if bits == 4 else codes.contiguous().view(torch.uint8)
    return packed, stored.to(torch.int16).view(torch.uint8)


# [Note: the scale of a frozen INT4 block]
#
# The wire takes the scale of a block from its largest magnitude. A frozen weight is packed once, so there is time to
# search for the scale with the least squared error. A trial says where the largest magnitude lands among the codes:
#
#     for t in +-6.5 .. 10:                          beyond 8, the largest magnitude is clipped
#         q = clamp(rint(x / amax * t), -8, 7)       all 16 codes; the scale's sign decides which end has the eighth
#         s = sum(x q) / sum(q q)                    the best scale for these codes, by least squares
#     keep the s with the largest sum(x q)^2 / sum(q q)
#
# The error that the best s leaves is sum(x x) - sum(x q)^2 / sum(q q), so the largest quotient has the least error. The
# scale is rounded to bf16, and the block is encoded with it as rounded.
#
# The sums are taken over x / amax in fixed point, as integers of 16 bits and a sign. Sums of integers are exact in any
# order of addition, and so every kernel finds the same scale, whatever its vector length.
# ``scripts/results/frozen.md`` compares the error with those of other formats.
def _search_scale_bits(blocks: Tensor, has_codes: Tensor) -> Tensor:
    """fp32 [rows, blocks, block] -> bf16 bits of the scale with the least squared error, int32 [rows, blocks]."""
    amax = torch.where(has_codes, blocks.abs().amax(-1), 1.0)
    fixed = (torch.where(has_codes.unsqueeze(-1), blocks, 0.0) / amax.unsqueeze(-1) * FIXED_ONE).round()
    best = torch.full_like(amax, -1, dtype=torch.float64)
    scale = torch.zeros_like(best)
    # Each trial is made with all blocks at once. The comparison is strict in every kernel, so that the first of equal
    # scores wins on every device.
    for trial in TRIALS:
        # The factor is exact, since FIXED_ONE is a power of two: the product rounds once, here and in compiled kernels.
        codes = (fixed * (trial / FIXED_ONE)).round().clamp(MIN_CODE_4, QMAX[4])
        # The sums are integers of at most 2^30 (2^15 of a value, 2^3 of a code, 2^12 elements of a block), so fp64 adds
        # them exactly in any order. In a block without codes all are zero: the score is NaN, and the scale stays 0.
        xq, qq = (fixed.double() * codes.double()).sum(-1), (codes.double() ** 2).sum(-1)
        score = xq * xq / qq
        scale = torch.where(score > best, xq / qq, scale)
        best = torch.where(score > best, score, best)
    # Rounding twice, to fp32 and then to bf16, is a part of the definition: ``frozen_scale`` in ops/frozen_format.h
    # does so too. The mask takes back the sign extension of a negative scale.
    bits = (scale * (amax.double() / FIXED_ONE)).float().to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    return torch.where((bits & 0x7FFF) < SCALE_MIN, 0, bits)  # the sign apart: scales may be negative


def unpack(codes: Tensor, scales: Tensor, columns: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    """Codes and scales -> weight [..., columns] in ``dtype``."""
    values = _unscaled(codes.reshape(-1, codes.shape[-1]), columns, bits)
    scaled = to_blocks(values, block) * _scale_values(scales).view(values.shape[0], -1, 1)
    return round_to(scaled.flatten(1)[:, :columns], dtype).view(*codes.shape[:-1], columns)


def matmul(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, columns: int, bits: int, block: int
) -> Tensor:
    """Multiply x [M, columns] by a transposed weight and add the bias -> [M, rows] in the dtype of x, rounded once from fp32.

    The order of additions is the definition: within a block, products are summed in ``LANES`` lanes. The sums are scaled and
    added to those of the block before. Next, the upper half of the lanes is added to the lower half until one lane is left.
    The bias comes last.
    """
    inputs = to_blocks(x.float(), block).unflatten(-1, (-1, LANES)).unsqueeze(1)
    weights = to_blocks(_unscaled(codes, columns, bits), block).unflatten(-1, (-1, LANES))
    # Loops in place of a matrix product, whose order of additions PyTorch does not promise.
    lanes = torch.zeros(x.shape[0], codes.shape[0], LANES, device=x.device)
    for b in range(weights.shape[1]):
        sums = torch.zeros_like(lanes)
        for i in range(-(-min(block, columns - b * block) // LANES)):
            sums = sums + inputs[:, :, b, i] * weights[:, b, i]
        lanes = lanes + sums * _scale_values(scales)[:, b, None]
    while lanes.shape[-1] > 1:
        first, second = lanes.chunk(2, dim=-1)
        lanes = first + second
    sums = lanes.squeeze(-1)
    return round_to(sums if bias is None else sums + bias.float(), x.dtype)


def _scale_values(scales: Tensor) -> Tensor:
    # A copy, since scales may begin at an odd address, where no view of them is possible.
    return scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def _unscaled(codes: Tensor, columns: int, bits: int) -> Tensor:
    """uint8 [rows, bytes] -> the codes as fp32 [rows, columns]."""
    integers = unpack_codes(codes, 4) if bits == 4 else codes.view(torch.int8)
    return integers[:, :columns].float()
