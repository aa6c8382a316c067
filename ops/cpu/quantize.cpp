// Encode slices for the wire.
#include "tile.h"

ZEROPP_KERNEL(quantize)(const void* input, int64_t input_dtype, const ZeroppLayout* layout, int64_t slice_rows,
                        int64_t num_slices, uint8_t* out, void*) {
  using namespace zeropp;
  const int64_t size = item_size(input_dtype);
  return for_each_tile(*layout, num_slices, num_slices * layout->nbytes, [&](const Tile& tile, Worker& worker) {
    const char* from = static_cast<const char*>(input) + (tile.slice * layout->numel + tile.element()) * size;
    uint8_t* slot = out + permuted(tile.slice, num_slices, slice_rows) * layout->nbytes;
    worker.encode(from, input_dtype, tile, *layout, slot);
  });
}
