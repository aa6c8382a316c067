// Encode the difference between slices and the values of a base.
#include "tile.h"

ZEROPP_KERNEL(quantize_difference)(const void* input, int64_t input_dtype, const uint8_t* base,
                                   const ZeroppLayout* base_layout, const ZeroppLayout* layout, int64_t num_slices,
                                   uint8_t* out, void*) {
  using namespace zeropp;
  const int64_t size = item_size(input_dtype);
  // Tiles hold whole blocks of the output, since a scale is taken of a whole block. Decoding the base takes any run of
  // elements.
  return for_each_tile(*layout, num_slices, num_slices * layout->nbytes, [&](const Tile& tile, Worker& worker) {
    const char* from = static_cast<const char*>(input) + (tile.slice * layout->numel + tile.element()) * size;
    uint8_t* slot = out + tile.slice * layout->nbytes;
    if (tile.part->bits == 0) return worker.encode(from, input_dtype, tile, *layout, slot);
    alignas(64) float difference[kMaxTileNumel];
    const uint8_t* base_slot = base + tile.slice * base_layout->nbytes;
    worker.decode<Set>(base_slot, tile.moved(*layout, *base_layout), *base_layout, difference);
    const float* values = worker.load(from, input_dtype, tile.numel);
    for (int64_t i = 0; i < tile.numel; ++i) difference[i] = values[i] - difference[i];
    worker.encode(difference, kFloat32, tile, *layout, slot, from);
  });
}
