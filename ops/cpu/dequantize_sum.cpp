// Decode what several ranks sent, and add it up: output = (initial + sum of sources) * scale.
#include "../abi.h"
#include "rotate.h"
#include "sum.h"

ZEROPP_KERNEL(dequantize_sum)(const uint8_t* wire, const zeropp::Layout* layout, int64_t num_sources, int64_t num_sums,
                              const float* initial, float scale, int64_t rotate, void* output, int64_t dtype, void*) {
  using namespace zeropp;
  const Sources sources{wire, *layout, initial, num_sources, num_sums};
  const int64_t size = item_size(dtype);
  return for_each_tile(*layout, num_sums, num_sums * layout->numel * size, [&](const Tile& tile, Worker& worker) {
    alignas(64) float sum[kMaxTileNumel];
    sources.sum(tile, worker, sum);
    if (rotate && tile.part->bits) rotate_slices(sum, tile.numel);
    for (int64_t i = 0; scale != 1.0f && i < tile.numel; ++i) sum[i] *= scale;
    void* to = static_cast<char*>(output) + (tile.slice * layout->numel + tile.element()) * size;
    worker.store(sum, tile.numel, dtype, to);
  });
}
