"""The operators of the wire in Triton: the bits of ``reference.py``, on GPUs for which there is no compiled library.

Triton comes with PyTorch's CUDA wheels and compiles for the GPU at hand, so no toolkit is needed. ``triton_kernels.py`` starts
these kernels, one launch for each part of a layout. A program computes one *tile* of a part, of one slice: some whole blocks
where it encodes, any run of elements where it only decodes. Offsets count from the start of the slice's wire or elements.

[Note: bitwise agreement] in ``blocks.py`` holds here as well. Division is ``div_rn``, because Triton's ``/`` is approximate. The
host forbids fused multiply-add for every launch. Rounding to integers adds and subtracts 1.5 * 2^23, which rounds half to even.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_zeropp.ops.format import SCALE_MAX, SCALE_MIN, SCALE_NAN

_SCALE_MIN = tl.constexpr(SCALE_MIN)
_SCALE_MAX = tl.constexpr(SCALE_MAX)
_SCALE_NAN = tl.constexpr(SCALE_NAN)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all but the sign bit
_INF_BITS = tl.constexpr(0x7F800000)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: sums with it have no bits behind the point


# ---- Blocks: values become scales and codes, and back.


@triton.jit
def _has_roots(BITS: tl.constexpr):
    return tl.constexpr((BITS == 4) | (BITS == 3))  # ``ROOT_WIDTHS``


@triton.jit
def _largest_level(BITS: tl.constexpr):
    QMAX: tl.constexpr = 1.0 * ((1 << (BITS - 1)) - 1)
    return tl.constexpr(QMAX * QMAX if _has_roots(BITS) else QMAX)


@triton.jit
def _scale_value(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scale_bits(values, BITS: tl.constexpr):
    """fp32 [rows, block] -> the bf16 bits of each row's scale, int32 [rows]."""
    amax = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
    # A NaN's payload could overflow below, and its scale is replaced in any case.
    finite = tl.minimum(amax, _INF_BITS)
    scale = tl.math.div_rn(finite.to(tl.float32, bitcast=True), tl.full(finite.shape, _largest_level(BITS), tl.float32))
    bits = tl.minimum((scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, _SCALE_MAX)
    bits = tl.where(bits < _SCALE_MIN, 0, bits)
    return tl.where(amax >= _INF_BITS, _SCALE_NAN, bits)


@triton.jit
def _codes(values, scale, BITS: tl.constexpr):
    """fp32 [rows, block] and the scales of the rows, fp32 [rows, 1] -> integers in fp32."""
    # Comparisons with NaN are false, so blocks under the scales 0 and NaN get zeros.
    STEPS: tl.constexpr = 2.0 if _has_roots(BITS) else 1.0  # of a scale
    step = tl.where(scale > 0, scale / STEPS, 1.0)
    quotient = tl.where(scale > 0, tl.math.div_rn(values, step + tl.zeros_like(values)), 0.0)
    LARGEST: tl.constexpr = STEPS * _largest_level(BITS)
    codes = (tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST) + _ROUNDER) - _ROUNDER
    if _has_roots(BITS):
        root = (tl.sqrt(tl.abs(codes) / STEPS) + _ROUNDER) - _ROUNDER
        codes = tl.where(codes < 0, -root, root)
    return codes


# ---- Memory. ``index`` counts the elements of the part, int64; ``inside`` masks those that the part has.


@triton.jit
def _load_word(bytes_, inside, NBYTES: tl.constexpr):
    """Return little-endian integers of NBYTES, which may lie anywhere."""
    word = tl.load(bytes_, mask=inside, other=0).to(tl.int32)
    for byte in tl.static_range(1, NBYTES):
        word = word | (tl.load(bytes_ + byte, mask=inside, other=0).to(tl.int32) << (8 * byte))
    return word


@triton.jit
def _store_word(bytes_, word, inside, NBYTES: tl.constexpr):
    for byte in tl.static_range(NBYTES):
        tl.store(bytes_ + byte, ((word >> (8 * byte)) & 0xFF).to(tl.uint8), mask=inside)


# Triton compiles what stands behind a ``return``, also where a constant decides that it is never reached. So these functions
# have a branch for each case, and one ``return``.


@triton.jit
def _to_raw(values, RAW: tl.constexpr):
    """Round fp32 to RAW, to nearest even with one canonical NaN, and return the bits as int32."""
    bits = values.to(tl.int32, bitcast=True)
    is_nan = (bits & _MAGNITUDE) > _INF_BITS
    if RAW == tl.float32:
        words = bits
    elif RAW == tl.bfloat16:
        # By integers. Half a unit carries into the exponent where it should, up to Inf.
        words = tl.where(is_nan, 0x7FC0, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)
    else:
        half = tl.where(is_nan, 0.0, values).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        words = tl.where(is_nan, 0x7E00, half & 0xFFFF)
    return words


