// What the kernels over rows of a frozen weight share.
#pragma once

#include "../frozen_format.h"
#include "codes.h"
#include "loops.h"
#include "parallel.h"

namespace {
namespace zeropp {

// Codes of a row's block b as int8, in `buffer` where they must be unpacked. Fetches a block ahead.
inline const int8_t* load_codes(const uint8_t* row, const FrozenRows& shape, int64_t b, int8_t* buffer) {
  const uint8_t* from = row + b * shape.block * shape.bits / 8;
  prefetch(from + shape.block * shape.bits / 2, shape.block * shape.bits / 8);
  if (shape.bits == 8) return reinterpret_cast<const int8_t*>(from);
  unpack_nibbles(from, shape.block_size(b), buffer);
  return buffer;
}

// body(row) for every row, some thousand elements to a thread at least.
template <class Body>
Status for_each_row(const FrozenRows& shape, const Body& body) {
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  };
  return parallel_for(shape.rows, 32768 / (shape.columns + 1) + 1, run) ? kOk : kParallelFailed;
}

}  // namespace zeropp
}  // namespace
