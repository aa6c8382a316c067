// Decode slices that several ranks sent, and add them up: out = (initial + sum of sources) * scale.
#include "launch.cuh"
#include "sum.cuh"

namespace {
namespace zeropp {

template <class Out>
__global__ void __launch_bounds__(kThreads, 4)
dequantize_sum_rows(Tiling tiling, int64_t num_sums, Sources sources, float scale, Out* output) {
  __shared__ Staging staging[kWarps];
  for_my_tile(sources.layout, tiling, num_sums, [&](const Tile& tile, int64_t index) {
    float values[kPerLane];
    const Part& part = sources.layout.parts[tile.part];
    sources.sum_rows<kVector<Out>>(tile, index, staging[threadIdx.x / kLanes], values);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] *= scale;
    store_rows<kVector<Out>>(values, tile.numel, output + index * sources.layout.numel + part.element + tile.first);
  });
}

__global__ void __launch_bounds__(kThreads)
dequantize_sum_elements(Tiling tiling, int64_t num_sums, Sources sources, float scale, void* output,
                        int64_t dtype) {
  for_my_tile(sources.layout, tiling, num_sums, [&](const Tile& tile, int64_t index) {
    const Part& part = sources.layout.parts[tile.part];
    const int64_t first = index * sources.layout.numel + part.element;
    for (int64_t i = tile.first + lane_index(); i < tile.first + tile.numel; i += kLanes) {
      store_element(output, dtype, first + i, sources.sum_element(part, index, i) * scale);
    }
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(dequantize_sum)(const uint8_t* wire, const ZeroppLayout* layout, int64_t num_sources,
                              const float* initial, float scale, int64_t dtype, int64_t num_slices, void* out,
                              void* stream) {
  using namespace zeropp;
  const Tiling tiling = tiling_of(*layout);
  const Sources sources{wire, *layout, initial, num_sources, num_slices, log2_floor(layout->block)};
  if (!has_row_blocks(*layout, wire)) {
    return launch_tiles(dequantize_sum_elements, tiling, num_slices, stream, sources, scale, out, dtype);
  }
  return for_dtype(dtype, [&](auto type) {
    using Out = decltype(type);
    Out* typed = static_cast<Out*>(out);
    return launch_tiles(dequantize_sum_rows<Out>, tiling, num_slices, stream, sources, scale, typed);
  });
}
