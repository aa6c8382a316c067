// Loops that read the payload of a block and apply it.
//
// A payload is copied to the stack first: behind its end lie bytes that whole vectors may read.
#pragma once

#include "changes.h"

namespace {
namespace zeropp {

// The ones among the first n bits that two planes have in common. Reads whole words of 64 bits.
inline int count_common(const uint8_t* bits, const uint8_t* other, int n) {
  int count = 0;
  for (int i = 0; i < n; i += 64) {
    const uint64_t word = read_unaligned<uint64_t>(bits + i / 8) & read_unaligned<uint64_t>(other + i / 8);
    count += count_ones(n - i < 64 ? word & ((uint64_t{1} << (n - i)) - 1) : word);
  }
  return count;
}

inline int count_ones(const uint8_t* bits, int n) { return count_common(bits, bits, n); }

// The changes that a payload describes: their positions and their steps.
struct Decoded {
  const Sections at;
  const int n;
  int num_escapes = 0;
  alignas(64) int32_t positions[kBlockWords + kSlack];
  alignas(64) int16_t steps[kBlockWords + kSlack];
  alignas(64) uint8_t bytes[kBlockBytes + 4 * kSlack];

  Decoded(uint32_t entry, int words) : at(count_of(entry), words), n(count_of(entry)) {}
};

// ---- Positions.

#if defined(__AVX512BW__)
// Finds which bits of the high parts are ones. Returns false if these are not exactly n.
inline bool find_ones(Decoded& decoded) {
  __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int count = 0;
  for (int byte = 0; byte < decoded.at.escapes; byte += 2) {
    const uint32_t bits = read_unaligned<uint16_t>(decoded.bytes + byte) & (decoded.at.escapes - byte == 1 ? 0xFF : 0xFFFF);
    const int ones = count_ones(bits);
    if (count + ones > decoded.n) return false;
    _mm512_storeu_si512(decoded.positions + count, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), places));
    count += ones;
    places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
  }
  return count == decoded.n;
}

// Has the bitmap n ones, none of them behind the block?
inline bool is_bitmap_of(const Decoded& decoded, int words) {
  return count_ones(decoded.bytes, words) == decoded.n && count_ones(decoded.bytes, 8 * decoded.at.escapes) == decoded.n;
}

// Ones -> positions.
inline void add_lows(Decoded& decoded) {
  const int width = decoded.at.width;
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i mask = _mm512_set1_epi32((1 << width) - 1), shift = _mm512_set1_epi32(width);
  // Part i begins in word i * width / 16 of those of 16 bits, and ends in that one or the next.
  const __m512i offsets = _mm512_mullo_epi32(lanes, shift), words = _mm512_srli_epi32(offsets, 4);
  const __m512i both_words = _mm512_or_si512(words, _mm512_slli_epi32(_mm512_add_epi32(words, _mm512_set1_epi32(1)), 16));
  const __m512i shifts = _mm512_and_si512(offsets, _mm512_set1_epi32(15));
  const uint8_t* lows = decoded.bytes + decoded.at.lows;
  for (int i = 0; i < decoded.n; i += 16) {  // 16 low parts are 2 * width bytes, at most 26
    const __m256i from = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lows + i / 8 * width));
    const __m512i packed = _mm512_permutexvar_epi16(both_words, _mm512_castsi256_si512(from));
    const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(packed, shifts), mask);
    const __m512i ones = _mm512_loadu_si512(decoded.positions + i);
    const __m512i high = _mm512_sub_epi32(ones, _mm512_add_epi32(lanes, _mm512_set1_epi32(i)));
    _mm512_storeu_si512(decoded.positions + i, _mm512_or_si512(_mm512_sllv_epi32(high, shift), low));
  }
}
#else
inline bool find_ones(Decoded& decoded) {
  int count = 0;
  for (int byte = 0; byte < decoded.at.escapes; byte += 4) {
    const int left = decoded.at.escapes - byte;
    uint32_t bits = read_unaligned<uint32_t>(decoded.bytes + byte) & (left < 4 ? (1u << 8 * left) - 1 : ~0u);
    if (count + count_ones(bits) > decoded.n) return false;
    for (; bits; bits &= bits - 1) decoded.positions[count++] = 8 * byte + first_one(bits);
  }
  return count == decoded.n;
}

inline void add_lows(Decoded& decoded) {
  const int width = decoded.at.width;
  const uint8_t* lows = decoded.bytes + decoded.at.lows;
  for (int i = 0; i < decoded.n; ++i) {
    const int high = decoded.positions[i] - i, bit = i * width;
    const uint32_t low = read_unaligned<uint32_t>(lows + bit / 8) >> bit % 8 & ((1u << width) - 1);
    decoded.positions[i] = high << width | static_cast<int>(low);
  }
}
#endif

// False unless positions rise and stay in the block.
inline bool read_positions(Decoded& decoded, int words) {
#if defined(__AVX512BW__)
  if (decoded.at.is_bitmap) return is_bitmap_of(decoded, words);  // `apply_vectors` takes the bitmap itself
#endif
  if (!find_ones(decoded)) return false;
  if (!decoded.at.is_bitmap) add_lows(decoded);
  decoded.positions[decoded.n] = words;
  int falls = 0;
  for (int i = 0; i < decoded.n; ++i) falls |= decoded.positions[i + 1] <= decoded.positions[i];
  return !falls;
}

// ---- Steps.

