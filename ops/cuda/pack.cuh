// A lane's V codes in a tile's stream of bits, code i at bits [kBits i, kBits (i + 1)): how they get there, and back.
#pragma once

#include "rows.cuh"

namespace {
namespace zeropp {

__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// The lowest bit of each of V fields.
template <int kBits, int V>
ZEROPP_HD constexpr uint32_t lowest_bits() {
  uint32_t ones = 0;
  for (int i = 0; i < V; ++i) ones |= 1u << kBits * i;
  return ones;
}

constexpr uint32_t kRoundToIntegerBits = 0x4B400000;  // of the float

// V codes of less than 8 bits, each in the low bits of a float that was rounded to an integer. Floats are shifted and added
// whole, one instruction each; then the rounding constants are taken away. Added to half of their range, codes are positive:
// no field borrows from the next.
template <int kBits, int V>
__device__ __forceinline__ uint32_t pack_fields(const uint32_t* rounded) {
  constexpr uint32_t kOnes = lowest_bits<kBits, V>(), kHalves = kOnes << (kBits - 1);
  uint32_t word = 0;
#pragma unroll
  for (int i = V - 1; i >= 0; --i) word = (word << kBits) + rounded[i];
  return (word - kOnes * kRoundToIntegerBits + kHalves) ^ kHalves;
}

// ---- To and from the tile's codes: V kBits bits at those of `element`. They may be of 8, 16 or 32 bits; or three bytes, of
// one lane or of two.

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

// What is behind the V fields stays in the word.
template <int kBits, int V>
__device__ __forceinline__ uint32_t take_fields(const uint8_t* codes, int element) {
  const uint8_t* from = codes + element * kBits / 8;
  if constexpr (kBits * V == 32) return *reinterpret_cast<const uint32_t*>(from);
  else if constexpr (kBits * V == 16) return *reinterpret_cast<const uint16_t*>(from);
  else if constexpr (kBits * V == 8) return *from;
  else if constexpr (kBits * V == 24) return from[0] | from[1] << 8 | from[2] << 16;
  else return (from[0] | from[1] << 8) >> element % 8;  // 12 bits, from bit 0 or 4
}

// ---- Codes as floats. An unsigned u in the low bits of 2^23 is the float 2^23 + u: no conversion is needed.

constexpr uint32_t kIntegerBits = 0x4B000000;  // of 2^23

template <int kBits>
ZEROPP_HD constexpr float code_offset() { return 8388608.0f + (1 << (kBits - 1)); }  // codes are biased to be unsigned

// values += V codes * scale.
template <int kBits, int V>
__device__ __forceinline__ void add_codes(const uint8_t* codes, int element, float scale, float* values) {
  if constexpr (kBits >= 4) {
    uint32_t bytes[2];  // two words of four codes, biased; of INT4 the even and the odd codes
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
      values[i] += (float_of(biased) - code_offset<kBits>()) * scale;
    }
  } else {
    const uint32_t fields = take_fields<kBits, V>(codes, element) ^ lowest_bits<kBits, V>() << (kBits - 1);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const uint32_t biased = (fields >> kBits * i & ((1 << kBits) - 1)) | kIntegerBits;
      values[i] += (float_of(biased) - code_offset<kBits>()) * scale;
    }
  }
}

}  // namespace zeropp
}  // namespace
