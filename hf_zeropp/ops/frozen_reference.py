"""The operators of frozen weights in plain PyTorch: the oracle of the tests, and the fallback without compiled kernels.

Every function takes the arguments of the operator of its name (``frozen_format.py``), in that order. Compiled kernels do the
same bit for bit, but for ``matmul`` on CUDA, whose additions have another order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_zeropp.ops.blocks import pack_codes, round_to, scale_bits, scale_value, to_blocks, unpack_codes
from hf_zeropp.ops.format import QMAX, SCALE_NAN

Decode = Callable[[Tensor], Tensor]

LEVELS = (0, 10, 20, 31, 43, 56, 72, 93, 127, -127, -89, -67, -50, -36, -23, -11)
"""The level of each code of 4 bits: code 0 first, code 15 last. An element decodes to its level times a scale.

[Note: the levels of 4 bits] says where the levels come from."""
FINE = 16
"""Steps from one level to the next integer, in which elements are compared with levels."""
RUN = 16
"""Columns. In 4 bits, runs of so many have the first and the second scale of their block in turn."""
TRIALS = (0, -1, 1)
"""Steps from the nearest scale to those that are tried, in the order in which they are: the first of equals wins."""
FIRST_EXPONENT = 79
"""Biased exponent (as fp32 has it) of the first scale whose exponent bits are 0: of 2^-48."""
RATIO_EXPONENT = 125
"""Biased exponent of a ratio whose exponent bits are 0: of 1/4."""
FIRST_MIN, FIRST_MAX = 16, 1007
"""The least and the largest first scale: 2^-47 and 31 * 2^10, in their 10 bits."""
RATIO_MAX = 63
"""The largest ratio of the second scale to the first, 31/8, in its 6 bits. The least is 1/4."""
SAFE_RATIO = 3
"""The largest ratio at which the search for a first scale begins. Rounding it down and trying the next lower one makes the ratio
larger, but for no more than 3 * 33/32 * 17/16 = 3.29, which is under the largest that can be said."""
SCALES_NAN = 0xFFFF
"""The scales of a block with a NaN, an Inf, or a magnitude that no scale reaches: from 4.1 million on for the first scale, and
from 12.3 million on for the second."""
LANES = 32
"""Partial sums of ``matmul``. They are a part of its definition, because the order of additions is."""
MAX_INPUTS = 32
"""Rows of x that ``matmul`` takes. ``frozen_format.has_fast_matmul`` says up to how many it is faster than a dense product."""
PIECE = 2**18
"""Weights that PyTorch packs at once, rounded down to rows: its temporaries take about a hundred bytes for each."""


def pack(weight: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Weight [..., columns] -> codes and scales, uint8 [..., bytes of a row]. A large weight is packed in pieces."""
    rows = weight.reshape(-1, weight.shape[-1])
    pack_rows = _pack_rows_8 if bits == 8 else _pack_rows_4
    pieces = [pack_rows(piece, block) for piece in rows.split(max(1, PIECE // rows.shape[1]))]
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return codes.view(*weight.shape[:-1], codes.shape[-1]), scales.view(*weight.shape[:-1], scales.shape[-1])


def _pack_rows_8(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    blocks = to_blocks(rows.float(), block)
    stored = scale_bits(blocks, 8)
    has_codes = ((stored != 0) & (stored != SCALE_NAN)).unsqueeze(-1)
    scale = torch.where(has_codes, scale_value(stored).unsqueeze(-1), 1.0)
    codes = torch.where(has_codes, (blocks / scale).clamp(-QMAX[8], QMAX[8]).round(), 0.0)
    return codes.to(torch.int8).flatten(1)[:, : rows.shape[1]].contiguous().view(torch.uint8), _bytes(stored)


# [Note: the levels of 4 bits]
#
# Weights of a trained layer are about normal, so equally spaced codes waste some. NF4 (QLoRA, arXiv:2305.14314) spaces 16
# levels by the normal distribution, and AF4 (arXiv:2306.06965) by the largest of a block as well. These are AF4's: over
# blocks of 64 normal numbers, divided by their largest magnitude, they have the least mean absolute error of all 16 levels
# with -1, 0 and 1. Here they are rounded to integers of 8 bits. So 4 bits decode as 8 do, once a table is looked up, and
# products with inputs of 16 bits stay exact.
#
# The mean squared error has other best levels, further apart at zero. They are worse for a language model: small weights
# stand where inputs are large. ``scripts/results/frozen.md`` has the figures.

# [Note: the scales of 4 bits]
#
# A block has 16 bits for scales, and two of them: runs of 16 columns take the first and the second in turn. At the default
# of 128 columns, 64 share a scale, which is what NF4 does with fp32 scales, or with nested ones. Turns, and not halves:
# lanes 0 to 15 of ``matmul`` meet the first scale and lanes 16 to 31 the second, and no lane meets both.
#
#     first    10 bits   6 of exponent and 4 of mantissa: (1 + m / 16) 2^(e - 48), 0 if e = 0, NaN if e = 63
#     ratio     6 bits   2 of exponent and 4 of mantissa: (1 + m / 16) 2^(e - 2);  second = first * ratio
#
# Bits of such a float count upwards as its values do, so a step to the next value adds 1. The first scale begins at the
# nearest to amax / 127, where amax is the largest magnitude of its runs, or a third of that of the others if this is more: then
# the ratio can say what the second scale needs.
# It, and the steps to both sides of it, are tried: the one with the least squared error stays. The ratio is found in the
# same way, to the first scale as stored.
#
# Half a step of rounding and a whole one of the search may clip the largest element, by 3/32 at most. Larger steps have less
# squared error yet, and a worse model. The price of the ratio: where the elements of one scale are much smaller than those of the
# other, they are rounded by a scale for magnitudes of a third or a quarter of the larger ones.
#
# An element x is compared with levels in integers, n = rint(x / scale * 16). The error, a sum of (n - 16 level)^2, is
# exact in any order of addition, so every kernel finds the same scales, whatever its vector length. Of two levels that are
# equally near, the lower one is taken.


def _pack_rows_4(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    # [rows, blocks, 2, block / 2]: the columns of the first scale, then those of the second.
    blocks = to_blocks(rows.float(), block).unflatten(-1, (-1, 2, RUN)).transpose(-2, -3).flatten(-2)
    amax = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1).view(torch.float32)  # as integers: NaN and Inf win
    first_aim, second_aim = _largest_level(amax).unbind(-1)
    nearest = _small_float(
        torch.maximum(first_aim, second_aim / torch.full_like(second_aim, SAFE_RATIO)), FIRST_EXPONENT
    )
    is_nan = ~amax.isfinite().all(-1) | (nearest > FIRST_MAX)
    has_codes = ~is_nan & (nearest >= FIRST_MIN)
    blocks = torch.where(has_codes[..., None, None], blocks, 0.0)
    one = torch.ones_like(first_aim)
    first, first_codes = _best(
        blocks[..., 0, :], nearest.clamp(FIRST_MIN, FIRST_MAX), _first_scale, one, FIRST_MIN, FIRST_MAX
    )
    scale = _first_scale(first)
    ratio = _small_float(torch.where(has_codes, second_aim, one) / scale, RATIO_EXPONENT).clamp(0, RATIO_MAX)
    ratio, second_codes = _best(blocks[..., 1, :], ratio, _ratio, scale, 0, RATIO_MAX)
    stored = torch.where(has_codes, first << 6 | ratio, torch.where(is_nan, SCALES_NAN, 0))
    codes = torch.stack((first_codes, second_codes), dim=-2).unflatten(-1, (-1, RUN)).transpose(-2, -3).flatten(1)
    return pack_codes(codes[:, : rows.shape[1]], 4), _bytes(stored)


def _best(
    values: Tensor, nearest: Tensor, value_of: Decode, unit: Tensor, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """Return the small float whose value times ``unit`` has the least squared error, and the codes under it.

    The search begins at ``nearest``, int32 [...], and ``value_of`` decodes a small float. Values are fp32 [..., n], codes int8
    [..., n].
    """
    levels = torch.tensor(LEVELS, dtype=torch.int32, device=values.device)
    ordered = levels.sort().values * FINE
    bounds = (ordered[1:] + ordered[:-1]) // 2
    best = torch.full_like(unit, torch.inf, dtype=torch.float64)
    chosen, codes = nearest, torch.zeros_like(values, dtype=torch.int8)
    for trial in TRIALS:
        tried = (nearest + trial).clamp(low, high)
        scale = value_of(tried) * unit
        fine = (values / scale.unsqueeze(-1) * FINE).round().int()
        # The first code is that of 0, and two's complement orders the others: -7 is the code of the lowest level.
        index = torch.bucketize(fine, bounds) + levels.argmin() - len(LEVELS)
        error = (fine - levels[index & 0xF] * FINE).double().square().sum(-1) * scale.double().square()
        is_better = error < best
        best = torch.where(is_better, error, best)
        chosen = torch.where(is_better, tried, chosen)
        codes = torch.where(is_better.unsqueeze(-1), index.to(torch.int8), codes)
    return chosen, codes


def _largest_level(amax: Tensor) -> Tensor:
    # A tensor divisor: for a number, PyTorch's CUDA division multiplies by the reciprocal.
    return amax / torch.full_like(amax, max(LEVELS))


def _small_float(value: Tensor, exponent: int) -> Tensor:
    """fp32 -> int32, the nearest float of 4 bits of mantissa. ``exponent`` is the biased one of a float whose own is 0."""
    return ((value.view(torch.int32) + (1 << 18)) >> 19) - (exponent << 4)


def _first_scale(bits: Tensor) -> Tensor:
    """int32 of 10 bits -> fp32. 0 and NaN are left to the caller."""
    return ((bits + (FIRST_EXPONENT << 4)) << 19).view(torch.float32)


def _ratio(bits: Tensor) -> Tensor:
    """int32 of 6 bits -> fp32."""
    return ((bits + (RATIO_EXPONENT << 4)) << 19).view(torch.float32)


def _bytes(stored: Tensor) -> Tensor:
    """int32 [rows, blocks] -> the low 16 bits of each, uint8 [rows, 2 blocks]."""
    return stored.to(torch.int16).view(torch.uint8)


def unpack(codes: Tensor, scales: Tensor, columns: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    """Codes and scales -> weight [..., columns] in ``dtype``."""
    values = _unscaled(codes.reshape(-1, codes.shape[-1]), columns, bits)
    by_lane = to_blocks(values, block).unflatten(-1, (-1, LANES))
    scaled = by_lane * scale_values(scales.reshape(values.shape[0], -1), bits).unsqueeze(-2)
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
    lane_scales = scale_values(scales, bits)
    for b in range(weights.shape[1]):
        sums = torch.zeros_like(lanes)
        for i in range(-(-min(block, columns - b * block) // LANES)):
            sums = sums + inputs[:, :, b, i] * weights[:, b, i]
        lanes = lanes + sums * lane_scales[:, b]
    while lanes.shape[-1] > 1:
        first, second = lanes.chunk(2, dim=-1)
        lanes = first + second
    sums = lanes.squeeze(-1)
    return round_to(sums if bias is None else sums + bias.float(), x.dtype)


def scale_values(scales: Tensor, bits: int) -> Tensor:
    """uint8 [rows, 2 blocks] -> the scale that each lane meets, fp32 [rows, blocks, LANES]."""
    # A copy, since scales may begin at an odd address, where no view of them is possible.
    words = scales.clone(memory_format=torch.contiguous_format)
    if bits == 8:
        return words.view(torch.bfloat16).float().unsqueeze(-1).expand(-1, -1, LANES)
    stored = words.view(torch.int16).int() & 0xFFFF
    field = stored >> 6
    first = torch.where(field > FIRST_MAX, torch.nan, torch.where(field < FIRST_MIN, 0.0, _first_scale(field)))
    return torch.stack((first, first * _ratio(stored & RATIO_MAX)), dim=-1).repeat_interleave(RUN, dim=-1)


def _unscaled(codes: Tensor, columns: int, bits: int) -> Tensor:
    """uint8 [rows, bytes] -> the codes' levels as fp32 [rows, columns]."""
    if bits == 8:
        return codes.view(torch.int8)[:, :columns].float()
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=codes.device)
    return levels[unpack_codes(codes, 4)[:, :columns].long() & 0xF]
