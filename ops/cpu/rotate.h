// Rotations: the Hadamard transform of 32-slices, see format.h.
#pragma once

#include "../format.h"

namespace {
namespace zeropp {

// One stage, on neighbours: sums to the lower half, differences to the upper. This rotates the bits of every index by one,
// so that the next stage finds the elements it needs next to each other, and five stages restore the order.
inline void rotate_stage(const float* __restrict in, float* __restrict out) {
  constexpr int kHalf = kRotationSlice / 2;
  for (int i = 0; i < kHalf; ++i) {
    out[i] = in[2 * i] + in[2 * i + 1];
    out[kHalf + i] = in[2 * i] - in[2 * i + 1];
  }
}

// The whole slices among n values, in place.
inline void rotate_slices(float* values, int64_t n) {
  for (float* slice = values; slice + kRotationSlice <= values + n; slice += kRotationSlice) {
    alignas(64) float other[kRotationSlice];
    rotate_stage(slice, other);
    rotate_stage(other, slice);
    rotate_stage(slice, other);
    rotate_stage(other, slice);
    rotate_stage(slice, other);
    for (int i = 0; i < kRotationSlice; ++i) slice[i] = other[i] * kRotationNorm;
  }
}

}  // namespace zeropp
}  // namespace
