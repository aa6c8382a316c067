"""The mathematics of one block in plain PyTorch: its scale and its codes.

``reference.py`` builds the operators of the wire from these functions, and ``frozen_reference.py`` those of frozen weights.
``ops/format.h`` states the same mathematics for compiled code.

A block x is encoded with a symmetric scale (ZeRO++ section 3.1, block-based quantization). In 8 bits, and in all widths but 4
and 3, the levels between which an element is rounded are evenly spaced:

    amax  = max |x|                                    exact: an integer maximum of the bits, where NaN and Inf win
    scale = amax / qmax, rounded up to bf16            up, so that the largest element is never clipped; but never to Inf
    code  = clamp(rint(x / scale), -qmax, qmax)        half to even, and a true division by the scale as stored
    x     ~ code * scale

In 4 and 3 bits a code is a square root ([Note: roots]):

    scale = amax / qmax^2, rounded up to bf16
    steps = rint(x / (scale / 2))                      half to even; an integer of at most 2 qmax^2
    code  = sign(steps) * rint(sqrt(|steps| / 2))      the integer that is nearest to sqrt(|x| / scale)
    x     ~ code * |code| * scale

A block with NaN or Inf stores the scale NaN and codes 0. A scale under 2^-100 is stored as 0 with codes 0. Decoding is
computed in fp32, then rounded to the output dtype: a NaN block decodes to NaNs, a tiny block to exact +0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops.format import CODES_AT_A_BYTE, LARGEST_LEVEL, ROOT_WIDTHS, SCALE_MAX, SCALE_MIN, SCALE_NAN

# [Note: roots]
#
# With 15 evenly spaced levels all that is under a fourteenth of a block's largest element becomes zero: a quarter of the
# gradients of a trained language model. Adam divides each gradient by its own size, so the small ones move their weights as far
# as the large ones do, and those weights would stay where they are. Squares lie densely near zero: with 15 of them one gradient
# in a hundred becomes zero. The error falls by two fifths as well, since few gradients are near the largest of their block.
#
# A code changes where sqrt(|x| / scale) passes k + 1/2, that is where x / (scale / 2) passes 2 k^2 + 2 k + 1/2. This is a
# half-integer, so nothing is lost by rounding to an integer first, and then no root is ever near to where its rounding changes.
# The first rounding is that of evenly spaced codes, with the step scale / 2: every kernel has it already.

# [Note: bitwise agreement]
#
# All kernels, on all devices, give the same bits. Ranks may therefore run different kernels, a run can be repeated
# elsewhere, and tests compare kernels exactly in place of choosing tolerances. Each of the following would break it:
#
# - The order of floating-point additions. The largest magnitude is an integer maximum, which has no order. Sums over
#   ranks are taken in rank order.
# - Fused multiply-add, which rounds once where a product and a sum round twice. Compilers are told not to fuse
#   (``-ffp-contract=off``, ``-fmad=false``). Kernels use it where the product is exact, and there the bits are the same
#   ([Note: exact products] in ops/cpu/frozen_matmul.cpp).
# - Approximate division. PyTorch divides a CUDA tensor by a Python number as a product with the reciprocal, so divisors
#   here are tensors. The compiled kernels multiply as well, but only in forms that are proven to give the same code
#   ([Note: quotients of bf16] in ops/format.h, [Note: division by reciprocal] in ops/cuda/codes.cuh).
# - Denormals, which processors may flush to zero. Scales under 2^-100 are zero by an integer comparison, and quotients
#   by larger scales round to the code 0 long before they become denormal.
# - NaNs, of which there are many. Rounding to 16 bits yields one canonical NaN. Only *which* NaN a decoded fp32 NaN is
#   stays open.

_INF_BITS = 0x7F800000


def to_blocks(values: Tensor, block: int) -> Tensor:
    """[K, numel] -> [K, blocks, block], the last block filled up with zeros."""
    missing = -values.shape[1] % block
    return torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, block))


def scale_bits(blocks: Tensor, bits: int) -> Tensor:
    """fp32 [K, blocks, block] -> the bf16 bits of each block's scale for codes of ``bits``, int32 [K, blocks]."""
    # Without its sign bit, a float is ordered as its bits are. NaN and Inf have the largest of all.
    amax = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    # A tensor divisor: for a number, PyTorch's CUDA division multiplies by the reciprocal.
    scale = amax.view(torch.float32) / torch.full_like(amax, LARGEST_LEVEL[bits], dtype=torch.float32)
    stored = (scale.view(torch.int32) + 0xFFFF) >> 16  # up: positive floats are ordered as their bits
    stored = stored.clamp(max=SCALE_MAX)  # an Inf would make NaNs of all codes 0
    stored = torch.where(stored < SCALE_MIN, 0, stored)  # an integer comparison: flush-to-zero modes cannot touch it
    # NaN and Inf are recognized by amax, and last. A NaN keeps its payload through the division, and rounding the bits
    # of one up can overflow int32, which the comparison with SCALE_MIN would take for a tiny scale.
    return torch.where(amax >= _INF_BITS, SCALE_NAN, stored)


