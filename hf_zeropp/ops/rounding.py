"""Stochastic rounding of fp32 to bf16: for sums that are rounded again and again, as those of gradient accumulation are.

Rounded to nearest, a sum in bf16 stops growing once it is some 256 times as large as what is added to it. Rounded up with the
probability that is the distance to the number below, it is right on average, whatever the number of additions.

bf16 is the upper half of fp32. So a value is rounded by adding 16 random bits to its 32 and dropping the lower half: the carry
comes with exactly the right probability. Integers do not care about signs, since both halves of a float hold a magnitude.

[Note: random bits] Element i takes bits 16 (i mod 4) to 16 (i mod 4) + 15 of word i / 4 of SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014). The word follows from the seed and the index alone. All kernels therefore
give the same bits in whatever order they work, and PyTorch's generators, which belong to the user, are neither read nor moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops.operator import Filled, Fp32, Result
from hf_zeropp.ops.register import operator

PIECE = 1 << 20
"""Elements that PyTorch rounds at once: its temporaries take some 20 bytes for each. A multiple of 4."""

_MASK = (1 << 64) - 1
_STEP, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64's
_BF16_NAN = 0x7FC0


def random_word(seed: int, index: int) -> int:
    """Return word ``index`` of SplitMix64, 64 bits as an int64: [Note: random bits]."""
    word = (seed + _STEP * (index + 1)) & _MASK
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        word = (word ^ word >> shift) * factor & _MASK
    return _int64(word ^ word >> 31)


def _int64(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _random_words(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return ``random_word(seed, first)`` and those behind it, int64 [count]."""
    # Products and sums of int64 wrap around. Shifts to the right copy the sign, so the copies are masked away.
    words = torch.arange(first + 1, first + 1 + count, device=device).mul_(_int64(_STEP)).add_(seed)
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1]), (31, 1)):
        words ^= (words >> shift) & ((1 << 64 - shift) - 1)
        words *= _int64(factor)
    return words


def reference(values: Tensor, seed: int) -> Tensor:
    """Fp32 [...] -> bf16 [...], piece by piece."""
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    pieces = zip(values.view(-1).split(PIECE), out.view(-1).split(PIECE), strict=True)
    for index, (piece, rounded) in enumerate(pieces):
        words = _random_words(seed, index * PIECE // 4, -(-piece.numel() // 4), values.device)
        random = words.view(torch.int16)[: piece.numel()].int() & 0xFFFF
        # The sum may reach Inf's bits and never passes them, unless the value is a NaN.
        upper = (piece.view(torch.int32) + random) >> 16
        rounded.view(torch.int16).copy_(torch.where(piece.isnan(), _BF16_NAN, upper))
    return out


@operator(reference, counts=("numel",), out="uint16_t*")
def _round_stochastic(values: Fp32, seed: int) -> Result:
    return Result(values.device, (values.numel(),), (Filled(tuple(values.shape), torch.bfloat16),))


def round_stochastic(values: Tensor, seed: int, *, out: Tensor | None = None) -> Tensor:
    """Round to one of the two neighbours in bf16, to each with the probability that makes the mean exact.

    Args:
        values: fp32. Values that bf16 holds stay as they are, NaNs become the canonical one, and a value beyond the largest of
            bf16 may become infinite.
        seed: int64. The same seed and values give the same bits, on every device.
        out: bf16, as many elements. None for a new tensor.

    Returns:
        bf16 of the shape of ``values``, or ``out``.

    Raises:
        TypeError: ``values`` are not fp32, or ``out`` is not bf16.
        ValueError: sizes, devices or strides that do not fit.
    """
    return _round_stochastic(values, seed, out=out)
