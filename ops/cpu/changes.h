// Loops over one block of 16-bit words: find what changed, write it down, read it, and apply it.
//
// A change is 32 bits in memory: its position in the low half, its step in the high half. 16 of them are a vector of
// AVX-512, whose instructions compress and expand lanes; elsewhere the loops go from one changed word to the next.
#pragma once

#include "../changes_format.h"
#include "loops.h"
#include "memory.h"

namespace {
namespace zeropp {

constexpr int kSlack = 64;  // bytes behind a buffer that whole vectors may read or write

inline uint16_t load_word(const uint8_t* words, int64_t index) { return read_unaligned<uint16_t>(words + 2 * index); }

inline int count_ones(uint64_t bits) { return __builtin_popcountll(bits); }
inline int first_one(uint64_t bits) { return __builtin_ctzll(bits); }

inline int position_of(uint32_t change) { return change & (kBlockWords - 1); }
inline int16_t step_of(uint32_t change) { return static_cast<int16_t>(change >> 16); }

inline uint32_t make_change(int position, uint16_t new_word, uint16_t old_word) {
  return static_cast<uint32_t>(position) | static_cast<uint32_t>(ordered(new_word) - ordered(old_word)) << 16;
}

// The changes of one block: their positions and their steps, and how many bytes the steps take.
struct Changes {
  int n;
  int num_escapes;
  int num_wide;
  alignas(64) uint32_t list[kBlockWords + kSlack];
  alignas(64) uint8_t bitmap[kBlockWords / 8 + kSlack];
  alignas(64) uint8_t escapes[kBlockWords / 8 + kSlack];
  alignas(64) uint8_t details[kBlockWords / 8 + kSlack];
  alignas(64) uint8_t low_bytes[kBlockWords + kSlack];
  alignas(64) uint8_t high_bytes[kBlockWords + kSlack];

  int escape_bytes() const { return num_escapes + num_wide; }
};

// ---- Find.

#if defined(__AVX512BW__)
inline __m512i order(__m512i words) {
  const __m512i signs = _mm512_srai_epi16(words, 15);
  return _mm512_xor_si512(words, _mm512_or_si512(signs, _mm512_set1_epi16(static_cast<int16_t>(0x8000))));
}

// Changes of 16 words whose steps are given, behind those found before.
inline void append(Changes& changes, __m256i steps, __mmask16 changed, int first) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i positions = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
  const __m512i both = _mm512_or_si512(_mm512_slli_epi32(_mm512_cvtepu16_epi32(steps), 16), positions);
  // Compressing to memory is slow on some processors. What is stored behind the changes is overwritten by the next.
  _mm512_storeu_si512(changes.list + changes.n, _mm512_maskz_compress_epi32(changed, both));
  changes.n += count_ones(changed);
}

// The changes of whole vectors. Returns the words that it has looked at.
inline int find_vectors(const uint8_t* new_words, const uint8_t* old_words, int words, Changes& changes) {
  int i = 0;
  for (; i + 32 <= words; i += 32) {
    const __m512i news = _mm512_loadu_si512(new_words + 2 * i), olds = _mm512_loadu_si512(old_words + 2 * i);
    const __mmask32 changed = _mm512_cmpneq_epi16_mask(news, olds);
    write_unaligned<uint32_t>(changes.bitmap + i / 8, changed);
    if (changed == 0) continue;
    const __m512i steps = _mm512_sub_epi16(order(news), order(olds));
    append(changes, _mm512_castsi512_si256(steps), static_cast<__mmask16>(changed), i);
    append(changes, _mm512_extracti64x4_epi64(steps, 1), static_cast<__mmask16>(changed >> 16), i + 16);
  }
  return i;
}
#else
// Which of 32 words differ.
inline uint32_t compare(const uint8_t* new_words, const uint8_t* old_words) {
  uint32_t changed = 0;
#if defined(__SSE2__)
  for (int half = 0; half < 2; ++half) {
    const auto equal = [&](int vector) {
      const auto at = [&](const uint8_t* words) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(words) + 2 * half + vector);
      };
      return _mm_cmpeq_epi16(at(new_words), at(old_words));
    };
    changed |= static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(equal(0), equal(1))) ^ 0xFFFF) << 16 * half;
  }
#else
  for (int i = 0; i < 32; ++i) changed |= static_cast<uint32_t>(load_word(new_words, i) != load_word(old_words, i)) << i;
#endif
  return changed;
}

inline int find_vectors(const uint8_t* new_words, const uint8_t* old_words, int words, Changes& changes) {
  int i = 0;
  for (; i + 32 <= words; i += 32) {
    uint32_t changed = compare(new_words + 2 * i, old_words + 2 * i);
    write_unaligned<uint32_t>(changes.bitmap + i / 8, changed);
    for (; changed; changed &= changed - 1) {
      const int at = i + first_one(changed);
      changes.list[changes.n++] = make_change(at, load_word(new_words, at), load_word(old_words, at));
    }
  }
  return i;
}
#endif

