// Decode slices from the wire.
#include "tile.h"

ZEROPP_KERNEL(dequantize)(const uint8_t* wire, const ZeroppLayout* layout, int64_t dtype, int64_t slice_rows,
                          int64_t num_slices, void* out, void*) {
  using namespace zeropp;
  const int64_t size = item_size(dtype);
  return for_each_tile(*layout, num_slices, num_slices * layout->numel * size, [&](const Tile& tile, Worker& worker) {
    const uint8_t* from = wire + tile.slice * layout->nbytes;
    const int64_t slice = permuted(tile.slice, num_slices, slice_rows);
    void* to = static_cast<char*>(out) + (slice * layout->numel + tile.element()) * size;
    if (dtype == kBFloat16) {
      alignas(64) BFloat16 values[kMaxTileNumel];
      worker.decode<Set>(from, tile, *layout, values);
      worker.write(to, values, tile.numel * size);
    } else {
      alignas(64) float values[kMaxTileNumel];
      worker.decode<Set>(from, tile, *layout, values);
      worker.store(values, tile.numel, dtype, to);
    }
  });
}
