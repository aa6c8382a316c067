// The inner loops, over runs of elements that lie in the first-level cache.
//
// [Note: three instruction sets] Most loops are plain loops over the scalar functions of format.h, written so that
// compilers vectorize them: no branches that depend on elements, `__restrict` pointers, one type of element per loop.
// CMake compiles the same sources three times (baseline, AVX2, AVX-512), and the vectors come from the compiler's
// flags. Intrinsics stand only where compilers do not find the instructions by themselves, each behind the macro of its
// instruction set, with the plain loop as the other branch. All three give the same bits, because vectorizing changes
// no operation on an element.
//
// [Note: tails] Vector loops with intrinsics stop before the last incomplete vector, and the scalar function finishes
// the rest. Both compute the same bits, so it does not matter where a run ends. Nothing is read or written behind the
// end of a run.
#pragma once

#include "../format.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
namespace zeropp {

// ---- Conversions.

template <class To, class From>
void convert(const From* __restrict from, int64_t n, To* __restrict to) {
  for (int64_t i = 0; i < n; ++i) assign(to[i], to_float(from[i]));
}

#if defined(__F16C__)  // compilers do not find these instructions in a loop
inline void convert(const Float16* __restrict from, int64_t n, float* __restrict to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

inline void convert(const float* __restrict from, int64_t n, Float16* __restrict to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    // The instruction keeps parts of a NaN's bits: NaNs are made canonical before.
    const __m256 values = _mm256_loadu_ps(from + i);
    const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    const __m256 canonical = _mm256_blendv_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), is_nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(canonical, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  for (; i < n; ++i) assign(to[i], from[i]);
}
#endif

// ---- One block. In is float or BFloat16.

template <class In>
uint32_t block_amax(const In* in, int64_t n) {
  decltype(magnitude(*in)) amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = magnitude(in[i]) > amax ? magnitude(in[i]) : amax;
  return amax_bits(amax);
}

template <class In>
void encode_block(const In* __restrict in, int64_t n, BFloat16 scale, int64_t bits, int8_t* __restrict codes) {
  if (!has_codes(scale)) {
    memset(codes, 0, n);
    return;
  }
  const float divisor = divisor_for(*in, step_of(scale, bits));
  for (int64_t i = 0; i < n; ++i) codes[i] = encode(in[i], divisor);
  if (!has_roots(bits)) return;
  for (int64_t i = 0; i < n; ++i) codes[i] = root_of(codes[i]);  // bytes: more of them fill a vector
}

// A decoded element replaces the one in memory, or is added to it. Rounding to bf16 needs no test
// for NaNs here: the only NaN that is ever decoded is the canonical one.
struct Set {
  static void apply(float& to, float value) { to = value; }
  static void apply(BFloat16& to, float value) { to.bits = round_to_bfloat16(value); }
};
struct Add {
  static void apply(float& to, float value) { to += value; }
};

template <class Update, class Out>
void decode_block(const int8_t* __restrict levels, int64_t n, BFloat16 stored_scale, Out* __restrict out) {
  const float scale = to_float(stored_scale);
  for (int64_t i = 0; i < n; ++i) Update::apply(out[i], decode(levels[i], scale));
}

// Raw elements replace, or are added to, those in `out`. They may be any NaN, so bf16 is rounded by `convert`, which
// tests.
template <class Update, class From>
void update(const From* __restrict values, int64_t n, float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) Update::apply(out[i], to_float(values[i]));
}

template <class Update, class From>
void update(const From* __restrict values, int64_t n, BFloat16* __restrict out) {
  convert(values, n, out);
}

#if defined(__AVX512BW__)
// [Note: nibbles in registers] With AVX-512, blocks of INT4 codes and bf16 values go straight from one to the other, 32
// elements at a time, without a buffer of unpacked codes in between. Each lane of 32 bits holds the two elements whose
// codes share a byte: as bf16 the first one in the low half, as codes the first one in the low nibble.

// `root_of` for 32 words. The root changes at odd sizes only, so that halves of them, rounded up, are enough to look it up.
inline __m512i roots_of(__m512i steps) {
  alignas(64) static constexpr int16_t kRoots[64] = {
      0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5,
      5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7};
  const __m512i halves = _mm512_avg_epu16(_mm512_abs_epi16(steps), _mm512_setzero_si512());
  const __m512i roots = _mm512_permutex2var_epi16(_mm512_load_si512(kRoots), halves, _mm512_load_si512(kRoots + 32));
  return _mm512_mask_sub_epi16(roots, _mm512_movepi16_mask(steps), _mm512_setzero_si512(), roots);
}

// 32 bf16 values -> 16 bytes of codes. bf16 is the upper half of fp32, so shifting or masking makes fp32 of either
// half. The multiplication is fused with an addition here and still gives the bits of `encode`: [Note: quotients of
// bf16] in format.h allows for the rounding of the product, and without it the product is only nearer to the quotient.
inline __m128i encode_pairs(__m512i pairs, __m512 reciprocal) {
  const auto steps = [&](__m512i bits) {
    const __m512 snapped = _mm512_fmadd_ps(_mm512_castsi512_ps(bits), reciprocal, _mm512_set1_ps(kSnap));
    return _mm512_castps_si512(_mm512_add_ps(snapped, _mm512_set1_ps(kRoundToInteger - kSnap)));
  };
  const auto choose = [](uint32_t mask, __m512i set, __m512i clear) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)), set, clear, 0xCA);
  };
  const __m512i low = steps(_mm512_slli_epi32(pairs, 16));
  const __m512i high = steps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF0000)));
  const __m512i roots = roots_of(choose(0xFFFF, low, _mm512_slli_epi32(high, 16)));
  return _mm512_cvtepi32_epi8(choose(0x0F, roots, _mm512_srli_epi32(roots, 12)));
}

