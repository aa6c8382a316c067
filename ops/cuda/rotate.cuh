// Rotations: 32-slices times the orthonormal Hadamard matrix (format.h). Elements behind a part's last whole slice are
// not rotated.
#pragma once

#include "rows.cuh"

namespace {
namespace zeropp {

// One stage between the V values of a lane.
template <int V>
__device__ __forceinline__ void rotate_within(int step, float* values) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (i & step) continue;
    const float low = values[i], high = values[i + step];
    values[i] = low + high;
    values[i + step] = low - high;
  }
}

// One stage between lanes that are `step` apart. The lower lane takes the sum, the higher one the difference, which it
// gets by adding its own value with the opposite sign.
template <int V>
__device__ __forceinline__ void rotate_between(int step, float* values) {
  const bool is_high = lane_index() & step;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float other = __shfl_xor_sync(kAllLanes, values[i], step);
    values[i] = other + (is_high ? -values[i] : values[i]);
  }
}

// Rotates the whole slices of a tile. A tile begins with a slice, because blocks are multiples of 32.
template <int V>
__device__ __forceinline__ void rotate_rows(int numel, float (&values)[kPerLane]) {
#pragma unroll
  for (int j = 0; j < kPerLane / V; ++j) {
    float rotated[V];
#pragma unroll
    for (int i = 0; i < V; ++i) rotated[i] = values[j * V + i];
#pragma unroll
    for (int step = 1; step < V; step *= 2) rotate_within<V>(step, rotated);
#pragma unroll
    for (int step = 1; step < kRotationSlice / V; step *= 2) rotate_between<V>(step, rotated);
    const bool is_whole_slice = element_of<V>(j) / kRotationSlice < numel / kRotationSlice;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (is_whole_slice) values[j * V + i] = rotated[i] * kRotationNorm;
    }
  }
}

// Element `index` of a part after its slices are rotated; value_of(i) is element i before. Each stage computes only the
// sums and differences that end up in this element: half as many as the stage before.
template <class Value>
__device__ float rotated_element(const Value& value_of, const Part& part, int64_t index) {
  const int64_t first = index - index % kRotationSlice;
  if (part.bits == 0 || first + kRotationSlice > part.numel) return value_of(index);
  float values[kRotationSlice];
  for (int i = 0; i < kRotationSlice; ++i) values[i] = value_of(first + i);
#pragma unroll
  for (int step = 1; step < kRotationSlice; step *= 2) {
#pragma unroll
    for (int i = 0; i < kRotationSlice / (2 * step); ++i) {
      const float low = values[2 * i], high = values[2 * i + 1];
      values[i] = index & step ? low - high : low + high;
    }
  }
  return values[0] * kRotationNorm;
}

}  // namespace zeropp
}  // namespace
