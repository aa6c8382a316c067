// Decode slices that several ranks sent, add them up, and encode the sum for the next hop. Every wire is read once, and
// nothing but the new wire is written.
#include "launch.cuh"
#include "sum.cuh"

namespace {
namespace zeropp {

constexpr int kSumVector = 8;  // elements per access: 8 or 4 bytes of codes, the fewest accesses to the staging

__global__ void __launch_bounds__(kThreads, 4)
dequantize_sum_quantize_rows(Tiling tiling, int64_t num_sums, Sources sources, Layout out_layout, uint8_t* out_wire) {
  __shared__ Staging staging[kWarps];
  const int log2_block = 31 - __clz(tiling.block);
  for_my_tile(out_layout, tiling, num_sums, [&](const Tile& tile, uint32_t index) {
    Staging& mine = staging[threadIdx.x / kLanes];
    float values[kPerLane];
    sources.sum_rows<kSumVector>(tile, index, mine, values);
    const Part& part = out_layout.parts[tile.part];
    uint8_t* slot = out_wire + index * out_layout.nbytes;
    encode_tile<kSumVector>(values, {slot, part, tile, log2_block}, out_layout.raw_dtype, mine);
  });
}

__global__ void __launch_bounds__(kThreads)
dequantize_sum_quantize_elements(Tiling tiling, int64_t num_sums, Sources sources, Layout out_layout,
                                 uint8_t* out_wire) {
  for_my_tile(out_layout, tiling, num_sums, [&](const Tile& tile, int64_t index) {
    const Part& part = sources.layout.parts[tile.part];
    const auto value_of = [&](int64_t element) { return sources.sum_element(part, index, element); };
    uint8_t* slot = out_wire + index * out_layout.nbytes;
    encode_elements(value_of, tile, out_layout.parts[tile.part], out_layout, slot);
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(dequantize_sum_quantize)(const uint8_t* wire, const ZeroppLayout* layout, const ZeroppLayout* out_layout,
                                       int64_t num_sources, const float* initial, int64_t num_slices, uint8_t* out,
                                       void* stream) {
  using namespace zeropp;
  const Tiling tiling = tiling_of(*out_layout);
  const Sources sources{wire, *layout, initial, num_sources, num_slices, log2_floor(layout->block)};
  const bool rows = has_row_blocks(*layout, wire) && has_row_blocks(*out_layout, out);
  const auto kernel = rows ? dequantize_sum_quantize_rows : dequantize_sum_quantize_elements;
  return launch_tiles(kernel, tiling, num_slices, stream, sources, *out_layout, out);
}
