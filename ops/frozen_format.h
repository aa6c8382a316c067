// The storage format of frozen weights: one definition, for C++ and CUDA. hf_zeropp/ops/frozen_reference.py states it
// in PyTorch, bit for bit.
//
// A row of a weight is cut into blocks. Each block has 16 bits for scales, and codes of 8 or 4 bits. INT8 codes and scales
// are those of the wire (format.h). INT4 codes stand for one of 16 levels, and a block has two scales: runs of 16 columns
// take the first and the second in turn. An element decodes to level * scale.
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

// ---- INT4. frozen_reference.py has the reasons: [Note: the levels of 4 bits] and [Note: the scales of 4 bits].

constexpr int kRun = 16;   // columns that take the same scale
constexpr int kFine = 16;  // steps from one level to the next integer
constexpr int kNumLevels = 16;

// The level of code 0, 1 .. 15. (A macro, since device code cannot see arrays of the host.)
#define ZEROPP_LEVELS 0, 10, 20, 31, 43, 56, 72, 93, 127, -127, -89, -67, -50, -36, -23, -11

// The rank of level 0 among all levels. Its code is 0, and the code of rank k is k - kZeroRank in two's complement.
constexpr int kZeroRank = 7;

// The level of rank `k`, from the lowest to the highest.
ZEROPP_HD constexpr int ordered_level(int k) {
  constexpr int kLevels[kNumLevels] = {ZEROPP_LEVELS};
  return kLevels[(k + kNumLevels - kZeroRank) % kNumLevels];
}

constexpr int kMaxLevel = 127;

ZEROPP_HD int frozen_level_of(int code) {
  constexpr int8_t kLevels[kNumLevels] = {ZEROPP_LEVELS};
  return kLevels[code & 0x0F];
}

// Elements above it are nearer to level k + 1 than to level k, in steps of 1 / kFine. One that is on it takes the lower level.
ZEROPP_HD constexpr int level_bound(int k) { return (ordered_level(k) + ordered_level(k + 1)) * kFine / 2; }

// Both scales of a block, for the runs of 16 columns in turn. (With INT8 they are equal.)
struct RunScales {
  float at[2];
};

constexpr int kFirstExponent = 79;   // biased exponent of a first scale whose exponent bits are 0
constexpr int kRatioExponent = 125;  // and of a ratio
constexpr int kFirstMin = 16, kFirstMax = 1007, kRatioMax = 63;
constexpr int kSafeRatio = 3;
constexpr uint16_t kScalesNaN = 0xFFFF;

// fp32 -> the nearest float of 4 bits of mantissa, in the bits above them its exponent, which counts from `exponent` on.
ZEROPP_HD int small_float(float value, int exponent) {
  return static_cast<int>((bits_of(value) + (1u << 18)) >> 19) - (exponent << 4);
}

ZEROPP_HD float small_float_value(int bits, int exponent) {
  return float_of(static_cast<uint32_t>(bits + (exponent << 4)) << 19);
}

ZEROPP_HD RunScales run_scales_of(uint16_t stored) {
  const int field = stored >> 6;
  const uint32_t exact = static_cast<uint32_t>(field + (kFirstExponent << 4)) << 19;
  const float first = float_of(field > kFirstMax ? uint32_t{kBFloat16NaN} << 16 : field < kFirstMin ? 0 : exact);
  return {{first, first * small_float_value(stored & kRatioMax, kRatioExponent)}};
}

// The scales of a block of `bits`, from the 16 bits that store them.
ZEROPP_HD RunScales run_scales(BFloat16 stored, int64_t bits) {
  if (bits == 4) return run_scales_of(stored.bits);
  return {{to_float(stored), to_float(stored)}};
}

// rint(value), for magnitudes under 2^22.
ZEROPP_HD float round_even(float value) { return (value + kRoundToInteger) - kRoundToInteger; }

// value / scale in steps of 1 / kFine. A scale is at most 1.5 of 16 steps under the largest magnitude's, so this is 127 * 16 and a
// tenth of it at most: 16 bits hold it.
ZEROPP_HD int16_t to_fine(float value, float scale) {
  return static_cast<int16_t>(round_even(value / scale * static_cast<float>(kFine)));
}

// The search for a scale: `trial` says which of the steps from the nearest small float is taken.
constexpr int kNumTrials = 3;
ZEROPP_HD constexpr int trial(int t) { return t == 0 ? 0 : t == 1 ? -1 : 1; }

ZEROPP_HD int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

// The small float with which the search for a block's first scale begins. `first_amax` is the largest magnitude of the runs
// that take the first scale, `second_amax` that of the other runs. A block whose result is under kFirstMin stores scales of
// 0, and one whose result is over kFirstMax stores NaN: neither has codes.
ZEROPP_HD int nearest_first(uint32_t first_amax, uint32_t second_amax) {
  const float first = float_of(first_amax) / static_cast<float>(kMaxLevel);
  const float second = float_of(second_amax) / static_cast<float>(kMaxLevel) / static_cast<float>(kSafeRatio);
  return small_float(first < second ? second : first, kFirstExponent);
}

ZEROPP_HD int nearest_ratio(uint32_t second_amax, float first_scale) {
  const float aim = float_of(second_amax) / static_cast<float>(kMaxLevel);
  return clamp(small_float(aim / first_scale, kRatioExponent), 0, kRatioMax);
}

// The squared error of a scale, from its sum over elements in steps of 1 / kFine. Exact in fp64.
ZEROPP_HD double squared_error(int64_t sum, float scale) {
  return static_cast<double>(sum) * (static_cast<double>(scale) * static_cast<double>(scale));
}

}  // namespace zeropp
}  // namespace
