// Decode slices from the wire.
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

template <class Out>
__global__ void __launch_bounds__(kThreads, 8)
dequantize_rows(Tiling tiling, int64_t num_slices, const uint8_t* wire, Layout layout, int64_t slice_rows,
                Out* output) {
  __shared__ Staging staging[kWarps];
  const int log2_block = 31 - __clz(tiling.block);
  for_my_tile(layout, tiling, num_slices, [&](const Tile& tile, int64_t slot) {
    const Part& part = layout.parts[tile.part];
    const int64_t slice = permuted(slot, num_slices, slice_rows);
    const TileMemory<const uint8_t> from{wire + slot * layout.nbytes, part, tile, log2_block};
    float values[kPerLane];
    clear(values);
    add_tile<kVector<Out>>(from, layout.raw_dtype, staging[threadIdx.x / kLanes], values);
    store_rows<kVector<Out>>(values, tile.numel, output + slice * layout.numel + part.element + tile.first);
  });
}

__global__ void __launch_bounds__(kThreads)
dequantize_elements(Tiling tiling, int64_t num_slices, const uint8_t* wire, Layout layout, int64_t slice_rows,
                    void* output, int64_t dtype) {
  for_my_tile(layout, tiling, num_slices, [&](const Tile& tile, int64_t slot) {
    const Part& part = layout.parts[tile.part];
    const int64_t first = permuted(slot, num_slices, slice_rows) * layout.numel + part.element;
    for (int64_t i = tile.first + lane_index(); i < tile.first + tile.numel; i += kLanes) {
      store_element(output, dtype, first + i, decode_element(wire + slot * layout.nbytes, part, layout, i));
    }
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(dequantize)(const uint8_t* wire, const ZeroppLayout* layout, int64_t dtype, int64_t slice_rows,
                          int64_t num_slices, void* out, void* stream) {
  using namespace zeropp;
  const Tiling tiling = tiling_of(*layout);
  if (!has_row_blocks(*layout, wire)) {
    return launch_tiles(dequantize_elements, tiling, num_slices, stream, wire, *layout, slice_rows, out, dtype);
  }
  return for_dtype(dtype, [&](auto type) {
    using Out = decltype(type);
    Out* typed = static_cast<Out*>(out);
    return launch_tiles(dequantize_rows<Out>, tiling, num_slices, stream, wire, *layout, slice_rows, typed);
  });
}
