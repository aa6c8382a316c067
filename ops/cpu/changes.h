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

inline uint16_t load_word(const uint8_t* words, int64_t index) {
  uint16_t word;
  memcpy(&word, words + 2 * index, sizeof word);
  return word;
}

inline void store_word(uint8_t* words, int64_t index, uint16_t word) { memcpy(words + 2 * index, &word, sizeof word); }

template <class T>
T load(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(uint8_t* to, T value) {
  memcpy(to, &value, sizeof value);
}

inline int count_ones(uint64_t bits) { return __builtin_popcountll(bits); }
inline int first_one(uint64_t bits) { return __builtin_ctzll(bits); }

inline int position_of(uint32_t change) { return change & (kBlockWords - 1); }
inline int16_t step_of(uint32_t change) { return static_cast<int16_t>(change >> 16); }

inline uint32_t make_change(int position, uint16_t new_word, uint16_t old_word) {
  return static_cast<uint32_t>(position) | static_cast<uint32_t>(ordered(new_word) - ordered(old_word)) << 16;
}

// What changed in a block, and the bytes of its steps.
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
    store<uint32_t>(changes.bitmap + i / 8, changed);
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
    store<uint32_t>(changes.bitmap + i / 8, changed);
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
  store<uint32_t>(changes.bitmap + begin / 8, rest);
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
    store<uint16_t>(changes.escapes + i / 8, escape);
    store<uint16_t>(changes.details + i / 8, down | wide);
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

// A stream of bits, written in words of 64.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* to) : to_(to) {}

  // `bits` has no ones above `count` < 32.
  void put(uint64_t bits, int count) {
    word_ |= bits << fill_;
    fill_ += count;
    if (fill_ < 32) return;
    store<uint32_t>(to_, static_cast<uint32_t>(word_));
    to_ += 4;
    word_ >>= 32;
    fill_ -= 32;
  }

  // Writes up to 7 bytes behind the last bit.
  void finish() { store(to_, word_); }

 private:
  uint8_t* to_;
  uint64_t word_ = 0;
  int fill_ = 0;
};

// Positions as an Elias-Fano code. `payload` has zeros where high parts go.
inline void write_positions(const Changes& changes, const Sections& at, uint8_t* payload) {
  BitWriter lows(payload + at.lows);
  const uint32_t mask = (1u << at.width) - 1;
  uint64_t word = 0;
  int index = 0;
  for (int i = 0; i < changes.n; ++i) {
    const int position = position_of(changes.list[i]), high = (position >> at.width) + i;
    if (high / 64 != index) {
      store(payload + 8 * index, word);
      word = 0;
      index = high / 64;
    }
    word |= uint64_t{1} << high % 64;
    lows.put(position & mask, at.width);
  }
  const int last = 8 * index;
  memcpy(payload + last, &word, min(8, at.escapes - last));
  lows.finish();
}

// Memory for one payload, and what vectors write behind it.
struct Payload {
  alignas(64) uint8_t bytes[kBlockBytes + 4 * kSlack];
};

// Writes the payload of a block with changes that is not stored whole. Returns its bytes.
inline int write_payload(const Changes& changes, int words, Payload& payload) {
  const Sections at(changes.n, words);
  uint8_t* to = payload.bytes;
  const int nbytes = at.nbytes(changes.escape_bytes()), plane = at.lows - at.details;
  store<uint32_t>(to + nbytes - 4, 0);
  if (at.is_bitmap) {
    memcpy(to, changes.bitmap, at.escapes);
  } else {
    memset(to, 0, at.escapes);
    write_positions(changes, at, to);
  }
  memcpy(to + at.escapes, changes.escapes, plane);
  memcpy(to + at.details, changes.details, plane);
  memcpy(to + at.low_bytes, changes.low_bytes, changes.num_escapes);
  memcpy(to + at.low_bytes + changes.num_escapes, changes.high_bytes, changes.num_wide);
  memset(to + at.low_bytes + changes.escape_bytes(), 0, nbytes - at.low_bytes - changes.escape_bytes());
  return nbytes;
}

}  // namespace zeropp
}  // namespace
