// The storage format of frozen weights: one definition, for C++ and CUDA. hf_zeropp/ops/frozen_reference.py states it
// in PyTorch, bit for bit.
//
// A row of a weight is cut into blocks. Each block has a bf16 scale and codes of 8 or 4 bits, and decodes to code *
// scale as on the wire (format.h). INT8 scales are those of the wire. INT4 scales are searched for: see below.
#pragma once

#include "format.h"

namespace {
namespace zeropp {

constexpr int64_t kMaxInputs = 32;    // rows of x that frozen_matmul takes
constexpr int64_t kMatmulLanes = 32;  // partial sums of frozen_matmul; divides every block

// Rows of a weight: codes [rows, code_bytes], scales [rows, num_blocks]. Blocks lie along the row; `block` is a
// multiple of 32.
struct FrozenRows {
  int64_t rows;
  int64_t columns;
  int64_t block;
  int64_t bits;

  ZEROPP_HD int64_t code_bytes() const { return ceil_div(columns * bits, 8); }
  ZEROPP_HD int64_t num_blocks() const { return ceil_div(columns, block); }
  ZEROPP_HD int64_t block_size(int64_t b) const { return min(columns - b * block, block); }
};

// All 16 codes are used. Scales have either sign, so the largest magnitude may get the code -8 whatever its own sign
// is.
constexpr int kFrozenMin4 = -8, kFrozenMax4 = 7;

// [Note: the scale of a frozen INT4 block] is in hf_zeropp/ops/frozen_reference.py. In short: 14 trials put the block's
// largest magnitude at +-6.5 .. 10 of the codes, round all elements to codes q, and fit the scale sum(x q) / sum(q q)
// to them. The trial with the largest sum(x q)^2 / sum(q q) has the least squared error. The sums are over x in fixed
// point: sums of integers are exact in any order of addition, so every instruction set finds the same scale.
constexpr int kNumTrials = 14;
constexpr int32_t kFixedOne = 32768;  // the block's largest magnitude

// The code at which trial t puts the largest magnitude, over kFixedOne. (A function, since device code cannot see
// arrays of the host.)
ZEROPP_HD constexpr float trial(int t) {
  constexpr float kLandings[kNumTrials / 2] = {6.5f, 7.0f, 7.5f, 8.0f, 8.5f, 9.0f, 10.0f};
  return (t < kNumTrials / 2 ? kLandings[t] : -kLandings[t - kNumTrials / 2]) / kFixedOne;
}

ZEROPP_HD float clamp4(float code) {
  const float low = code < kFrozenMin4 ? static_cast<float>(kFrozenMin4) : code;
  return low > kFrozenMax4 ? static_cast<float>(kFrozenMax4) : low;
}

// rint(value), for magnitudes under 2^22.
ZEROPP_HD float round_even(float value) { return (value + kRoundToInteger) - kRoundToInteger; }

// value / amax in fixed point. The division and the product round as they do in PyTorch.
ZEROPP_HD int32_t to_fixed(float value, float amax) {
  return static_cast<int32_t>(round_even(value / amax * static_cast<float>(kFixedOne)));
}

ZEROPP_HD int32_t trial_code(int32_t fixed, int t) {
  return static_cast<int32_t>(clamp4(round_even(static_cast<float>(fixed) * trial(t))));
}

// The scale sum(x q) / sum(q q), of either sign. Below 2^-100 in magnitude it is stored as zero, as on the wire.
ZEROPP_HD BFloat16 frozen_scale(int64_t xq, int64_t qq, float amax) {
  const double scale = static_cast<double>(xq) / static_cast<double>(qq) * (static_cast<double>(amax) / kFixedOne);
  const uint16_t bits = round_to_bfloat16(static_cast<float>(scale));
  return {static_cast<uint16_t>((bits & 0x7FFF) < kScaleMin ? 0 : bits)};
}

ZEROPP_HD int8_t encode4(float value, float scale) { return static_cast<int8_t>(round_even(clamp4(value / scale))); }

}  // namespace zeropp
}  // namespace
