// The storage format of frozen weights: one definition, for C++ and CUDA; hf_zeropp/frozen_format.py states it in
// PyTorch, bit for bit. A row of a weight is cut into blocks; each has a bf16 scale and codes of 8 or 4 bits, and decodes to
// code * scale as on the wire (format.h). INT8 scales are those of the wire. INT4 scales are searched for: see below.
#pragma once

#include "format.h"

namespace {
namespace zeropp {

constexpr int64_t kMaxInputs = 4;  // of frozen_matmul; frozen_format.MAX_INPUTS

// Rows of a weight: codes [rows, code_bytes], scales [rows, num_blocks], blocks along the row, of a multiple of 32.
struct FrozenRows {
  int64_t rows;
  int64_t columns;
  int64_t block;
  int64_t bits;

  ZEROPP_HD int64_t code_bytes() const { return ceil_div(columns * bits, 8); }
  ZEROPP_HD int64_t num_blocks() const { return ceil_div(columns, block); }
  ZEROPP_HD int64_t block_size(int64_t b) const { return min(columns - b * block, block); }
};

constexpr int kFrozenMin4 = -8, kFrozenMax4 = 7;  // all 16 codes, and scales of either sign: so is either end in reach

// [Note: the scale of a frozen INT4 block] What minimises the squared error: try where the largest magnitude may land
// (at +-6.5 .. 10, beyond 8 it is clipped), round all elements to codes q, and fit the scale sum(x q) / sum(q q) that is the
// best for these codes; the error it leaves is sum(x x) - sum(x q)^2 / sum(q q). Of 14 trials the best wins.
// Sums are over x as 16-bit fixed point of the block's largest magnitude: integers, exact in any order of addition.
constexpr int kNumTrials = 14;
constexpr int32_t kFixedOne = 32768;

// Where trial t puts the largest magnitude, over kFixedOne. (A function: device code cannot see arrays of the host.)
ZEROPP_HD constexpr float trial(int t) {
  constexpr float kLandings[kNumTrials / 2] = {6.5f, 7.0f, 7.5f, 8.0f, 8.5f, 9.0f, 10.0f};
  return (t < kNumTrials / 2 ? kLandings[t] : -kLandings[t - kNumTrials / 2]) / kFixedOne;
}

ZEROPP_HD float clamp4(float code) {
  const float low = code < kFrozenMin4 ? static_cast<float>(kFrozenMin4) : code;
  return low > kFrozenMax4 ? static_cast<float>(kFrozenMax4) : low;
}

// rint(value), for magnitudes under 2^22.
ZEROPP_HD float round_even(float value) { return (value + 12582912.0f) - 12582912.0f; }

// value / amax in fixed point; the two divisions round as they do in PyTorch.
ZEROPP_HD int32_t to_fixed(float value, float amax) {
  return static_cast<int32_t>(round_even(value / amax * static_cast<float>(kFixedOne)));
}

ZEROPP_HD int32_t trial_code(int32_t fixed, int t) {
  return static_cast<int32_t>(clamp4(round_even(static_cast<float>(fixed) * trial(t))));
}

// A scale of either sign; below 2^-100 in magnitude it is stored as zero, as on the wire.
ZEROPP_HD BFloat16 frozen_scale(int64_t xq, int64_t qq, float amax) {
  const double scale = static_cast<double>(xq) / static_cast<double>(qq) * (static_cast<double>(amax) / kFixedOne);
  const uint16_t bits = round_to_bfloat16(static_cast<float>(scale));
  return {static_cast<uint16_t>((bits & 0x7FFF) < kScaleMin ? 0 : bits)};
}

ZEROPP_HD int8_t encode4(float value, float scale) { return static_cast<int8_t>(round_even(clamp4(value / scale))); }

}  // namespace zeropp
}  // namespace