inline void find_changes(const uint8_t* new_words, const uint8_t* old_words, int words, Changes& changes) {
  changes.n = 0;
  const int begin = find_vectors(new_words, old_words, words, changes);
  uint32_t rest = 0;
  for (int i = begin; i < words; ++i) {
    const uint16_t new_word = load_word(new_words, i), old_word = load_word(old_words, i);
    if (new_word == old_word) continue;
    changes.list[changes.n++] = make_change(i, new_word, old_word);
    rest |= 1u << (i - begin);
  }
  write_unaligned<uint32_t>(changes.bitmap + begin / 8, rest);
}

// ---- Classes of steps, and the bytes of those that need some.

#if defined(__AVX512BW__)
inline void classify(Changes& changes) {
  changes.num_escapes = changes.num_wide = 0;
  for (int i = 0; i < changes.n; i += 16) {
    const __mmask16 is_change = changes.n - i >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (changes.n - i)) - 1);
    const __m512i steps = _mm512_srai_epi32(_mm512_loadu_si512(changes.list + i), 16);
    const __mmask16 up = _mm512_mask_cmpeq_epi32_mask(is_change, steps, _mm512_set1_epi32(1));
    const __mmask16 down = _mm512_mask_cmpeq_epi32_mask(is_change, steps, _mm512_set1_epi32(-1));
    const __mmask16 escape = is_change & ~(up | down);
    const __m512i shifted = _mm512_add_epi32(steps, _mm512_set1_epi32(128));
    const __mmask16 wide = _mm512_mask_cmpgt_epu32_mask(escape, shifted, _mm512_set1_epi32(255));
    write_unaligned<uint16_t>(changes.escapes + i / 8, escape);
    write_unaligned<uint16_t>(changes.details + i / 8, down | wide);
    const auto append = [](uint8_t* to, __mmask16 which, __m512i bytes) {
      const __m128i packed = _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(which, bytes));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
      return count_ones(which);
    };
    changes.num_escapes += append(changes.low_bytes + changes.num_escapes, escape, steps);
    changes.num_wide += append(changes.high_bytes + changes.num_wide, wide, _mm512_srai_epi32(steps, 8));
  }
}
#else
inline void classify(Changes& changes) {
  changes.num_escapes = changes.num_wide = 0;
  for (int i = 0; i < changes.n; i += 8) {
    int escapes = 0, details = 0;
    for (int j = 0; j < 8 && i + j < changes.n; ++j) {
      const int step = step_of(changes.list[i + j]);
      const bool escape = step != 1 && step != -1, wide = step < -128 || step > 127;
      escapes |= escape << j;
      details |= (wide || step == -1) << j;
      changes.low_bytes[changes.num_escapes] = static_cast<uint8_t>(step);
      changes.high_bytes[changes.num_wide] = static_cast<uint8_t>(step >> 8);
      changes.num_escapes += escape;
      changes.num_wide += wide;
    }
    changes.escapes[i / 8] = static_cast<uint8_t>(escapes);
    changes.details[i / 8] = static_cast<uint8_t>(details);
  }
}
#endif

// ---- Write.

// A stream of bits. Each call writes 8 bytes, so up to 8 behind the last bit are written too.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* to) : to_(to) {}

  // `bits` has no ones above `count` <= 52.
  void put(uint64_t bits, int count) {
    word_ |= bits << fill_;
    fill_ += count;
    write_unaligned(to_, word_);
    to_ += fill_ / 8;
    word_ >>= fill_ / 8 * 8;
    fill_ %= 8;
  }

 private:
  uint8_t* to_;
  uint64_t word_ = 0;
  int fill_ = 0;
};

// Ones at rising places among bits that are zeros. Up to 8 bytes behind the last one are written too.
class OneWriter {
 public:
  explicit OneWriter(uint8_t* to) : to_(to) {}

  // Bits that are put from here on lie at `place` or behind it. Returns the place of bit 0 of `put`: at most 7 before.
  int move_to(int place) {
    write_unaligned(to_ + place_ / 8, word_);
    const int moved = place / 8 * 8 - place_;
    word_ = moved < 64 ? word_ >> moved : 0;
    return place_ += moved;
  }

  // The place of bit 0 of a `put` that reaches `place`.
  int reach(int place) { return place - place_ < 64 ? place_ : move_to(place); }

  void put(uint64_t bits) { word_ |= bits; }

  void finish() { write_unaligned(to_ + place_ / 8, word_); }

 private:
  uint8_t* to_;
  uint64_t word_ = 0;
  int place_ = 0;  // of the word's first bit
};

#if defined(__AVX512BW__)
inline __mmask16 lanes_below(int count) { return static_cast<__mmask16>(count < 16 ? (1u << count) - 1 : 0xFFFF); }

