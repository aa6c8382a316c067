// Decode differences, add them to the values of a base, and encode the sums as the base is encoded. `out` may be the
// base.
#include "tile.h"

ZEROPP_KERNEL(dequantize_update)(const uint8_t* wire, const ZeroppLayout* layout, const uint8_t* base,
                                 const ZeroppLayout* base_layout, int64_t num_slices, uint8_t* out, void*) {
  using namespace zeropp;
  const int64_t base_bytes = base_layout->nbytes;
  const int64_t new_bytes = out == base ? 0 : num_slices * base_bytes;  // in place, the lines are in the caches already
  // Tiles hold whole blocks of the base, since a scale is taken of a whole block. Decoding the differences takes any
  // run of elements. In place, a tile is decoded before it is encoded, and no other tile reads its blocks.
  return for_each_tile(*base_layout, num_slices, new_bytes, [&](const Tile& tile, Worker& worker) {
    const Tile change = tile.moved(*base_layout, *layout);
    const uint8_t* from = wire + tile.slice * layout->nbytes;
    alignas(64) float updated[kMaxTileNumel];
    if (change.part->bits == 0) {
      worker.decode<Set>(from, change, *layout, updated);
    } else {
      worker.decode<Set>(base + tile.slice * base_bytes, tile, *base_layout, updated);
      worker.decode<Add>(from, change, *layout, updated);
    }
    worker.encode(updated, kFloat32, tile, *base_layout, out + tile.slice * base_bytes);
  });
}
