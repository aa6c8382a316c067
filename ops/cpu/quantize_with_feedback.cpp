// Add up slices that several ranks sent, add the residual of earlier calls, and encode. The error becomes the new
// residual.
#include "rotate.h"
#include "sum.h"

namespace {
namespace zeropp {

// residual <- residual * rescale, or zero where it is not a number; values <- sum + residual.
inline void compensate(const float* __restrict sum, float rescale, int64_t n, float* __restrict residual,
                       float* __restrict values) {
  for (int64_t i = 0; i < n; ++i) {
    residual[i] = residual[i] != residual[i] ? 0.0f : residual[i] * rescale;
    values[i] = sum[i] + residual[i];
  }
}

// error <- (1 - decay) residual + decay error.
inline void mix(const float* __restrict residual, float decay, int64_t n, float* __restrict error) {
  const float keep = 1.0f - decay;
  for (int64_t i = 0; i < n; ++i) error[i] = residual[i] * keep + error[i] * decay;
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(quantize_with_feedback)(const uint8_t* wire, const ZeroppLayout* layout, const ZeroppLayout* out_layout,
                                      const ZeroppLayout* residual_layout, int64_t num_sources, const float* initial,
                                      int64_t rotate, float decay, float rescale, uint8_t* residual, int64_t num_slices,
                                      uint8_t* out, void*) {
  using namespace zeropp;
  const Sources sources{wire, *layout, initial, num_sources, num_slices};
  // Tiles hold whole blocks of the output and of the residual, which are of one size. Decoding the wire takes any run
  // of elements.
  return for_each_tile(*out_layout, num_slices, num_slices * out_layout->nbytes, [&](const Tile& tile, Worker& worker) {
    alignas(64) float buffer[kMaxTileNumel];
    const float* sum = sources.sum(tile.moved(*out_layout, *layout), worker, buffer);
    uint8_t* out_slot = out + tile.slice * out_layout->nbytes;
    if (tile.part->bits == 0) return worker.encode(sum, kFloat32, tile, *out_layout, out_slot);
    if (rotate) {
      rotate_slices(sum, tile.numel, buffer);
      sum = buffer;
    }

    const Tile residual_tile = tile.moved(*out_layout, *residual_layout);
    uint8_t* residual_slot = residual + tile.slice * residual_layout->nbytes;
    alignas(64) float before[kMaxTileNumel], values[kMaxTileNumel];
    worker.decode<Set>(residual_slot, residual_tile, *residual_layout, before);
    compensate(sum, rescale, tile.numel, before, values);

    worker.encode(values, kFloat32, tile, *out_layout, out_slot, sources.start(tile));
    worker.subtract_encoded(tile, *out_layout, values);  // now the error
    if (decay != 1.0f) mix(before, decay, tile.numel, values);
    worker.encode(values, kFloat32, residual_tile, *residual_layout, residual_slot);
  });
}
