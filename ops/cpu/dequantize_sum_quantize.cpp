// Decode what several ranks sent, add it up, and encode the sum for the next hop.
#include "../abi.h"
#include "sum.h"

ZEROPP_KERNEL(dequantize_sum_quantize)(const uint8_t* wire, const zeropp::Layout* layout, int64_t num_sources,
                                       int64_t num_sums, const float* initial, const zeropp::Layout* out_layout,
                                       uint8_t* out_wire, void*) {
  using namespace zeropp;
  const Sources sources{wire, *layout, initial, num_sources, num_sums};
  // Tiles hold whole blocks of the output, whose scales need them; of the input any run will do.
  return for_each_tile(*out_layout, num_sums, num_sums * out_layout->nbytes, [&](const Tile& tile, Worker& worker) {
    alignas(64) float sum[kMaxTileNumel];
    sources.sum(tile.moved(*out_layout, *layout), worker, sum);
    worker.encode(sum, kFloat32, tile, *out_layout, out_wire + tile.slice * out_layout->nbytes);
  });
}