inline __m512i load_positions(const Changes& changes, int i) {
  const __m512i list = _mm512_maskz_loadu_epi32(lanes_below(changes.n - i), changes.list + i);
  return _mm512_and_si512(list, _mm512_set1_epi32(kBlockWords - 1));
}

// The high parts of positions, in unary. 16 of them usually lie within 64 bits, and are made at once.
inline void write_highs(const Changes& changes, int width, uint8_t* to) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i one = _mm512_set1_epi64(1);
  OneWriter ones(to);
  for (int i = 0; i < changes.n; i += 16) {
    const int count = static_cast<int>(min(16, changes.n - i));
    const auto high = [&](int j) { return (position_of(changes.list[i + j]) >> width) + i + j; };
    const int first = ones.move_to(high(0));
    if (high(count - 1) - first < 64) {
      const __m512i shifts = _mm512_srlv_epi32(load_positions(changes, i), _mm512_set1_epi32(width));
      const __m512i places = _mm512_add_epi32(_mm512_add_epi32(shifts, lanes), _mm512_set1_epi32(i - first));
      const auto bits = [&](__m256i half, __mmask8 which) {
        return _mm512_maskz_sllv_epi64(which, one, _mm512_cvtepu32_epi64(half));
      };
      const __mmask16 which = lanes_below(count);
      const __m512i low = bits(_mm512_castsi512_si256(places), static_cast<__mmask8>(which));
      const __m512i upper = bits(_mm512_extracti64x4_epi64(places, 1), static_cast<__mmask8>(which >> 8));
      ones.put(_mm512_reduce_or_epi64(_mm512_or_si512(low, upper)));
      continue;
    }
    for (int j = 0; j < count; ++j) {
      const int begin = ones.reach(high(j));
      ones.put(uint64_t{1} << (high(j) - begin));
    }
  }
  ones.finish();
}

// The low parts of positions. Neighbours are joined in lanes of 64 bits, then in those of 128.
inline void write_lows(const Changes& changes, int width, uint8_t* to) {
  const __m512i mask = _mm512_set1_epi32((1 << width) - 1);
  const __m128i once = _mm_cvtsi32_si128(width), twice = _mm_cvtsi32_si128(2 * width);
  BitWriter bits(to);
  for (int i = 0; i < changes.n; i += 16) {
    const __m512i low = _mm512_and_si512(load_positions(changes, i), mask);
    const __m512i even = _mm512_and_si512(low, _mm512_set1_epi64(0xFFFFFFFF));
    const __m512i pairs = _mm512_or_si512(even, _mm512_sll_epi64(_mm512_srli_epi64(low, 32), once));
    const __m512i fours = _mm512_or_si512(pairs, _mm512_sll_epi64(_mm512_unpackhi_epi64(pairs, pairs), twice));
    alignas(64) uint64_t joined[8];
    _mm512_store_si512(joined, fours);
    for (int j = 0; j < 8; j += 2) bits.put(joined[j], 4 * width);
  }
}
#else
inline void write_highs(const Changes& changes, int width, uint8_t* to) {
  OneWriter ones(to);
  for (int i = 0; i < changes.n; ++i) {
    const int place = (position_of(changes.list[i]) >> width) + i, begin = ones.reach(place);
    ones.put(uint64_t{1} << (place - begin));
  }
  ones.finish();
}

inline void write_lows(const Changes& changes, int width, uint8_t* to) {
  const uint32_t mask = (1u << width) - 1;
  BitWriter bits(to);
  for (int i = 0; i < changes.n; ++i) bits.put(position_of(changes.list[i]) & mask, width);
}
#endif

// Memory for one payload, and what vectors write behind it.
struct Payload {
  alignas(64) uint8_t bytes[kBlockBytes + 4 * kSlack];
};

// Writes the payload of a block with changes that is not stored whole. Returns its bytes.
inline int write_payload(const Changes& changes, int words, Payload& payload) {
  const Sections at(changes.n, words);
  uint8_t* to = payload.bytes;
  const int nbytes = at.nbytes(changes.escape_bytes()), plane = at.lows - at.details;
  // Each section is written behind the one before it, which may have written beyond its end.
  if (at.is_bitmap) {
    memcpy(to, changes.bitmap, at.escapes);
  } else {
    memset(to, 0, at.escapes);
    write_highs(changes, at.width, to);
  }
  memcpy(to + at.escapes, changes.escapes, plane);
  memcpy(to + at.details, changes.details, plane);
  if (at.width) write_lows(changes, at.width, to + at.lows);
  uint8_t* bytes = to + at.low_bytes;
  memcpy(bytes, changes.low_bytes, changes.num_escapes);
  memcpy(bytes + changes.num_escapes, changes.high_bytes, changes.num_wide);
  memset(bytes + changes.escape_bytes(), 0, nbytes - at.low_bytes - changes.escape_bytes());
  return nbytes;
}

}  // namespace zeropp
}  // namespace
