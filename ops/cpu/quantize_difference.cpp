// Encode how slices differ from what a base holds of them.
#include "../abi.h"
#include "tile.h"

ZEROPP_KERNEL(quantize_difference)(const void* input, int64_t dtype, const uint8_t* base,
                                   const zeropp::Layout* base_layout, const zeropp::Layout* layout, int64_t num_slices,
                                   uint8_t* wire, void*) {
  using namespace zeropp;
  const int64_t size = item_size(dtype);
  // Tiles hold whole blocks of what is encoded; of the base any run will do.
  return for_each_tile(*layout, num_slices, num_slices * layout->nbytes, [&](const Tile& tile, Worker& worker) {
    const char* from = static_cast<const char*>(input) + (tile.slice * layout->numel + tile.element()) * size;
    uint8_t* slot = wire + tile.slice * layout->nbytes;
    if (tile.part->bits == 0) return worker.encode(from, dtype, tile, *layout, slot);
    alignas(64) float difference[kMaxTileNumel];
    Worker::read(from, dtype, tile.numel, difference);
    const uint8_t* base_slot = base + tile.slice * base_layout->nbytes;
    worker.decode<Subtract>(base_slot, tile.moved(*layout, *base_layout), *base_layout, difference);
    worker.encode(difference, kFloat32, tile, *layout, slot);
  });
}
