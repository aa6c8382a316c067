// The sum of several sources, which two kernels share.
#pragma once

#include "elements.cuh"

namespace {
namespace zeropp {

// Slices that several ranks sent, and the values that their sums start from.
struct Sources {
  const uint8_t* wire;  // [num_sources, num_sums, nbytes]; null for no sources
  Layout layout;
  const float* initial;  // [num_sums, numel], or null: start from source 0
  int64_t num_sources;
  int64_t num_sums;
  int log2_block;  // of layout.block, if it is a power of two

  __device__ int64_t stride() const { return num_sums * layout.nbytes; }

  // initial + source 0 + source 1 + ..., in that order, for a tile of sum `index`. Tiles hold whole blocks of this
  // layout.
  template <int V>
  __device__ __forceinline__ void sum_rows(const Tile& tile, int64_t index, Staging& staging,
                                           float (&values)[kPerLane]) const {
    const Part& part = layout.parts[tile.part];
    if (initial) load_rows<V>(initial + index * layout.numel + part.element + tile.first, tile.numel, values);
    else clear(values);
    const TileMemory<const uint8_t> from{wire + index * layout.nbytes, part, tile, log2_block};
    add_sources<V, true>(from, num_sources, stride(), layout.raw_dtype, staging, values);
  }

  // The same for one element of a part.
  __device__ float sum_element(const Part& part, int64_t index, int64_t element) const {
    float value = initial ? initial[index * layout.numel + part.element + element] : -0.0f;
    const uint8_t* from = wire + index * layout.nbytes;
    for (int64_t source = 0; source < num_sources; ++source, from += stride()) {
      value += decode_element(from, part, layout, element);
    }
    return value;
  }
};

}  // namespace zeropp
}  // namespace
