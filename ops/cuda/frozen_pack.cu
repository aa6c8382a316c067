// Encode the rows of a frozen weight. Each warp takes one block. A weight is packed once, so the kernel is kept plain.
#include "../frozen_format.h"
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

// Element i of those that take one scale of a block is the block's element `run_element(i, parity)`.
__device__ __forceinline__ int run_element(int i, int parity) { return (i / kRun * 2 + parity) * kRun + i % kRun; }

// How many they are, of a block of n.
__device__ __forceinline__ int run_numel(int n, int parity) {
  const int whole = n / (2 * kRun) * kRun;
  return whole + clamp(n % (2 * kRun) - parity * kRun, 0, kRun);
}

// The rank of the nearest level, from the lowest to the highest.
__device__ __forceinline__ int level_rank(int fine) {
  int rank = 0;
#pragma unroll
  for (int k = 0; k + 1 < kNumLevels; ++k) rank += fine > level_bound(k);
  return rank;
}

struct Chosen {
  int bits;
  float scale;
};

// [Note: the scales of 4 bits]: the small float with the least squared error, of the nearest and its neighbours. The scale is
// its value times `unit`. value_of(i) is element i of n.
template <class Value>
__device__ Chosen search_scale(const Value& value_of, int n, int nearest, int low, int high, int exponent, float unit) {
  Chosen best = {};
  double least = INFINITY;
  for (int t = 0; t < kNumTrials; ++t) {
    const int tried = clamp(nearest + trial(t), low, high);
    const float scale = small_float_value(tried, exponent) * unit;
    int sum = 0;  // at most 2048 * 2^18: no element is 2^9 steps from its level
    for (int i = lane_index(); i < n; i += kLanes) {
      const int fine = to_fine(value_of(i), scale);
      const int error = fine - frozen_level_of(level_rank(fine) - kZeroRank) * kFine;
      sum += error * error;
    }
    const double error = squared_error(__reduce_add_sync(kAllLanes, sum), scale);
    if (error < least) least = error, best = {tried, scale};
  }
  return best;
}

// Writes the block's codes in INT4 and returns its scales.
template <class Value>
__device__ BFloat16 pack_levels(const Value& value_of, int n, uint8_t* codes) {
  const auto first_of = [&](int64_t i) { return value_of(run_element(static_cast<int>(i), 0)); };
  const auto second_of = [&](int64_t i) { return value_of(run_element(static_cast<int>(i), 1)); };
  const int first_n = run_numel(n, 0), second_n = run_numel(n, 1);
  const uint32_t first_amax = warp_amax(first_of, 0, first_n), second_amax = warp_amax(second_of, 0, second_n);
  const bool is_finite = ::max(first_amax, second_amax) < kInfBits;
  const int nearest = is_finite ? nearest_first(first_amax, second_amax) : kFirstMax + 1;
  const bool has_codes = nearest >= kFirstMin && nearest <= kFirstMax;
  Chosen first = {}, second = {};
  if (has_codes) {
    first = search_scale(first_of, first_n, nearest, kFirstMin, kFirstMax, kFirstExponent, 1.0f);
    const int ratio = nearest_ratio(second_amax, first.scale);
    second = search_scale(second_of, second_n, ratio, 0, kRatioMax, kRatioExponent, first.scale);
  }
  const auto code_of = [&](int i) -> int {
    if (i >= n || !has_codes) return 0;
    return level_rank(to_fine(value_of(i), i / kRun % 2 ? second.scale : first.scale)) - kZeroRank;
  };
  for (int i = 2 * lane_index(); i < n; i += 2 * kLanes) {
    codes[i / 2] = static_cast<uint8_t>((code_of(i) & 0x0F) | code_of(i + 1) << 4);
  }
  if (!has_codes) return {static_cast<uint16_t>(nearest < kFirstMin ? 0 : kScalesNaN)};
  return {static_cast<uint16_t>(first.bits << 6 | second.bits)};
}

// Writes the block's codes and returns its scale, or both.
template <class Value>
__device__ BFloat16 pack_block(const Value& value_of, int n, int bits, uint8_t* codes) {
  if (bits == 4) return pack_levels(value_of, n, codes);
  const BFloat16 stored = encode_scale(warp_amax(value_of, 0, n), 8);
  const float scale = to_float(stored);
  for (int i = lane_index(); i < n; i += kLanes) {
    codes[i] = static_cast<uint8_t>(has_codes(stored) ? encode(value_of(i), scale) : 0);
  }
  return stored;
}

__global__ void __launch_bounds__(kThreads)
pack_blocks(const void* weight, int64_t dtype, FrozenRows shape, uint8_t* codes, uint8_t* scales) {
  const int64_t num_blocks = shape.num_blocks();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (index >= shape.rows * num_blocks) return;
  const int64_t row = index / num_blocks, b = index % num_blocks;
  const int64_t first = row * shape.columns + b * shape.block;
  const auto value_of = [&](int64_t i) { return load_element(weight, dtype, first + i); };
  uint8_t* block_codes = codes + row * shape.code_bytes() + b * shape.block * shape.bits / 8;
  const int n = static_cast<int>(shape.block_size(b)), bits = static_cast<int>(shape.bits);
  const BFloat16 scale = pack_block(value_of, n, bits, block_codes);
  if (lane_index() == 0) write_unaligned(scales + index * sizeof(BFloat16), scale);
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_pack)(const void* weight, int64_t weight_dtype, int64_t bits, int64_t block, int64_t rows,
                           int64_t columns, uint8_t* codes, uint8_t* scales, void* stream) {
  using namespace zeropp;
  const FrozenRows shape{rows, columns, block, bits};
  const dim3 grid(static_cast<unsigned>(ceil_div(rows * shape.num_blocks(), kWarps)));
  return launch(pack_blocks, grid, kThreads, stream, weight, weight_dtype, shape, codes, scales);
}
