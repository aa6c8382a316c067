// Loops over the rows of a frozen weight, which three kernels share.
#pragma once

#include "../frozen_format.h"
#include "codes.h"
#include "loops.h"
#include "memory.h"
#include "parallel.h"

namespace {
namespace zeropp {

// Scales are bytes in the ABI. They may begin at an odd address, as views into larger buffers do.
inline BFloat16 load_scale(const uint8_t* scales, int64_t index) {
  return read_unaligned<BFloat16>(scales + index * sizeof(BFloat16));
}

#if defined(__AVX512F__)
// The 16 levels, by code.
inline __m512 level_floats() {
  alignas(64) static constexpr float kLevels[kNumLevels] = {ZEROPP_LEVELS};
  return _mm512_load_ps(kLevels);
}
#endif

struct FrozenLevels {
  static constexpr int8_t at[kNumLevels] = {ZEROPP_LEVELS};
};

// n INT4 codes of a block -> their levels. Writes an even number of them: one more than n if n is odd.
inline void look_up_levels(const uint8_t* __restrict in, int64_t n, int8_t* __restrict levels) {
  look_up_nibbles<FrozenLevels>(in, n, levels);
}

// The levels of a row's block b as int8: the codes themselves (INT8), or `buffer`. Fetches a block ahead.
inline const int8_t* load_levels(const uint8_t* row, const FrozenRows& shape, int64_t b, int8_t* buffer) {
  const uint8_t* from = row + b * shape.block * shape.bits / 8;
  prefetch(from + shape.block * shape.bits / 2, shape.block * shape.bits / 8);
  if (shape.bits == 8) return reinterpret_cast<const int8_t*>(from);
  look_up_levels(from, shape.block_size(b), buffer);
  return buffer;
}

// Runs body(row) for every row, in threads. The grain gives a thread at least some thousand elements.
template <class Body>
int for_each_row(const FrozenRows& shape, const Body& body) {
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  };
  return parallel_for(shape.rows, 32768 / (shape.columns + 1) + 1, run) ? kOk : kParallelFailed;
}

}  // namespace zeropp
}  // namespace