#if defined(__AVX512BW__)
inline void read_steps(Decoded& decoded) {
  const uint8_t* low_bytes = decoded.bytes + decoded.at.low_bytes;
  const uint8_t* high_bytes = low_bytes + decoded.num_escapes;
  const auto take = [](const uint8_t*& from, __mmask16 which) {
    const __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    from += count_ones(which);
    return _mm512_maskz_expand_epi32(which, bytes);
  };
  for (int i = 0; i < decoded.n; i += 16) {
    const uint32_t is_change = decoded.n - i >= 16 ? 0xFFFF : (1u << (decoded.n - i)) - 1;
    const auto escape = static_cast<__mmask16>(read_unaligned<uint16_t>(decoded.bytes + decoded.at.escapes + i / 8) & is_change);
    const auto detail = static_cast<__mmask16>(read_unaligned<uint16_t>(decoded.bytes + decoded.at.details + i / 8) & is_change);
    const __mmask16 wide = escape & detail;
    const __m512i unit = _mm512_mask_set1_epi32(_mm512_set1_epi32(1), detail, -1);
    const __m512i low = take(low_bytes, escape), high = take(high_bytes, wide);
    const __m512i both = _mm512_or_si512(_mm512_slli_epi32(high, 8), _mm512_and_si512(low, _mm512_set1_epi32(0xFF)));
    const __m512i steps = _mm512_mask_mov_epi32(_mm512_mask_mov_epi32(unit, escape, low), wide, both);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(decoded.steps + i), _mm512_cvtepi32_epi16(steps));
  }
}
#else
inline void read_steps(Decoded& decoded) {
  const uint8_t* low_bytes = decoded.bytes + decoded.at.low_bytes;
  const uint8_t* high_bytes = low_bytes + decoded.num_escapes;
  for (int i = 0; i < decoded.n; ++i) {
    const bool escape = decoded.bytes[decoded.at.escapes + i / 8] >> i % 8 & 1;
    const bool detail = decoded.bytes[decoded.at.details + i / 8] >> i % 8 & 1;
    int step = detail ? -1 : 1;
    if (escape) step = detail ? *low_bytes | *high_bytes << 8 : static_cast<int8_t>(*low_bytes);
    decoded.steps[i] = static_cast<int16_t>(step);
    low_bytes += escape;
    high_bytes += escape && detail;
  }
}
#endif

// ---- Words.

inline void move_word(uint8_t* words, int64_t index, int16_t step) {
  const auto moved = static_cast<uint16_t>(ordered(load_word(words, index)) + step);
  write_unaligned(words + 2 * index, unordered(moved));
}

#if defined(__AVX512BW__)
inline __m512i unorder(__m512i integers) {
  const __m512i signs = _mm512_srai_epi16(integers, 15);
  return _mm512_xor_si512(integers, _mm512_ternarylogic_epi32(signs, signs,
                                                              _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xAF));
}

// Applies the changes of a bitmap.
inline void apply_bitmap(const Decoded& decoded, int num_words, uint8_t* words) {
  const int16_t* steps = decoded.steps;
  const auto take = [&](uint32_t which) {
    const __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps));
    steps += count_ones(which);
    const auto lanes = static_cast<__mmask16>(which);
    return _mm512_cvtepi32_epi16(_mm512_maskz_expand_epi32(lanes, _mm512_cvtepi16_epi32(next)));
  };
  for (int i = 0; i < num_words; i += 32) {
    const int left = num_words - i;
    const __mmask32 mine = left < 32 ? (1u << left) - 1 : ~0u;
    const uint32_t changed = read_unaligned<uint32_t>(decoded.bytes + i / 8) & mine;
    const __m256i first = take(changed & 0xFFFF), second = take(changed >> 16);
    const __m512i moves = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    const __m512i old = _mm512_maskz_loadu_epi16(mine, words + 2 * i);
    _mm512_mask_storeu_epi16(words + 2 * i, mine, unorder(_mm512_add_epi16(order(old), moves)));
  }
}
#endif

inline void apply(const Decoded& decoded, [[maybe_unused]] int num_words, uint8_t* words) {
#if defined(__AVX512BW__)
  if (decoded.at.is_bitmap) return apply_bitmap(decoded, num_words, words);
#endif
  for (int i = 0; i < decoded.n; ++i) move_word(words, decoded.positions[i], decoded.steps[i]);
}

// Updates a block by a payload of the size that its entry gives. False if the payload is damaged; then the block is left
// as it is.
inline bool apply_payload(uint32_t entry, const uint8_t* payload, int num_words, uint8_t* words) {
  if (entry == kWhole) {
    memcpy(words, payload, 2 * num_words);
    return true;
  }
  if (entry == 0) return true;
  Decoded decoded(entry, num_words);
  memcpy(decoded.bytes, payload, decoded.at.nbytes(escape_bytes_of(entry)));
  const uint8_t *escapes = decoded.bytes + decoded.at.escapes, *details = decoded.bytes + decoded.at.details;
  decoded.num_escapes = count_ones(escapes, decoded.n);
  const int num_wide = count_common(escapes, details, decoded.n);
  if (decoded.num_escapes + num_wide != escape_bytes_of(entry)) return false;
  if (!read_positions(decoded, num_words)) return false;
  read_steps(decoded);
  apply(decoded, num_words, words);
  return true;
}

}  // namespace zeropp
}  // namespace
