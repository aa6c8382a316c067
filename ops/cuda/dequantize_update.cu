// Add the differences in a wire to the values of a base, and encode the sums as the base is encoded. Raw parts of the
// wire replace those of the base. The base may also be the output: a warp reads all of its tile before it writes any of
// it.
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

constexpr int kUpdateVector = 8;  // elements per access: 16 bytes of a 16-bit base

// Six blocks on a multiprocessor leave 80 registers to a thread. From compute capability 10.0 on ptxas needs more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kUpdateBlocks = 5;
#else
constexpr int kUpdateBlocks = 6;
#endif

__global__ void __launch_bounds__(kThreads, kUpdateBlocks)
dequantize_update_rows(Tiling tiling, int64_t num_slices, Wires<const uint8_t> wire, Wires<const uint8_t> base,
                       Wires<uint8_t> output) {
  __shared__ Staging staging[kWarps];
  for_my_tile(output.layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    Staging& mine = staging[threadIdx.x / kLanes];
    float values[kPerLane];
    clear(values);
    if (wire.part(tile).bits) {
      add_tile<kUpdateVector>(base.memory(tile, slice), base.layout.raw_dtype, mine, values);
    }
    add_tile<kUpdateVector>(wire.memory(tile, slice), wire.layout.raw_dtype, mine, values);
    encode_tile<kUpdateVector>(values, output.memory(tile, slice), output.layout.raw_dtype, mine);
  });
}

__global__ void __launch_bounds__(kThreads)
dequantize_update_elements(Tiling tiling, int64_t num_slices, Wires<const uint8_t> wire, Wires<const uint8_t> base,
                           Wires<uint8_t> output) {
  for_my_tile(output.layout, tiling, num_slices, [&](const Tile& tile, int64_t slice) {
    const Part& part = wire.part(tile);
    const auto value_of = [&](int64_t index) {
      const float change = decode_element(wire.slice(slice), part, wire.layout, index);
      if (part.bits == 0) return change;
      return decode_element(base.slice(slice), base.part(tile), base.layout, index) + change;
    };
    encode_elements(value_of, tile, output.part(tile), output.layout, output.slice(slice));
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(dequantize_update)(const uint8_t* wire, const ZeroppLayout* layout, const uint8_t* base,
                                 const ZeroppLayout* base_layout, int64_t num_slices, uint8_t* out, void* stream) {
  using namespace zeropp;
  const bool rows = has_row_blocks(*layout, wire) && has_row_blocks(*base_layout, base) && is_aligned(out);
  const auto kernel = rows ? dequantize_update_rows : dequantize_update_elements;
  return launch_tiles(kernel, tiling_of(*base_layout), num_slices, stream, wires_of(wire, *layout),
                      wires_of(base, *base_layout), wires_of(out, *base_layout));
}