def scale_value(bits: Tensor) -> Tensor:
    """Turn int32 bf16 bits into the fp32 values that they stand for: bf16 is the upper half of fp32."""
    return (bits << 16).view(torch.float32)


def codes_of(blocks: Tensor, scale: Tensor, bits: int) -> Tensor:
    """fp32 [K, blocks, block] and scales [K, blocks] -> int8 codes [K, blocks, block]."""
    step = (scale / 2 if bits in ROOT_WIDTHS else scale).unsqueeze(-1)
    largest = (2 if bits in ROOT_WIDTHS else 1) * LARGEST_LEVEL[bits]
    steps = (blocks / step).round().clamp(-largest, largest)
    # Blocks under the scales 0 and NaN have divided by them. What came of it is replaced before the conversion to int8,
    # which turns NaNs into different numbers on different processors. (Comparisons with NaN are false.)
    steps = torch.where(step > 0, steps, 0.0)
    codes = (steps.abs() / 2).sqrt().round().copysign(steps) if bits in ROOT_WIDTHS else steps
    return codes.to(torch.int8)


def levels_of(codes: Tensor, bits: int) -> Tensor:
    """int8 codes -> the scales that each stands for, in fp32."""
    levels = codes.float()
    return levels * levels.abs() if bits in ROOT_WIDTHS else levels


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """int8 [K, n] -> uint8 [K, ceil(n bits / 8)]: two's complement codes, the first in the lowest bits; zeros behind."""
    numel = codes.shape[1]
    padded = torch.nn.functional.pad(codes, (0, -numel % CODES_AT_A_BYTE)).long() & ((1 << bits) - 1)
    # Eight codes of b bits fill b bytes exactly, so each run becomes one integer, and is cut into bytes. The masked codes do
    # not overlap once they are shifted, so their sum is their bitwise OR, for which PyTorch has no reduction.
    runs = padded.unflatten(1, (-1, CODES_AT_A_BYTE)) << bits * torch.arange(CODES_AT_A_BYTE, device=codes.device)
    words = runs.sum(-1, keepdim=True)
    data = (words >> 8 * torch.arange(bits, device=codes.device)) & 0xFF
    return data.flatten(1)[:, : -(-numel * bits // 8)].to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [K, n] -> int8 [K, codes]. Returns more codes than were packed where those do not fill their last bytes."""
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[1] % bits)).long().unflatten(1, (-1, bits))
    words = (padded << 8 * torch.arange(bits, device=packed.device)).sum(-1, keepdim=True)
    codes = (words >> bits * torch.arange(CODES_AT_A_BYTE, device=packed.device)) & ((1 << bits) - 1)
    # Two's complement: flipping the sign bit and subtracting it again extends it to a whole byte.
    sign = 1 << bits - 1
    return ((codes.flatten(1) ^ sign) - sign).to(torch.int8)


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``, to nearest even. NaNs become the canonical one, because PyTorch's differ between loops."""
    values = values.float()
    if dtype == torch.float32:
        return values
    nan = torch.full((), float("nan"), dtype=dtype, device=values.device)
    return torch.where(values.isnan(), nan, values.to(dtype))
