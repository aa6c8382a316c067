// Loops over the rows of a frozen weight, which three kernels share.
#pragma once

#include "../frozen_format.h"
#include "codes.h"
#include "loops.h"
#include "memory.h"
#include "parallel.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {
namespace zeropp {

// Scales are bytes in the ABI. They may begin at an odd address, as views into larger buffers do.
inline BFloat16 load_scale(const uint8_t* scales, int64_t index) {
  return read_unaligned<BFloat16>(scales + index * sizeof(BFloat16));
}

#if defined(__AVX512F__)
// The 16 levels, by code.
inline __m512 level_floats() {
  alignas(64) static constexpr float kLevels[kNumLevels] = {ZEROPP_LEVELS};
  return _mm512_load_ps(kLevels);
}
#endif

// The levels of the two codes in a byte, as they lie in memory. (For processors that cannot look up bytes in a register.)
struct LevelPairs {
  int8_t at[256][2];

  constexpr LevelPairs() : at{} {
    constexpr int8_t kLevels[kNumLevels] = {ZEROPP_LEVELS};
    for (int byte = 0; byte < 256; ++byte) at[byte][0] = kLevels[byte % 16], at[byte][1] = kLevels[byte / 16];
  }
};

// n INT4 codes of a block -> their levels. Writes an even number of them: one more than n if n is odd.
inline void look_up_levels(const uint8_t* __restrict in, int64_t n, int8_t* __restrict levels) {
  int64_t i = 0;
#if defined(__AVX2__)
  alignas(16) static constexpr int8_t kLevels[kNumLevels] = {ZEROPP_LEVELS};
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kLevels)), low = _mm_set1_epi8(0x0F);
  for (; i + 32 <= n; i += 32) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i / 2));
    const __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(bytes, low));
    const __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(levels + i), _mm_unpacklo_epi8(even, odd));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(levels + i + 16), _mm_unpackhi_epi8(even, odd));
  }
#elif defined(__aarch64__)
  static constexpr int8_t kLevels[kNumLevels] = {ZEROPP_LEVELS};
  const int8x16_t table = vld1q_s8(kLevels);
  for (; i + 32 <= n; i += 32) {
    const uint8x16_t bytes = vld1q_u8(in + i / 2);
    const int8x16_t even = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(0x0F)));
    vst2q_s8(levels + i, int8x16x2_t{{even, vqtbl1q_s8(table, vshrq_n_u8(bytes, 4))}});
  }
#endif
  static constexpr LevelPairs kPairs;
  for (; i < n; i += 2) memcpy(levels + i, kPairs.at[in[i / 2]], 2);
}

// The levels of a row's block b as int8: the codes themselves (INT8), or `buffer`. Fetches a block ahead.
inline const int8_t* load_levels(const uint8_t* row, const FrozenRows& shape, int64_t b, int8_t* buffer) {
  const uint8_t* from = row + b * shape.block * shape.bits / 8;
  prefetch(from + shape.block * shape.bits / 2, shape.block * shape.bits / 8);
  if (shape.bits == 8) return reinterpret_cast<const int8_t*>(from);
  look_up_levels(from, shape.block_size(b), buffer);
  return buffer;
}

// Runs body(row) for every row, in threads. The grain gives a thread at least some thousand elements.
template <class Body>
int for_each_row(const FrozenRows& shape, const Body& body) {
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  };
  return parallel_for(shape.rows, 32768 / (shape.columns + 1) + 1, run) ? kOk : kParallelFailed;
}

}  // namespace zeropp
}  // namespace
