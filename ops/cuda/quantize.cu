// Encode slices for the wire.
//
// This file shows the form that all operators of the wire have. Two kernels compute the same bits: the one on rows for
// blocks of 32, 64 .. 1024 elements and aligned wires, and the one on elements for all others. The exported function
// picks one.
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

template <class In>
__global__ void __launch_bounds__(kThreads, 6)
quantize_rows(Tiling tiling, int64_t num_slices, const In* input, Layout layout, int64_t slice_rows,
              uint8_t* wire) {
  __shared__ Staging staging[kWarps];
  const int log2_block = 31 - __clz(tiling.block);
  for_my_tile(layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    const Part& part = layout.parts[tile.part];
    uint8_t* slot = wire + permuted(slice, num_slices, slice_rows) * layout.nbytes;
    float values[kPerLane];
    load_rows<kVector<In>>(input + slice * layout.numel + part.element + tile.first, tile.numel, values);
    encode_tile<kVector<In>>(values, {slot, part, tile, log2_block}, layout.raw_dtype, staging[threadIdx.x / kLanes]);
  });
}

__global__ void __launch_bounds__(kThreads)
quantize_elements(Tiling tiling, int64_t num_slices, const void* input, int64_t dtype, Layout layout,
                  int64_t slice_rows, uint8_t* wire) {
  for_my_tile(layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    const Part& part = layout.parts[tile.part];
    const int64_t first = slice * layout.numel + part.element;
    const auto value_of = [&](int64_t index) { return load_element(input, dtype, first + index); };
    uint8_t* slot = wire + permuted(slice, num_slices, slice_rows) * layout.nbytes;
    encode_elements(value_of, tile, part, layout, slot);
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(quantize)(const void* input, int64_t input_dtype, const ZeroppLayout* layout, int64_t slice_rows,
                        int64_t num_slices, uint8_t* out, void* stream) {
  using namespace zeropp;
  const Tiling tiling = tiling_of(*layout);
  if (!has_row_blocks(*layout, out)) {
    return launch_tiles(quantize_elements, tiling, num_slices, stream, input, input_dtype, *layout, slice_rows, out);
  }
  return for_dtype(input_dtype, [&](auto type) {
    using In = decltype(type);
    const In* typed = static_cast<const In*>(input);
    return launch_tiles(quantize_rows<In>, tiling, num_slices, stream, typed, *layout, slice_rows, out);
  });
}
