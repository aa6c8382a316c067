// The wire of changed words: one definition, for C++ and CUDA. hf_zeropp/ops/changes_format.py describes the bytes.
#pragma once

#include "format.h"

namespace {
namespace zeropp {

constexpr int kBlockWords = 8192;
constexpr int kBlockBytes = 2 * kBlockWords;
constexpr int kPositionBits = 13;
constexpr int kCountBits = 14;
constexpr int kEscapeBits = 15;
constexpr uint32_t kWhole = 0x80000000;
constexpr int64_t kEntryBytes = 4;
constexpr int64_t kBadSize = 1;

// Words as integers that are ordered as the floats with these bits are, and back. The signs of weights are random, so these are no
// branches: the sign bit is spread over all bits.
ZEROPP_HD uint16_t ordered(uint16_t word) { return static_cast<uint16_t>(word ^ ((0u - (word >> 15)) | 0x8000u)); }
ZEROPP_HD uint16_t unordered(uint16_t integer) {
  return static_cast<uint16_t>(integer ^ (((integer >> 15) - 1u) | 0x8000u));
}

ZEROPP_HD int64_t align_entry(int64_t nbytes) { return (nbytes + kEntryBytes - 1) / kEntryBytes * kEntryBytes; }

ZEROPP_HD int64_t num_blocks_of(int64_t slice_bytes) { return ceil_div(slice_bytes, kBlockBytes); }

// The rows of a wire that is encoded.
ZEROPP_HD int64_t capacity_of(int64_t slice_bytes) {
  return num_blocks_of(slice_bytes) * kEntryBytes + align_entry(slice_bytes);
}

ZEROPP_HD int words_of_block(int64_t slice_bytes, int64_t block) {
  return static_cast<int>(min(slice_bytes - block * kBlockBytes, kBlockBytes) / 2);
}

ZEROPP_HD int count_of(uint32_t entry) { return entry & ((1 << kCountBits) - 1); }
ZEROPP_HD int escape_bytes_of(uint32_t entry) { return entry >> kCountBits & ((1 << kEscapeBits) - 1); }
ZEROPP_HD int whole_bytes(int words) { return static_cast<int>(align_entry(2 * words)); }

// The offsets of the sections of a payload with n > 0 changes, in bytes from its start. The high parts begin at 0.
struct Sections {
  bool is_bitmap;
  int width;  // low bits of a position that are stored as they are
  int escapes, details, lows, low_bytes;

  ZEROPP_HD Sections(int n, int words) {
    width = 0;
    while (words / n >> (width + 1)) ++width;  // floor(log2(words / n))
    const int high_bits = n + ((words - 1) >> width);
    is_bitmap = high_bits + n * width >= words;
    if (is_bitmap) width = 0;
    escapes = ((is_bitmap ? words : high_bits) + 7) / 8;
    details = escapes + (n + 7) / 8;
    lows = details + (n + 7) / 8;
    low_bytes = lows + (n * width + 7) / 8;
  }

  // Padding included.
  ZEROPP_HD int nbytes(int num_escape_bytes) const { return static_cast<int>(align_entry(low_bytes + num_escape_bytes)); }
};

// The table entry of a block with n changes.
ZEROPP_HD uint32_t make_entry(int n, int escape_bytes, int words) {
  if (n == 0) return 0;
  if (Sections(n, words).nbytes(escape_bytes) >= whole_bytes(words)) return kWhole;
  return static_cast<uint32_t>(n) | static_cast<uint32_t>(escape_bytes) << kCountBits;
}

// The bytes of a block's payload, or -1 where no block has this entry.
ZEROPP_HD int payload_bytes(uint32_t entry, int words) {
  const int n = count_of(entry), escape_bytes = escape_bytes_of(entry);
  if (entry == kWhole) return whole_bytes(words);
  if (entry >> (kCountBits + kEscapeBits) || n > words || escape_bytes > 2 * n) return -1;
  if (n == 0) return 0;
  const int nbytes = Sections(n, words).nbytes(escape_bytes);
  return nbytes < whole_bytes(words) ? nbytes : -1;
}

// Is a slice's wire inside of all bytes that came, and has it room for its table?
ZEROPP_HD bool holds_table(int64_t offset, int64_t size, int64_t wire_bytes, int64_t slice_bytes) {
  const bool is_inside = offset >= 0 && offset <= wire_bytes && size >= 0 && size <= wire_bytes - offset;
  return is_inside && size >= num_blocks_of(slice_bytes) * kEntryBytes;
}

}  // namespace zeropp
}  // namespace
