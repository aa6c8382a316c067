// Blocks of 16-bit words that changed: one thread block for each, and 32 consecutive words for each thread.
//
// [Note: order of changes] A change's place in the payload depends on how many come before it. Threads hold consecutive words,
// so a prefix sum over the counts of threads gives each its first place, and no thread waits for another's words.
#pragma once

#include "../changes_format.h"
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

constexpr int kChangeThreads = 256;
constexpr int kPerThread = kBlockWords / kChangeThreads;
constexpr int kGroup = 8;  // words that move in one instruction

// The sum of the values of all threads before this one, and of all threads.
struct Prefix {
  uint32_t before, all;
};

// Every thread of the block calls it. `sums` is shared memory, free again when all have returned.
__device__ inline Prefix block_prefix(uint32_t value, uint32_t* sums) {
  const int lane = lane_index(), warp = threadIdx.x / kLanes;
  uint32_t upto = value;
  for (int step = 1; step < kLanes; step *= 2) {
    const uint32_t other = __shfl_sync(kAllLanes, upto, (lane - step) & (kLanes - 1));
    if (lane >= step) upto += other;
  }
  if (lane == kLanes - 1) sums[warp] = upto;
  __syncthreads();
  Prefix prefix{upto - value, 0};
  for (int i = 0; i < kChangeThreads / kLanes; ++i) {
    if (i < warp) prefix.before += sums[i];
    prefix.all += sums[i];
  }
  __syncthreads();
  return prefix;
}

// The words of one thread block: where they lie, how many there are, and whether they allow 16-byte accesses.
template <class Byte>
struct BlockOfWords {
  Byte* bytes;
  int words;
  bool aligned;

  __device__ BlockOfWords(Byte* slices, int64_t slice_bytes, int64_t slice, int64_t block)
      : bytes(slices + slice * slice_bytes + block * kBlockBytes),
        words(words_of_block(slice_bytes, block)),
        aligned(is_aligned(bytes)) {}

  // Words first .. first + 7, two in each of the result's. Those behind the block are 0.
  __device__ Words<4> load(int first) const {
    if (aligned && first + kGroup <= words) return *reinterpret_cast<const Words<4>*>(bytes + 2 * first);
    Words<4> loaded;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + 2 * i;
      const uint32_t low = at < words ? read_unaligned<uint16_t>(bytes + 2 * at) : 0;
      const uint32_t high = at + 1 < words ? read_unaligned<uint16_t>(bytes + 2 * at + 2) : 0;
      loaded.at[i] = low | high << 16;
    }
    return loaded;
  }

  __device__ void store(int first, const Words<4>& values) const {
    if (aligned && first + kGroup <= words) {
      *reinterpret_cast<Words<4>*>(bytes + 2 * first) = values;
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const auto word = static_cast<uint16_t>(values.at[i / 2] >> 16 * (i % 2));
      if (first + i < words) write_unaligned(bytes + 2 * (first + i), word);
    }
  }
};

// ---- Bytes of a payload in shared memory, as little-endian words.

constexpr int kPayloadWords = kBlockBytes / 4 + 2;  // bits_at reads up to one word behind the last

__device__ inline uint32_t bits_at(const uint32_t* words, int bit) {
  const int index = bit / 32, shift = bit % 32;
  return shift ? words[index] >> shift | words[index + 1] << (32 - shift) : words[index];
}

__device__ inline uint32_t byte_at(const uint32_t* words, int byte) { return words[byte / 4] >> 8 * (byte % 4) & 0xFF; }

__device__ inline uint32_t low_ones(int count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Moves whole bytes, a word at a time where the address allows it. All threads of the block help.
__device__ inline void copy_to_shared(const uint8_t* from, int nbytes, uint32_t* to) {
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 4 == 0;
  for (int i = threadIdx.x; i < nbytes / 4; i += kChangeThreads) {
    to[i] = aligned ? reinterpret_cast<const uint32_t*>(from)[i] : read_unaligned<uint32_t>(from + 4 * i);
  }
}

__device__ inline void copy_from_shared(const uint32_t* from, int nbytes, uint8_t* to) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 4 == 0;
  for (int i = threadIdx.x; i < nbytes / 4; i += kChangeThreads) {
    if (aligned) reinterpret_cast<uint32_t*>(to)[i] = from[i];
    else write_unaligned(to + 4 * i, from[i]);
  }
}

__device__ inline uint32_t load_entry(const uint8_t* wire, int64_t block) {
  return read_unaligned<uint32_t>(wire + block * kEntryBytes);
}

// Finds where the payloads of a slice begin, in one thread block. Returns the bytes of the slice's wire, or -1 if the table has an
// entry that no block has.
__device__ inline int64_t find_payloads(const uint8_t* wire, int64_t slice_bytes, int64_t* starts) {
  __shared__ uint32_t sums[kChangeThreads / kLanes];
  const int64_t num_blocks = num_blocks_of(slice_bytes);
  int64_t place = num_blocks * kEntryBytes;
  uint32_t num_bad = 0;
  for (int64_t first = 0; first < num_blocks; first += kChangeThreads) {
    const int64_t b = first + threadIdx.x;
    const int nbytes = b < num_blocks ? payload_bytes(load_entry(wire, b), words_of_block(slice_bytes, b)) : 0;
    const Prefix prefix = block_prefix(nbytes < 0 ? 0 : nbytes, sums);
    num_bad += block_prefix(nbytes < 0, sums).all;
    if (b < num_blocks) starts[b] = place + prefix.before;
    place += prefix.all;
  }
  return num_bad ? -1 : place;
}

}  // namespace zeropp
}  // namespace
