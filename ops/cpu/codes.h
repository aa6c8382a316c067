// Codes of fewer than 8 bits, packed and unpacked. They form a little-endian stream of bits: the first code of a run
// lies in the lowest bits of its first byte.
//
// INT4 has loops of its own, because two codes are exactly a byte. All other widths from 2 to 7 share `pack` and `unpack`.
#pragma once

#include "../format.h"

#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {
namespace zeropp {

// ---- INT4: two codes in a byte, the low nibble first. An odd last code shares its byte with zero.

inline void pack_nibbles(const int8_t* __restrict codes, int64_t n, uint8_t* __restrict out) {
  for (int64_t i = 0; i < n / 2; ++i) {
    uint16_t pair;  // little-endian: the first code is the low byte
    memcpy(&pair, codes + 2 * i, sizeof pair);
    out[i] = static_cast<uint8_t>((pair & 0x0F) | (pair >> 4 & 0xF0));
  }
  if (n % 2) out[n / 2] = static_cast<uint8_t>(codes[n - 1] & 0x0F);
}

// The levels of the two codes in a byte, as they lie in memory. (For processors that cannot look up bytes in a register.)
template <class Levels>
struct LevelPairs {
  int8_t at[256][2];

  constexpr LevelPairs() : at{} {
    for (int byte = 0; byte < 256; ++byte) at[byte][0] = Levels::at[byte % 16], at[byte][1] = Levels::at[byte / 16];
  }
};

// n codes -> their levels, of which `Levels::at` has 16. Writes an even number of them: one more than n if n is odd.
template <class Levels>
void look_up_nibbles(const uint8_t* __restrict in, int64_t n, int8_t* __restrict levels) {
  int64_t i = 0;
#if defined(__AVX2__)
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Levels::at)), low = _mm_set1_epi8(0x0F);
  for (; i + 32 <= n; i += 32) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i / 2));
    const __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(bytes, low));
    const __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(levels + i), _mm_unpacklo_epi8(even, odd));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(levels + i + 16), _mm_unpackhi_epi8(even, odd));
  }
#elif defined(__aarch64__)
  const int8x16_t table = vld1q_s8(Levels::at);
  for (; i + 32 <= n; i += 32) {
    const uint8x16_t bytes = vld1q_u8(in + i / 2);
    const int8x16_t even = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(0x0F)));
    vst2q_s8(levels + i, int8x16x2_t{{even, vqtbl1q_s8(table, vshrq_n_u8(bytes, 4))}});
  }
#endif
  static constexpr LevelPairs<Levels> kPairs;
  for (; i < n; i += 2) memcpy(levels + i, kPairs.at[in[i / 2]], 2);
}

// The levels of INT4 codes of the wire: a code c stands for c |c| scales.
struct SquareLevels {
  static constexpr int8_t at[16] = {0, 1, 4, 9, 16, 25, 36, 49, -64, -49, -36, -25, -16, -9, -4, -1};
};

// ---- All other widths: eight codes at a time, in a word of 64 bits that holds them a byte each.

// A word with `value` in the lowest bits of every field of `width` bits.
constexpr uint64_t repeat(uint64_t value, int width) { return ~uint64_t{0} / ((uint64_t{1} << width) - 1) * value; }

constexpr uint64_t low_bits(int count) { return (uint64_t{1} << count) - 1; }

// Eight bytes -> the low `bits` of each, side by side. Neighbours move together, then pairs of them, then fours. A
// neighbour that moves leaves a copy of the other's upper bits behind where codes are wider than the gap between them: such
// codes take a mask more.
template <int bits>
uint64_t squeeze(uint64_t codes) {
  constexpr int gap = 8 - bits;
  codes &= repeat(low_bits(bits), 8);
  if constexpr (bits <= 4) {
    codes = (codes | codes >> gap) & repeat(low_bits(2 * bits), 16);
    codes = (codes | codes >> 2 * gap) & repeat(low_bits(4 * bits), 32);
    return (codes | codes >> 4 * gap) & low_bits(8 * bits);
  } else {
    codes = (codes & repeat(low_bits(bits), 16)) | (codes >> gap & repeat(low_bits(bits) << bits, 16));
    codes = (codes & repeat(low_bits(2 * bits), 32)) | (codes >> 2 * gap & repeat(low_bits(2 * bits) << 2 * bits, 32));
    return (codes & low_bits(4 * bits)) | (codes >> 4 * gap & low_bits(4 * bits) << 4 * bits);
  }
}

// The inverse of squeeze. Each code's sign bit is copied upwards in its byte. Bits above the eight codes are arbitrary.
template <int bits>
uint64_t spread(uint64_t packed) {
  constexpr int gap = 8 - bits;
  if constexpr (bits <= 4) {
    packed = (packed | packed << 4 * gap) & repeat(low_bits(4 * bits), 32);
    packed = (packed | packed << 2 * gap) & repeat(low_bits(2 * bits), 16);
    packed = (packed | packed << gap) & repeat(low_bits(bits), 8);
  } else {
    packed = (packed & low_bits(4 * bits)) | (packed << 4 * gap & low_bits(4 * bits) << 32);
    packed = (packed & repeat(low_bits(2 * bits), 32)) | (packed << 2 * gap & repeat(low_bits(2 * bits) << 16, 32));
    packed = (packed & repeat(low_bits(bits), 16)) | (packed << gap & repeat(low_bits(bits) << 8, 16));
  }
  const uint64_t signs = packed & repeat(uint64_t{1} << (bits - 1), 8);
  return packed | ((signs << (gap + 1)) - (signs << 1));
}

