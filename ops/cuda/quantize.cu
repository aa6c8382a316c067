// Encode slices for the wire.
#include "elements.cuh"
#include "launch.cuh"
#include "rotate.cuh"

namespace {
namespace zeropp {

template <class In>
__global__ void __launch_bounds__(kThreads, 6)
quantize_rows(Tiling tiling, int64_t num_slices, const In* input, Layout layout, int64_t slice_rows, bool rotate,
              uint8_t* wire) {
  __shared__ Staging staging[kWarps];
  const int log2_block = 31 - __clz(tiling.block);
  for_my_tile(layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    const Part& part = layout.parts[tile.part];
    uint8_t* slot = wire + permuted(slice, num_slices, slice_rows) * layout.nbytes;
    float values[kPerLane];
    load_rows<kVector<In>>(input + slice * layout.numel + part.element + tile.first, tile.numel, values);
    if (rotate && part.bits) rotate_rows<kVector<In>>(tile.numel, values);
    encode_tile<kVector<In>>(values, {slot, part, tile, log2_block}, layout.raw_dtype, staging[threadIdx.x / kLanes]);
  });
}

__global__ void __launch_bounds__(kThreads)
quantize_elements(Tiling tiling, int64_t num_slices, const void* input, int64_t dtype, Layout layout,
                  int64_t slice_rows, bool rotate, uint8_t* wire) {
  for_my_tile(layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    const Part& part = layout.parts[tile.part];
    const int64_t first = slice * layout.numel + part.element;
    const auto value_of = [&](int64_t index) { return load_element(input, dtype, first + index); };
    uint8_t* slot = wire + permuted(slice, num_slices, slice_rows) * layout.nbytes;
    const auto rotated_of = [&](int64_t index) { return rotated_element(value_of, part, index); };
    if (rotate) encode_elements(rotated_of, tile, part, layout, slot);
    else encode_elements(value_of, tile, part, layout, slot);
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(quantize)(const void* input, int64_t dtype, const zeropp::Layout* layout, int64_t num_slices,
                        int64_t slice_rows, int64_t rotate, uint8_t* wire, void* stream) {
  using namespace zeropp;
  const Tiling tiling = tiling_of(*layout);
  if (!has_row_blocks(*layout, wire)) {
    return launch_tiles(quantize_elements, tiling, num_slices, stream, input, dtype, *layout, slice_rows, rotate,
                        wire);
  }
  return for_dtype(dtype, [&](auto type) {
    using In = decltype(type);
    const In* typed = static_cast<const In*>(input);
    return launch_tiles(quantize_rows<In>, tiling, num_slices, stream, typed, *layout, slice_rows, rotate, wire);
  });
}
