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

// The codes of a row's block b as int8: the codes themselves, or `buffer` if they had to be unpacked. Fetches a block
// ahead.
inline const int8_t* load_codes(const uint8_t* row, const FrozenRows& shape, int64_t b, int8_t* buffer) {
  const uint8_t* from = row + b * shape.block * shape.bits / 8;
  prefetch(from + shape.block * shape.bits / 2, shape.block * shape.bits / 8);
  if (shape.bits == 8) return reinterpret_cast<const int8_t*>(from);
  unpack_nibbles(from, shape.block_size(b), buffer);
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
