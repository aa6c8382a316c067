// Moves a lane's V codes into a tile's stream of bits and back. Code i lies at bits [kBits i, kBits (i + 1)) of its
// run.
#pragma once

#include <type_traits>

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

// V codes of fewer than 8 bits, side by side.
template <int kBits, int V>
using Fields = std::conditional_t<(kBits * V > 32), uint64_t, uint32_t>;

// V codes of fewer than 8 bits -> a word. Each code comes in the low bits of a float that was rounded to an integer.
// The bits of the whole floats are shifted and added, one instruction each, and the constants in their upper bits are
// subtracted from the sum. Half of the codes' range is added, and inverted again at the end: codes are then positive,
// and no field borrows from the next.
template <int kBits, int V>
__device__ __forceinline__ Fields<kBits, V> pack_fields(const uint32_t* rounded) {
  if constexpr (kBits * V > 32) {  // two halves, as words of 32 bits are faster
    const uint64_t upper = pack_fields<kBits, V / 2>(rounded + V / 2);
    return upper << kBits * V / 2 | pack_fields<kBits, V / 2>(rounded);
  } else {
    constexpr uint32_t kOnes = lowest_bits<kBits, V>(), kHalves = kOnes << (kBits - 1);
    uint32_t word = 0;
#pragma unroll
    for (int i = V - 1; i >= 0; --i) word = (word << kBits) + rounded[i];
    return (word - kOnes * kRoundToIntegerBits + kHalves) ^ kHalves;
  }
}

// ---- A lane's V codes to and from the tile's codes in shared memory, at those of `element`. They fill a word of 8, 16
// or 32 bits, or whole bytes, or begin or end in the middle of a byte, where two lanes share it.

template <int kBits, int V>
constexpr bool kFillWord = kBits * V == 8 || kBits * V == 16 || kBits * V == 32;

template <int kBytes>
using Word = std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;

template <int kBits, int V>
__device__ __forceinline__ void put_fields(Fields<kBits, V> word, uint8_t* codes, int element) {
  uint8_t* to = codes + element * kBits / 8;
  if constexpr (kFillWord<kBits, V>) {
    using Whole = Word<kBits * V / 8>;
    *reinterpret_cast<Whole*>(to) = static_cast<Whole>(word);
  } else {
    constexpr int kFields = kBits * V % 8 ? 2 * V : V;  // of two lanes that share a byte, the first writes the codes of both
    Fields<kBits, kFields> written = word;
    if constexpr (kFields > V) {
      written |= static_cast<Fields<kBits, kFields>>(__shfl_xor_sync(kAllLanes, word, 1)) << kBits * V;
      if (element % kFields) return;
    }
#pragma unroll
    for (int i = 0; i < kBits * kFields / 8; ++i) to[i] = static_cast<uint8_t>(written >> 8 * i);
  }
}

// The inverse. Bits behind the V fields, which fit into 32 bits with those of the first byte before them, are arbitrary.
template <int kBits, int V>
__device__ __forceinline__ uint32_t take_fields(const uint8_t* codes, int element) {
  const uint8_t* from = codes + element * kBits / 8;
  if constexpr (kFillWord<kBits, V>) {
    return *reinterpret_cast<const Word<kBits * V / 8>*>(from);
  } else {
    constexpr int kSkipped = kBits * V % 8;  // at most, as V codes begin at a multiple of so many bits
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; 8 * i < kBits * V + kSkipped; ++i) word |= static_cast<uint32_t>(from[i]) << 8 * i;
    return kSkipped ? word >> element * kBits % 8 : word;
  }
}

// ---- Codes as floats. With an unsigned integer u in its low bits, the float 2^23 becomes 2^23 + u: a subtraction
// takes the place of a conversion. Codes are biased by half of their range to be unsigned.

constexpr uint32_t kIntegerBits = 0x4B000000;  // the bits of the float 2^23

template <int kBits>
ZEROPP_HD constexpr float code_offset() { return 8388608.0f + (1 << (kBits - 1)); }

// [Note: fused sums] A level has at most 8 bits and a scale has 8, so their product is exact, and a fused multiply-add gives
// the bits of a product and a sum in one instruction. The exception is a product that overflows: the sum must then be
// infinite, and a fused one need not be. So tiles with scales from 2^120 on are added without fusing.
__device__ __forceinline__ bool may_overflow(BFloat16 scale) { return (scale.bits & 0x7FFF) >= 0x7B80; }

template <bool kFused>
__device__ __forceinline__ float plus_product(float value, float level, float scale) {
  return kFused ? __fmaf_rn(level, scale, value) : value + level * scale;
}

template <int kBits>
__device__ __forceinline__ float level_of_code(float code) { return has_roots(kBits) ? code * fabsf(code) : code; }

// values += V levels * scale.
template <int kBits, int V, bool kFused>
__device__ __forceinline__ void add_codes(const uint8_t* codes, int element, float scale, float* values) {
  if constexpr (kBits == 8 || kBits == 4) {
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
      values[i] = plus_product<kFused>(values[i], level_of_code<kBits>(float_of(biased) - code_offset<kBits>()), scale);
    }
  } else {
    constexpr int kFields = kBits * V > 32 ? V / 2 : V;  // that a word of 32 bits holds
#pragma unroll
    for (int first = 0; first < V; first += kFields) {
      constexpr uint32_t kHalves = lowest_bits<kBits, kFields>() << (kBits - 1);
      const uint32_t fields = take_fields<kBits, kFields>(codes, element + first) ^ kHalves;
#pragma unroll
      for (int i = 0; i < kFields; ++i) {
        const uint32_t biased = (fields >> kBits * i & ((1 << kBits) - 1)) | kIntegerBits;
        float& value = values[first + i];
        value = plus_product<kFused>(value, level_of_code<kBits>(float_of(biased) - code_offset<kBits>()), scale);
      }
    }
  }
}

}  // namespace zeropp
}  // namespace