// The word that holds eight packed codes. Words of 2-bit codes (16 bits) lie side by side in memory. Eight codes of b
// bits take b bytes, but the smallest word that holds them has 4 or 8, so neighbouring words overlap. Compilers
// do not vectorize loops over overlapping words: a buffer holds these words apart, and a second loop copies them. The
// last word of a run is copied by the byte, since a whole word could reach beyond the end of the memory.
template <int bits>
using Packed = std::conditional_t<bits == 2, uint16_t, std::conditional_t<bits <= 4, uint32_t, uint64_t>>;

template <int bits>
constexpr bool kOverlap = sizeof(Packed<bits>) > bits;

// Bytes of a word that are copied at once. Behind a word lies at least one byte of the last one, so whole words of 3 bits
// (and of 7) may be copied. Those of 5 and 6 bits would reach further.
template <int bits>
constexpr int64_t kCopied = sizeof(Packed<bits>) - bits <= 1 ? sizeof(Packed<bits>) : bits;

constexpr int64_t kWords = 128;  // that the buffer holds

template <int bits>
void pack(const int8_t* __restrict codes, int64_t n, uint8_t* __restrict out) {
  const auto squeezed = [](const int8_t* run, int64_t count) {
    uint64_t word = 0;
    memcpy(&word, run, count);
    return static_cast<Packed<bits>>(squeeze<bits>(word));
  };
  constexpr int64_t size = sizeof(Packed<bits>);
  uint8_t apart[kWords * size];
  const int64_t last = (n - 1) / kCodesAtAByte, rest = n - kCodesAtAByte * last;
  for (int64_t first = 0; first < last; first += kWords) {
    const int64_t count = min(last - first, kWords);
    uint8_t* words = kOverlap<bits> ? apart : out + bits * first;
    for (int64_t i = 0; i < count; ++i) {
      const Packed<bits> packed = squeezed(codes + kCodesAtAByte * (first + i), kCodesAtAByte);
      memcpy(words + size * i, &packed, size);
    }
    for (int64_t i = 0; kOverlap<bits> && i < count; ++i) memcpy(out + bits * (first + i), words + size * i, kCopied<bits>);
  }
  const Packed<bits> packed = squeezed(codes + kCodesAtAByte * last, rest);
  memcpy(out + bits * last, &packed, ceil_div(rest * bits, 8));
}

template <int bits>
void unpack(const uint8_t* __restrict in, int64_t n, int8_t* __restrict codes) {
  const auto spread_to = [](int8_t* run, int64_t count, Packed<bits> packed) {
    const uint64_t word = spread<bits>(packed);
    memcpy(run, &word, count);
  };
  constexpr int64_t size = sizeof(Packed<bits>);
  uint8_t apart[kWords * size];
  const int64_t last = (n - 1) / kCodesAtAByte, rest = n - kCodesAtAByte * last;
  for (int64_t first = 0; first < last; first += kWords) {
    const int64_t count = min(last - first, kWords);
    for (int64_t i = 0; kOverlap<bits> && i < count; ++i) memcpy(apart + size * i, in + bits * (first + i), kCopied<bits>);
    const uint8_t* words = kOverlap<bits> ? apart : in + bits * first;
    for (int64_t i = 0; i < count; ++i) {
      Packed<bits> packed;
      memcpy(&packed, words + size * i, size);
      spread_to(codes + kCodesAtAByte * (first + i), kCodesAtAByte, packed);
    }
  }
  Packed<bits> packed = 0;
  memcpy(&packed, in + bits * last, ceil_div(rest * bits, 8));
  spread_to(codes + kCodesAtAByte * last, rest, packed);
}

// ---- Any width under 8.

constexpr int64_t packed_bytes(int64_t n, int64_t bits) { return (n * bits + 7) / 8; }

inline void pack_codes(const int8_t* codes, int64_t n, int64_t bits, uint8_t* out) {
  if (bits == 4) pack_nibbles(codes, n, out);
  if (bits == 2) pack<2>(codes, n, out);
  if (bits == 3) pack<3>(codes, n, out);
  if (bits == 5) pack<5>(codes, n, out);
  if (bits == 6) pack<6>(codes, n, out);
  if (bits == 7) pack<7>(codes, n, out);
}

// Codes -> their levels. May write one more than n.
inline void unpack_levels(const uint8_t* in, int64_t n, int64_t bits, int8_t* levels) {
  if (bits == 4) look_up_nibbles<SquareLevels>(in, n, levels);
  if (bits == 2) unpack<2>(in, n, levels);
  if (bits == 3) unpack<3>(in, n, levels);
  if (bits == 5) unpack<5>(in, n, levels);
  if (bits == 6) unpack<6>(in, n, levels);
  if (bits == 7) unpack<7>(in, n, levels);
  for (int64_t i = 0; bits == 3 && i < n; ++i) levels[i] = static_cast<int8_t>(level_of(levels[i], 3));
}

}  // namespace zeropp
}  // namespace
