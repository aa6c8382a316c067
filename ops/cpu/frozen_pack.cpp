// Encode the rows of a frozen weight.
#include "frozen.h"

#include <limits>

namespace {
namespace zeropp {

// One type of element per loop: [Note: three instruction sets] in loops.h.

inline void to_fine(const float* __restrict values, int64_t n, float scale, int16_t* __restrict fine) {
  for (int64_t i = 0; i < n; ++i) fine[i] = to_fine(values[i], scale);
}

// sums[i] = step(0) + the steps (k + 1) of all bounds k that fine[i] is above.
template <class Step>
void add_steps(const int16_t* __restrict fine, int64_t n, const Step& step, int16_t* __restrict sums) {
  for (int64_t i = 0; i < n; ++i) {
    int16_t sum = static_cast<int16_t>(step(0));
#pragma GCC unroll 16
    for (int k = 0; k + 1 < kNumLevels; ++k) {
      const int16_t added = static_cast<int16_t>(step(k + 1));
      sum = static_cast<int16_t>(sum + (fine[i] > level_bound(k) ? added : 0));
    }
    sums[i] = sum;
  }
}

// The squared error of the nearest levels, in steps of 1 / kFine.
inline int64_t sum_errors(const int16_t* __restrict fine, int64_t n, int16_t* __restrict levels) {
  add_steps(fine, n, [](int k) { return (ordered_level(k) - (k ? ordered_level(k - 1) : 0)) * kFine; }, levels);
  int32_t sum = 0;  // at most 2048 * 2^18: no element is 2^9 steps from its level
  for (int64_t i = 0; i < n; ++i) {
    const int32_t error = fine[i] - levels[i];
    sum += error * error;
  }
  return sum;
}

inline void encode_levels(const int16_t* __restrict fine, int64_t n, int16_t* __restrict wide, int8_t* __restrict codes) {
  add_steps(fine, n, [](int k) { return k ? 1 : -kZeroRank; }, wide);
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(wide[i]);
}

// The float that a search chose.
struct Chosen {
  int bits;
  float scale;
};

// Chooses among the nearest small float and its neighbours: the scale is its value times `unit`. Writes the codes.
inline Chosen search_scale(const float* values, int64_t n, int nearest, int low, int high, int exponent, float unit,
                           int8_t* codes) {
  alignas(64) int16_t fine[kMaxBlock / 2];
  alignas(64) int16_t levels[kMaxBlock / 2];
  Chosen best = {};
  double least = std::numeric_limits<double>::infinity();
  for (int t = 0; t < kNumTrials; ++t) {
    const int tried = clamp(nearest + trial(t), low, high);
    const float scale = small_float_value(tried, exponent) * unit;
    to_fine(values, n, scale, fine);
    const double error = squared_error(sum_errors(fine, n, levels), scale);
    if (error < least) least = error, best = {tried, scale};
  }
  to_fine(values, n, best.scale, fine);
  encode_levels(fine, n, levels, codes);
  return best;
}

// The columns of a block that take one of its scales, side by side. Zeros follow up to a whole vector of the longest kind, 32
// integers of 16 bits. They are their own nearest level, so they add no error, and loops need no tail.
struct Runs {
  static constexpr int64_t kVector = 32;
  alignas(64) float values[kMaxBlock / 2];
  alignas(64) int8_t codes[kMaxBlock / 2];
  int64_t n = 0;

  void take(const float* block, int64_t size, int parity) {
    for (int64_t i = parity * kRun; i < size; i += 2 * kRun) {
      const int64_t count = min(size - i, kRun);
      memcpy(values + n, block + i, count * sizeof(float));
      n += count;
    }
    const int64_t end = ceil_div(n, kVector) * kVector;
    memset(values + n, 0, (end - n) * sizeof(float));
    n = end;
  }

  void put_back(int8_t* block, int64_t size, int parity) const {
    const int8_t* from = codes;
    for (int64_t i = parity * kRun; i < size; i += 2 * kRun) {
      const int64_t count = min(size - i, kRun);
      memcpy(block + i, from, count);
      from += count;
    }
  }
};

inline BFloat16 pack_levels(const float* values, int64_t n, int8_t* codes) {
  Runs first, second;
  first.take(values, n, 0);
  second.take(values, n, 1);
  const uint32_t first_amax = block_amax(first.values, first.n), second_amax = block_amax(second.values, second.n);
  const int nearest = nearest_first(first_amax, second_amax);
  if (max(first_amax, second_amax) >= kInfBits || nearest > kFirstMax || nearest < kFirstMin) {
    memset(codes, 0, n);
    return {static_cast<uint16_t>(max(first_amax, second_amax) < kInfBits && nearest < kFirstMin ? 0 : kScalesNaN)};
  }
  const Chosen one = search_scale(first.values, first.n, nearest, kFirstMin, kFirstMax, kFirstExponent, 1, first.codes);
  const Chosen other = search_scale(second.values, second.n, nearest_ratio(second_amax, one.scale), 0, kRatioMax,
                                    kRatioExponent, one.scale, second.codes);
  first.put_back(codes, n, 0);
  second.put_back(codes, n, 1);
  return {static_cast<uint16_t>(one.bits << 6 | other.bits)};
}

inline BFloat16 pack_block(const float* values, int64_t n, int64_t bits, int8_t* codes) {
  if (bits == 4) return pack_levels(values, n, codes);
  const BFloat16 scale = encode_scale(block_amax(values, n), 8);
  encode_block(values, n, scale, 8, codes);
  return scale;
}

// One row: In is float, BFloat16 or Float16.
template <class In>
void pack_row(const In* in, const FrozenRows& shape, uint8_t* codes, uint8_t* scales) {
  alignas(64) float values[kMaxBlock];
  alignas(64) int8_t block_codes[kMaxBlock];
  for (int64_t b = 0; b < shape.num_blocks(); ++b) {
    const int64_t n = shape.block_size(b);
    convert(in + b * shape.block, n, values);
    write_unaligned(scales + b * sizeof(BFloat16), pack_block(values, n, shape.bits, block_codes));
    uint8_t* out = codes + b * shape.block * shape.bits / 8;
    if (shape.bits == 4) pack_nibbles(block_codes, n, out);
    else memcpy(out, block_codes, n);
  }
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_pack)(const void* weight, int64_t weight_dtype, int64_t bits, int64_t block, int64_t rows,
                           int64_t columns, uint8_t* codes, uint8_t* scales, void*) {
  using namespace zeropp;
  const FrozenRows shape{rows, columns, block, bits};
  return for_each_row(shape, [&](int64_t row) {
    const auto pack = [&](const auto* typed) {
      uint8_t* row_scales = scales + row * shape.num_blocks() * sizeof(BFloat16);
      pack_row(typed + row * columns, shape, codes + row * shape.code_bytes(), row_scales);
    };
    if (weight_dtype == kFloat32) pack(static_cast<const float*>(weight));
    else if (weight_dtype == kBFloat16) pack(static_cast<const BFloat16*>(weight));
    else pack(static_cast<const Float16*>(weight));
  });
}
