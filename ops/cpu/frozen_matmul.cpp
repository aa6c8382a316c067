// Multiply a few rows of activations by a frozen weight. Generation reads codes this way and never makes a dense
// weight.
#include "frozen.h"

namespace {
namespace zeropp {

// lanes[l] += scale * (x[l] w[l] + x[l + 32] w[l + 32] + ...). The order of the additions is part of the operator's
// definition, so all instruction sets keep it and give the same bits.
inline void add_block(const float* __restrict x, const float* __restrict weights, int64_t n, float scale,
                      float* __restrict lanes) {
  float sums[kMatmulLanes] = {};
  for (int64_t i = 0; i < n; i += kMatmulLanes) {
    for (int64_t l = 0; l < kMatmulLanes; ++l) sums[l] += x[i + l] * weights[i + l];
  }
  for (int64_t l = 0; l < kMatmulLanes; ++l) lanes[l] += sums[l] * scale;
}

// The sum of the lanes: the upper half is added to the lower half until one lane is left.
inline float fold(float* lanes) {
  for (int64_t half = kMatmulLanes / 2; half; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_matmul)(const float* x, const uint8_t* codes, const uint8_t* scales, int64_t columns, int64_t bits,
                             int64_t block, int64_t num_inputs, int64_t rows, float* out, void*) {
  using namespace zeropp;
  const FrozenRows shape{rows, columns, block, bits};
  const int64_t stride = shape.num_blocks() * block;
  return for_each_row(shape, [&](int64_t row) {
    alignas(64) int8_t unpacked[kMaxBlock];
    alignas(64) float weights[kMaxBlock];
    alignas(64) float lanes[kMaxInputs][kMatmulLanes] = {};
    for (int64_t b = 0; b < shape.num_blocks(); ++b) {
      const int64_t n = shape.block_size(b), padded = ceil_div(n, kMatmulLanes) * kMatmulLanes;
      const int8_t* block_codes = load_codes(codes + row * shape.code_bytes(), shape, b, unpacked);
      for (int64_t i = 0; i < n; ++i) weights[i] = block_codes[i];
      for (int64_t i = n; i < padded; ++i) weights[i] = 0;
      const float scale = to_float(load_scale(scales, row * shape.num_blocks() + b));
      for (int64_t m = 0; m < num_inputs; ++m) add_block(x + m * stride + b * block, weights, padded, scale, lanes[m]);
    }
    for (int64_t m = 0; m < num_inputs; ++m) out[m * rows + row] = fold(lanes[m]);
  });
}
