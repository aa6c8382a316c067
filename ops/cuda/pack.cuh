// Moves a lane's V codes into a tile's stream of bits and back. Code i lies at bits [kBits i, kBits (i + 1)) of its
// run.
#pragma once

#include "rows.cuh"

namespace {
namespace zeropp {

// The low bytes of four words, side by side.
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// A word with the lowest bit of each of V fields set.
template <int kBits, int V>
ZEROPP_HD constexpr uint32_t lowest_bits() {
  uint32_t ones = 0;
  for (int i = 0; i < V; ++i) ones |= 1u << kBits * i;
  return ones;
}

constexpr uint32_t kRoundToIntegerBits = 0x4B400000;  // the bits of the float kRoundToInteger

// V codes of fewer than 8 bits -> a word. Each code comes in the low bits of a float that was rounded to an integer.
// The bits of the whole floats are shifted and added, one instruction each, and the constants in their upper bits are
// subtracted from the sum. Half of the codes' range is added, and inverted again at the end: codes are then positive,
// and no field borrows from the next.
template <int kBits, int V>
__device__ __forceinline__ uint32_t pack_fields(const uint32_t* rounded) {
  constexpr uint32_t kOnes = lowest_bits<kBits, V>(), kHalves = kOnes << (kBits - 1);
  uint32_t word = 0;
#pragma unroll
  for (int i = V - 1; i >= 0; --i) word = (word << kBits) + rounded[i];
  return (word - kOnes * kRoundToIntegerBits + kHalves) ^ kHalves;
}

// ---- A lane's V codes to and from the tile's codes in shared memory, at those of `element`. V codes take 8, 16 or 32
// bits, or, for codes of 3 bits, 24 bits (one lane writes three bytes) or 12 bits (two lanes share three bytes, and the
// first writes them).

template <int kBits, int V>
__device__ __forceinline__ void put_fields(uint32_t word, uint8_t* codes, int element) {
  uint8_t* to = codes + element * kBits / 8;
  if constexpr (kBits * V == 32) *reinterpret_cast<uint32_t*>(to) = word;
  if constexpr (kBits * V == 16) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
  if constexpr (kBits * V == 8) *to = static_cast<uint8_t>(word);
  if constexpr (kBits == 3) {
    if constexpr (V == 4) {
      word |= __shfl_xor_sync(kAllLanes, word, 1) << 12;
      if (element % 8) return;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) to[i] = static_cast<uint8_t>(word >> 8 * i);
  }
}

// The inverse. Bits behind the V fields are arbitrary.
template <int kBits, int V>
__device__ __forceinline__ uint32_t take_fields(const uint8_t* codes, int element) {
  const uint8_t* from = codes + element * kBits / 8;
  if constexpr (kBits * V == 32) return *reinterpret_cast<const uint32_t*>(from);
  else if constexpr (kBits * V == 16) return *reinterpret_cast<const uint16_t*>(from);
  else if constexpr (kBits * V == 8) return *from;
  else if constexpr (kBits * V == 24) return from[0] | from[1] << 8 | from[2] << 16;
  else return (from[0] | from[1] << 8) >> element % 8;  // 12 bits, from bit 0 or 4
}

// ---- Codes as floats. With an unsigned integer u in its low bits, the float 2^23 becomes 2^23 + u: a subtraction
// takes the place of a conversion. Codes are biased by half of their range to be unsigned.

constexpr uint32_t kIntegerBits = 0x4B000000;  // the bits of the float 2^23

template <int kBits>
ZEROPP_HD constexpr float code_offset() { return 8388608.0f + (1 << (kBits - 1)); }

// [Note: fused sums] A code has at most 8 bits and a scale has 8, so their product is exact, and a fused multiply-add gives
// the bits of a product and a sum in one instruction. The exception is a product that overflows: the sum must then be
// infinite, and a fused one need not be. So tiles with scales from 2^120 on are added without fusing.
__device__ __forceinline__ bool may_overflow(BFloat16 scale) { return (scale.bits & 0x7FFF) >= 0x7B80; }

template <bool kFused>
__device__ __forceinline__ float plus_product(float value, float code, float scale) {
  return kFused ? __fmaf_rn(code, scale, value) : value + code * scale;
}

// values += V codes * scale.
template <int kBits, int V, bool kFused>
__device__ __forceinline__ void add_codes(const uint8_t* codes, int element, float scale, float* values) {
  if constexpr (kBits >= 4) {
    uint32_t bytes[2];  // two words of four biased codes; for INT4, the even and the odd codes
    if constexpr (kBits == 8) {
      const auto& words = *reinterpret_cast<const Words<V / 4>*>(codes + element);
#pragma unroll
      for (int i = 0; i < V / 4; ++i) bytes[i] = words.at[i] ^ 0x80808080;
    } else {
      const uint32_t nibbles = take_fields<4, V>(codes, element) ^ 0x88888888;
      bytes[0] = nibbles & 0x0F0F0F0F;
      bytes[1] = nibbles >> 4 & 0x0F0F0F0F;
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int word = kBits == 8 ? i / 4 : i % 2, byte = kBits == 8 ? i % 4 : i / 2;
      const uint32_t biased = __byte_perm(bytes[word], kIntegerBits, 0x7540 + byte);
      values[i] = plus_product<kFused>(values[i], float_of(biased) - code_offset<kBits>(), scale);
    }
  } else {
    const uint32_t fields = take_fields<kBits, V>(codes, element) ^ lowest_bits<kBits, V>() << (kBits - 1);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const uint32_t biased = (fields >> kBits * i & ((1 << kBits) - 1)) | kIntegerBits;
      values[i] = plus_product<kFused>(values[i], float_of(biased) - code_offset<kBits>(), scale);
    }
  }
}

}  // namespace zeropp
}  // namespace
