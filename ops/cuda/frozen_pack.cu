// Encode the rows of a frozen weight. Each warp takes one block. A weight is packed once, so the kernel is kept plain.
#include "../frozen_format.h"
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

// [Note: the scale of a frozen INT4 block]: the scale of the trial with the least squared error. value_of(i) is element
// i of n.
template <class Value>
__device__ BFloat16 search_scale(const Value& value_of, int n, float amax) {
  int xq[kNumTrials] = {}, qq[kNumTrials] = {};
  for (int i = lane_index(); i < n; i += kLanes) {
    const int fixed = to_fixed(value_of(i), amax);
#pragma unroll
    for (int t = 0; t < kNumTrials; ++t) {
      const int code = trial_code(fixed, t);
      xq[t] += fixed * code;
      qq[t] += code * code;
    }
  }
  double best = -1;
  int best_xq = 0, best_qq = 1;
#pragma unroll
  for (int t = 0; t < kNumTrials; ++t) {
    const int sum_xq = __reduce_add_sync(kAllLanes, xq[t]), sum_qq = __reduce_add_sync(kAllLanes, qq[t]);
    const double score = static_cast<double>(sum_xq) * static_cast<double>(sum_xq) / static_cast<double>(sum_qq);
    if (score > best) best = score, best_xq = sum_xq, best_qq = sum_qq;
  }
  return frozen_scale(best_xq, best_qq, amax);
}

// Writes the block's codes and returns its scale.
template <class Value>
__device__ BFloat16 pack_block(const Value& value_of, int n, int bits, uint8_t* codes) {
  const uint32_t amax = warp_amax(value_of, 0, n);
  const BFloat16 bound = encode_scale(amax, qmax_of(bits));  // also finds NaN, Inf, and blocks too small to have codes
  const bool searched = bits == 4 && has_codes(bound);
  const BFloat16 stored = searched ? search_scale(value_of, n, float_of(amax)) : bound;
  const float scale = to_float(stored);
  const auto code_of = [&](int i) -> int {
    if (i >= n || !has_codes(stored)) return 0;
    return bits == 4 ? encode4(value_of(i), scale) : encode(value_of(i), scale);
  };
  const int per_byte = 8 / bits;
  for (int i = lane_index() * per_byte; i < n; i += kLanes * per_byte) {
    const int byte = bits == 8 ? code_of(i) : (code_of(i) & 0x0F) | code_of(i + 1) << 4;
    codes[i / per_byte] = static_cast<uint8_t>(byte);
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