@triton.jit
def _from_raw(word, RAW: tl.constexpr):
    if RAW == tl.float32:
        values = word.to(tl.float32, bitcast=True)
    elif RAW == tl.bfloat16:
        values = _scale_value(word)  # bf16 is the upper half of fp32
    else:
        values = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return values


@triton.jit
def _decode_codes(scales, codes, index, inside, BITS: tl.constexpr, BLOCK: tl.constexpr):
    bit = index * BITS
    shift = (bit % 8).to(tl.int32)
    word = tl.load(codes + bit // 8, mask=inside, other=0).to(tl.int32)
    if 8 % BITS != 0:  # the codes of the other widths straddle no bytes
        word = word | (tl.load(codes + bit // 8 + 1, mask=inside & (shift > 8 - BITS), other=0).to(tl.int32) << 8)
    code = (word >> shift) & ((1 << BITS) - 1)
    SIGN: tl.constexpr = 1 << (BITS - 1)
    level = ((code ^ SIGN) - SIGN).to(tl.float32)
    if _has_roots(BITS):
        level = level * tl.abs(level)
    return level * _scale_value(_load_word(scales + index // BLOCK * 2, inside, 2))


@triton.jit
def _decode(wire, scales, codes, index, inside, BITS: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr):
    """fp32 values of a part, from a slice that begins at ``wire``."""
    if BITS == 0:
        NBYTES: tl.constexpr = RAW.primitive_bitwidth // 8
        values = _from_raw(_load_word(wire + codes + index * NBYTES, inside, NBYTES), RAW)
    else:
        values = _decode_codes(wire + scales, wire + codes, index, inside, BITS, BLOCK)
    return values


@triton.jit
def _encode_codes(scales, codes, values, index, inside, BITS: tl.constexpr, BLOCK: tl.constexpr):
    stored = _scale_bits(values, BITS)
    has_elements = tl.max(inside.to(tl.int32), axis=1) > 0
    _store_word(scales + tl.min(index, axis=1) // BLOCK * 2, stored, has_elements, 2)
    scale = tl.expand_dims(_scale_value(stored), 1)
    rounded = _codes(values, scale, BITS)
    if BITS == 8:
        tl.store(codes + index, (rounded.to(tl.int32) & 0xFF).to(tl.uint8), mask=inside)
    else:
        _store_packed(codes, rounded.to(tl.int32), index, inside, BITS)


@triton.jit
def _store_packed(data, codes, index, inside, BITS: tl.constexpr):
    """Write codes, int32 [rows, padded block], of which each run of 8 begins at a whole byte and fills BITS bytes."""
    RUNS: tl.constexpr = codes.numel // 8
    shifts = tl.expand_dims(tl.arange(0, 8) * BITS, 0)
    masked = tl.where(inside, codes & ((1 << BITS) - 1), 0)
    masked = tl.reshape(masked, [RUNS, 8])
    if BITS > 4:  # eight codes fill more than 32 bits
        masked = masked.to(tl.int64)
    words = tl.sum(masked << shifts, axis=1)  # they do not overlap, so the sum is their OR
    first = tl.min(tl.reshape(index, [RUNS, 8]), axis=1) // 8 * BITS
    count = tl.sum(tl.reshape(inside.to(tl.int32), [RUNS, 8]), axis=1)
    for byte in tl.static_range(BITS):
        tl.store(data + first + byte, ((words >> (8 * byte)) & 0xFF).to(tl.uint8), mask=count * BITS > 8 * byte)


@triton.jit
def _encode(wire, scales, codes, values, index, inside, BITS: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr):
    """Write fp32 [rows, padded block] to a slice that begins at ``wire``."""
    if BITS == 0:
        NBYTES: tl.constexpr = RAW.primitive_bitwidth // 8
        _store_word(wire + codes + index * NBYTES, _to_raw(values, RAW), inside, NBYTES)
    else:
        _encode_codes(wire + scales, wire + codes, values, index, inside, BITS, BLOCK)


@triton.jit
def _sum(
    initial, wire, scales, codes, source_bytes, index, inside, num_sources,
    HAS_INITIAL: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """fp32 sum of a part: what it starts from, then the sources in their order."""
    # It starts from the first value and not from zero, because 0.0 + -0.0 is 0.0.
    if HAS_INITIAL:
        total = tl.load(initial + index, mask=inside, other=0.0)
        total = total + _decode(wire, scales, codes, index, inside, BITS, BLOCK, RAW)
    else:
        total = _decode(wire, scales, codes, index, inside, BITS, BLOCK, RAW)
    # The address moves from source to source. A product of their number and their bytes would be one of 32 bits.
    for _ in range(1, num_sources):
        wire += source_bytes
        total = total + _decode(wire, scales, codes, index, inside, BITS, BLOCK, RAW)
    return total


@triton.jit
def _tile_of_blocks(numel, BLOCK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Indices [ROWS, PADDED] of this program's blocks, and which of them the part has. PADDED is a power of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.expand_dims(tl.arange(0, PADDED), 0)
    index = tl.expand_dims(row * BLOCK, 1) + column
    return index, (column < BLOCK) & (index < numel)


# ---- The kernels. Axis 1 of the grid counts slices. Parameters named O_ are those of the wire that is written. ``input`` of
# ``encode`` and ``out`` of ``decode`` hold the bits of floats as integers of their size.


@triton.jit(do_not_specialize=["element", "numel", "slice_numel", "columns", "rows",
                               "o_bytes", "o_scales", "o_codes", "b_bytes", "b_scales", "b_codes"])  # fmt: skip
def encode(
    input, out, base, element, numel, slice_numel, rows, columns,
    o_bytes, o_scales, o_codes, b_bytes, b_scales, b_codes,
    DTYPE: tl.constexpr, HAS_BASE: tl.constexpr,
    B_BITS: tl.constexpr, B_BLOCK: tl.constexpr, B_RAW: tl.constexpr,
    O_BITS: tl.constexpr, O_BLOCK: tl.constexpr, O_RAW: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``reference.quantize``, and ``reference.quantize_difference`` where there is a base."""
    slice_ = tl.program_id(1).to(tl.int64)
    index, inside = _tile_of_blocks(numel, O_BLOCK, PADDED, ROWS)
    values = _from_raw(
        tl.load(input + slice_ * slice_numel + element + index, mask=inside, other=0).to(tl.int32), DTYPE
    )
    if HAS_BASE and O_BITS != 0:
        values = values - _decode(base + slice_ * b_bytes, b_scales, b_codes, index, inside, B_BITS, B_BLOCK, B_RAW)
    to = slice_ % columns * rows + slice_ // columns
    _encode(out + to * o_bytes, o_scales, o_codes, values, index, inside, O_BITS, O_BLOCK, O_RAW)


@triton.jit(do_not_specialize=["element", "numel", "slice_numel", "columns", "rows", "num_sources", "source_bytes",
                               "i_bytes", "i_scales", "i_codes"])  # fmt: skip
def decode(
    wire, initial, out, scale, element, numel, slice_numel, rows, columns, num_sources, source_bytes,
    i_bytes, i_scales, i_codes,
    HAS_INITIAL: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``reference.dequantize`` (one source), and ``reference.dequantize_sum`` (one row of slices)."""
    slice_ = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < numel
    total = _sum(
        initial + slice_ * slice_numel + element, wire + slice_ * i_bytes, i_scales, i_codes, source_bytes,
        index, inside, num_sources, HAS_INITIAL, BITS, BLOCK, RAW,
    )  # fmt: skip
    words = _to_raw(total * scale, DTYPE)
    to = (slice_ % columns * rows + slice_ // columns) * slice_numel + element
    tl.store(out + to + index, words.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["element", "numel", "slice_numel", "num_sources", "source_bytes", "i_bytes", "i_scales", "i_codes",
                               "o_bytes", "o_scales", "o_codes"])  # fmt: skip
def encode_sum(
    wire, initial, out, element, numel, slice_numel, num_sources, source_bytes,
    i_bytes, i_scales, i_codes, o_bytes, o_scales, o_codes,
    HAS_INITIAL: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr,
    O_BITS: tl.constexpr, O_BLOCK: tl.constexpr, O_RAW: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``reference.dequantize_sum_quantize``."""
    slice_ = tl.program_id(1).to(tl.int64)
    index, inside = _tile_of_blocks(numel, O_BLOCK, PADDED, ROWS)
    total = _sum(
        initial + slice_ * slice_numel + element, wire + slice_ * i_bytes, i_scales, i_codes, source_bytes,
        index, inside, num_sources, HAS_INITIAL, BITS, BLOCK, RAW,
    )  # fmt: skip
    total = tl.where(inside, total, 0.0)
    _encode(out + slice_ * o_bytes, o_scales, o_codes, total, index, inside, O_BITS, O_BLOCK, O_RAW)


@triton.jit(do_not_specialize=["numel", "i_bytes", "i_scales", "i_codes", "b_bytes", "b_scales", "b_codes"])
def update(
    wire, base, out, numel, i_bytes, i_scales, i_codes, b_bytes, b_scales, b_codes,
    BITS: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr,
    B_BITS: tl.constexpr, B_BLOCK: tl.constexpr, B_RAW: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``reference.dequantize_update``."""
    slice_ = tl.program_id(1).to(tl.int64)
    index, inside = _tile_of_blocks(numel, B_BLOCK, PADDED, ROWS)
    values = _decode(wire + slice_ * i_bytes, i_scales, i_codes, index, inside, BITS, BLOCK, RAW)
    if BITS != 0:
        values = _decode(base + slice_ * b_bytes, b_scales, b_codes, index, inside, B_BITS, B_BLOCK, B_RAW) + values
    tl.debug_barrier()  # ``out`` may be ``base``, which other threads have read by now
    _encode(
        out + slice_ * b_bytes, b_scales, b_codes, tl.where(inside, values, 0.0), index, inside, B_BITS, B_BLOCK, B_RAW
    )