// The 16 values of an INT4 block, as bf16. Rounding each once and looking them up costs less than rounding every
// element. The table is there twice, since a lookup takes five bits of an index. It is made in
// registers, because a load would wait for the stores that made it in memory.
inline __m512i lookup_table(BFloat16 stored_scale) {
  const __m512 levels = _mm512_setr_ps(0, 1, 4, 9, 16, 25, 36, 49, -64, -49, -36, -25, -16, -9, -4, -1);
  const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(levels, _mm512_set1_ps(to_float(stored_scale))));
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

inline __m512i look_up_pairs(const uint8_t* codes, __m512i table) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return _mm512_permutexvar_epi16(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), table);
}

// Encodes a block whose codes start at a byte.
inline void encode_nibbles(const BFloat16* __restrict in, int64_t n, BFloat16 stored_scale, uint8_t* __restrict out) {
  const float reciprocal = 1.0f / step_of(stored_scale, 4);
  if (!has_codes(stored_scale)) {
    memset(out, 0, (n + 1) / 2);
    return;
  }
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m128i codes = encode_pairs(_mm512_loadu_si512(in + i), _mm512_set1_ps(reciprocal));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i / 2), codes);
  }
  for (; i < n; i += 2) {
    const int8_t second = i + 1 < n ? root_of(encode(in[i + 1], reciprocal)) : 0;
    out[i / 2] = static_cast<uint8_t>((root_of(encode(in[i], reciprocal)) & 0x0F) | second << 4);
  }
}

// Decodes a block whose codes start at a byte.
inline void decode_nibbles(const uint8_t* __restrict in, int64_t n, BFloat16 stored_scale, BFloat16* __restrict out) {
  const __m512i table = lookup_table(stored_scale);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) _mm512_storeu_si512(out + i, look_up_pairs(in + i / 2, table));
  for (; i < n; ++i) {
    const int nibble = in[i / 2] >> i % 2 * 4 & 0x0F;
    Set::apply(out[i], decode(static_cast<int8_t>(level_of((nibble ^ 8) - 8, 4)), to_float(stored_scale)));
  }
}
#endif

}  // namespace zeropp
}  // namespace
