// Decode slices that several ranks sent, and add them up: out = (initial + sum of sources) * scale.
#include "sum.h"

ZEROPP_KERNEL(dequantize_sum)(const uint8_t* wire, const ZeroppLayout* layout, int64_t num_sources,
                              const float* initial, float scale, int64_t dtype, int64_t num_slices, void* out,
                              void*) {
  using namespace zeropp;
  const Sources sources{wire, *layout, initial, num_sources, num_slices};
  const int64_t size = item_size(dtype);
  return for_each_tile(*layout, num_slices, num_slices * layout->numel * size, [&](const Tile& tile, Worker& worker) {
    alignas(64) float sum[kMaxTileNumel];
    sources.sum(tile, worker, sum);
    for (int64_t i = 0; scale != 1.0f && i < tile.numel; ++i) sum[i] *= scale;
    void* to = static_cast<char*>(out) + (tile.slice * layout->numel + tile.element()) * size;
    worker.store(sum, tile.numel, dtype, to);
  });
}
