// A few rows of activations times a frozen weight: generation reads codes and never makes a dense weight.
#include "../abi.h"
#include "frozen.h"

namespace {
namespace zeropp {

constexpr int64_t kLanes = 32;  // divides every block

// lanes[l] += scale * (x[l] w[l] + x[l + 32] w[l + 32] + ...). The order of the additions is part of the definition, and no
// instruction set has another: all give the same bits.
inline void add_block(const float* __restrict x, const float* __restrict weights, int64_t n, float scale,
                      float* __restrict lanes) {
  float sums[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) sums[l] += x[i + l] * weights[i + l];
  }
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] += sums[l] * scale;
}

// The sum of the lanes: halves are folded onto each other.
inline float fold(float* lanes) {
  for (int64_t half = kLanes / 2; half; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace zeropp
}  // namespace

// x: fp32 [num_inputs <= 4, num_blocks, block], the columns and zeros behind them. output: fp32 [num_inputs, rows].
ZEROPP_KERNEL(frozen_matmul)(const float* x, int64_t num_inputs, const uint8_t* codes, const zeropp::BFloat16* scales,
                             int64_t rows, int64_t columns, int64_t block, int64_t bits, float* output, void*) {
  using namespace zeropp;
  const FrozenRows shape{rows, columns, block, bits};
  const int64_t stride = shape.num_blocks() * block;
  return for_each_row(shape, [&](int64_t row) {
    alignas(64) int8_t unpacked[kMaxBlock];
    alignas(64) float weights[kMaxBlock];
    alignas(64) float lanes[kMaxInputs][kLanes] = {};
    for (int64_t b = 0; b < shape.num_blocks(); ++b) {
      const int64_t n = shape.block_size(b), padded = ceil_div(n, kLanes) * kLanes;
      const int8_t* block_codes = load_codes(codes + row * shape.code_bytes(), shape, b, unpacked);
      for (int64_t i = 0; i < n; ++i) weights[i] = block_codes[i];
      for (int64_t i = n; i < padded; ++i) weights[i] = 0;
      const float scale = to_float(scales[row * shape.num_blocks() + b]);
      for (int64_t m = 0; m < num_inputs; ++m) add_block(x + m * stride + b * block, weights, padded, scale, lanes[m]);
    }
    for (int64_t m = 0; m < num_inputs; ++m) output[m * rows + row] = fold(lanes[m]);
  });
}
