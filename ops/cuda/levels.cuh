// Looks up the levels of INT4 codes of frozen weights in registers.
//
// A byte permutation picks four bytes out of eight, by four selectors of three bits. So it looks up four codes at once in
// half of the table: two of them look in both halves, and a third takes, for each code, the byte of the half that its upper
// bit names.
#pragma once

#include "../frozen_format.h"

namespace {
namespace zeropp {

// A byte of each of 16 values, as four words: byte(level) of the levels of codes 4 i .. 4 i + 3 in word i.
template <class Byte>
ZEROPP_HD constexpr uint32_t table_word(int i, const Byte& byte) {
  constexpr int kLevels[kNumLevels] = {ZEROPP_LEVELS};
  uint32_t word = 0;
  for (int k = 0; k < 4; ++k) word |= static_cast<uint32_t>(byte(kLevels[4 * i + k]) & 0xFF) << 8 * k;
  return word;
}

// Selectors of four codes, which lie in the low 16 bits of `codes`.
struct Selectors {
  uint32_t in_half, of_half;

  __device__ explicit Selectors(uint32_t codes)
      : in_half(codes & 0x7777), of_half((codes >> 1 & 0x4444) | 0x3210) {}

  __device__ uint32_t look_up(uint32_t a, uint32_t b, uint32_t c, uint32_t d) const {
    return __byte_perm(__byte_perm(a, b, in_half), __byte_perm(c, d, in_half), of_half);
  }
};

// Four codes -> their levels, plus 128 to be unsigned, a byte each.
__device__ __forceinline__ uint32_t biased_levels(uint32_t codes) {
  struct Biased {
    ZEROPP_HD constexpr int operator()(int level) const { return level + 128; }
  };
  constexpr uint32_t a = table_word(0, Biased{}), b = table_word(1, Biased{});
  constexpr uint32_t c = table_word(2, Biased{}), d = table_word(3, Biased{});
  return Selectors(codes).look_up(a, b, c, d);
}

// The bits of an integer of up to 8 bits as a bf16, which holds it exactly.
ZEROPP_HD constexpr int bfloat16_bits(int integer) {
  const int sign = integer < 0 ? 0x8000 : 0, magnitude = integer < 0 ? -integer : integer;
  int exponent = 7;
  while (exponent > 0 && !(magnitude >> exponent)) --exponent;
  return magnitude ? sign | (127 + exponent) << 7 | (magnitude << (7 - exponent) & 0x7F) : 0;
}

// Four codes -> their levels as bf16, in two pairs.
__device__ __forceinline__ void level_pairs(uint32_t codes, uint32_t& first, uint32_t& second) {
  // A level as bf16 has two bytes, which are looked up in a table each: the lower byte, and the upper one.
  struct Low {
    ZEROPP_HD constexpr int operator()(int level) const { return bfloat16_bits(level); }
  };
  struct High {
    ZEROPP_HD constexpr int operator()(int level) const { return bfloat16_bits(level) >> 8; }
  };
  constexpr uint32_t a = table_word(0, Low{}), b = table_word(1, Low{}), c = table_word(2, Low{}), d = table_word(3, Low{});
  constexpr uint32_t e = table_word(0, High{}), f = table_word(1, High{}), g = table_word(2, High{}), h = table_word(3, High{});
  const Selectors selectors(codes);
  const uint32_t low = selectors.look_up(a, b, c, d), high = selectors.look_up(e, f, g, h);
  first = __byte_perm(low, high, 0x5140);
  second = __byte_perm(low, high, 0x7362);
}

}  // namespace zeropp
}  // namespace
