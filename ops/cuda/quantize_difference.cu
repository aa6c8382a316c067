// Encode the difference between slices and the values of a base. Raw parts carry the values themselves.
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

template <class In>
__global__ void __launch_bounds__(kThreads, 5)
quantize_difference_rows(Tiling tiling, int64_t num_slices, const In* input, Wires<const uint8_t> base,
                         Wires<uint8_t> wire) {
  constexpr int V = kVector<In>;
  __shared__ Staging staging[kWarps];
  for_my_tile(wire.layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    Staging& mine = staging[threadIdx.x / kLanes];
    const Part& part = wire.part(tile);
    const In* from = input + slice * wire.layout.numel + part.element + tile.first;
    float values[kPerLane];
    if (part.bits) {
      clear(values);
      add_tile<V>(base.memory(tile, slice), base.layout.raw_dtype, mine, values);
      combine_rows<V>(from, tile.numel, values, [](float old, float now) { return now - old; });
    } else {
      load_rows<V>(from, tile.numel, values);
    }
    encode_tile<V>(values, wire.memory(tile, slice), wire.layout.raw_dtype, mine);
  });
}

__global__ void __launch_bounds__(kThreads)
quantize_difference_elements(Tiling tiling, int64_t num_slices, const void* input, int64_t dtype,
                             Wires<const uint8_t> base, Wires<uint8_t> wire) {
  for_my_tile(wire.layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    const Part& part = wire.part(tile);
    const int64_t first = slice * wire.layout.numel + part.element;
    const auto change_of = [&](int64_t index) {
      const float value = load_element(input, dtype, first + index);
      return part.bits ? value - decode_element(base.slice(slice), base.part(tile), base.layout, index) : value;
    };
    encode_elements(change_of, tile, part, wire.layout, wire.slice(slice));
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(quantize_difference)(const void* input, int64_t input_dtype, const uint8_t* base,
                                   const ZeroppLayout* base_layout, const ZeroppLayout* layout, int64_t num_slices,
                                   uint8_t* out, void* stream) {
  using namespace zeropp;
  const Tiling tiling = tiling_of(*layout);
  const auto from = wires_of(base, *base_layout);
  const auto to = wires_of(out, *layout);
  if (!has_row_blocks(*base_layout, base) || !has_row_blocks(*layout, out)) {
    return launch_tiles(quantize_difference_elements, tiling, num_slices, stream, input, input_dtype, from, to);
  }
  return for_dtype(input_dtype, [&](auto type) {
    using In = decltype(type);
    const In* typed = static_cast<const In*>(input);
    return launch_tiles(quantize_difference_rows<In>, tiling, num_slices, stream, typed, from, to);
  });
}
