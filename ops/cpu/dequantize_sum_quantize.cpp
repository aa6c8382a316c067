// Decode slices that several ranks sent, add them up, and encode the sum for the next hop.
#include "sum.h"

ZEROPP_KERNEL(dequantize_sum_quantize)(const uint8_t* wire, const ZeroppLayout* layout, const ZeroppLayout* out_layout,
                                       int64_t num_sources, const float* initial, int64_t num_slices, uint8_t* out,
                                       void*) {
  using namespace zeropp;
  const Sources sources{wire, *layout, initial, num_sources, num_slices};
  // Tiles hold whole blocks of the output, since a scale is taken of a whole block. Decoding takes any run of elements.
  return for_each_tile(*out_layout, num_slices, num_slices * out_layout->nbytes, [&](const Tile& tile, Worker& worker) {
    alignas(64) float buffer[kMaxTileNumel];
    sources.sum(tile.moved(*out_layout, *layout), worker, buffer);
    worker.encode(buffer, kFloat32, tile, *out_layout, out + tile.slice * out_layout->nbytes);
  });
}
