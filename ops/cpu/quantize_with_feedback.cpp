// Sum what several ranks sent, add what earlier calls left out, and encode; what this call leaves out becomes the residual.
#include "../abi.h"
#include "rotate.h"
#include "sum.h"

namespace {
namespace zeropp {

// left_out <- left_out * rescale, zero where it is not a number; sum <- sum + left_out.
inline void compensate(float* __restrict left_out, float rescale, int64_t n, float* __restrict sum) {
  for (int64_t i = 0; i < n; ++i) left_out[i] = left_out[i] != left_out[i] ? 0.0f : left_out[i] * rescale;
  for (int64_t i = 0; i < n; ++i) sum[i] += left_out[i];
}

// error <- (1 - decay) left_out + decay error.
inline void mix(const float* __restrict left_out, float decay, int64_t n, float* __restrict error) {
  const float keep = 1.0f - decay;
  for (int64_t i = 0; i < n; ++i) error[i] = left_out[i] * keep + error[i] * decay;
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(quantize_with_feedback)(const uint8_t* wire, const zeropp::Layout* layout, int64_t num_sources,
                                      int64_t num_sums, const float* initial, int64_t rotate,
                                      const zeropp::Layout* out_layout, const zeropp::Layout* residual_layout,
                                      float decay, float rescale, uint8_t* residual, uint8_t* out, void*) {
  using namespace zeropp;
  const Sources sources{wire, *layout, initial, num_sources, num_sums};
  // Tiles hold whole blocks of the output and of the residual, which are of one size; of the input any run will do.
  return for_each_tile(*out_layout, num_sums, num_sums * out_layout->nbytes, [&](const Tile& tile, Worker& worker) {
    alignas(64) float sum[kMaxTileNumel];
    sources.sum(tile.moved(*out_layout, *layout), worker, sum);
    uint8_t* out_slot = out + tile.slice * out_layout->nbytes;
    if (tile.part->bits == 0) return worker.encode(sum, kFloat32, tile, *out_layout, out_slot);
    if (rotate) rotate_slices(sum, tile.numel);

    const Tile residual_tile = tile.moved(*out_layout, *residual_layout);
    uint8_t* residual_slot = residual + tile.slice * residual_layout->nbytes;
    alignas(64) float left_out[kMaxTileNumel];
    worker.decode<Set>(residual_slot, residual_tile, *residual_layout, left_out);
    compensate(left_out, rescale, tile.numel, sum);

    worker.encode(sum, kFloat32, tile, *out_layout, out_slot);
    worker.subtract_encoded(tile, *out_layout, sum);
    if (decay != 1.0f) mix(left_out, decay, tile.numel, sum);
    worker.encode(sum, kFloat32, residual_tile, *residual_layout, residual_slot);
  });
}
