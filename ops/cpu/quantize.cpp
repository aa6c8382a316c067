// Encode slices for the wire.
#include "../abi.h"
#include "rotate.h"
#include "tile.h"

ZEROPP_KERNEL(quantize)(const void* input, int64_t dtype, const zeropp::Layout* layout, int64_t num_slices,
                        int64_t slice_rows, int64_t rotate, uint8_t* wire, void*) {
  using namespace zeropp;
  const int64_t size = item_size(dtype);
  return for_each_tile(*layout, num_slices, num_slices * layout->nbytes, [&](const Tile& tile, Worker& worker) {
    const char* from = static_cast<const char*>(input) + (tile.slice * layout->numel + tile.element()) * size;
    uint8_t* slot = wire + permuted(tile.slice, num_slices, slice_rows) * layout->nbytes;
    if (!rotate || tile.part->bits == 0) return worker.encode(from, dtype, tile, *layout, slot);
    alignas(64) float rotated[kMaxTileNumel];
    Worker::read(from, dtype, tile.numel, rotated);
    rotate_slices(rotated, tile.numel);
    worker.encode(rotated, kFloat32, tile, *layout, slot);
  });
}
