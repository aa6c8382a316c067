// Encode the rows of a frozen weight.
#include "frozen.h"

namespace {
namespace zeropp {

// [Note: the scale of a frozen INT4 block]: the scale of the trial with the least squared error.
inline BFloat16 search_scale(const float* values, int64_t n, float amax) {
  alignas(64) int32_t fixed[kMaxBlock];
  for (int64_t i = 0; i < n; ++i) fixed[i] = to_fixed(values[i], amax);
  double best = -1;
  int64_t best_xq = 0, best_qq = 1;
  for (int t = 0; t < kNumTrials; ++t) {
    int32_t xq = 0, qq = 0;  // at most 4096 * 2^18: they fit
    for (int64_t i = 0; i < n; ++i) {
      const int32_t code = trial_code(fixed[i], t);
      xq += fixed[i] * code;
      qq += code * code;
    }
    const double score = static_cast<double>(xq) * static_cast<double>(xq) / static_cast<double>(qq);
    if (score > best) best = score, best_xq = xq, best_qq = qq;
  }
  return frozen_scale(best_xq, best_qq, amax);
}

inline BFloat16 pack_block(const float* values, int64_t n, int64_t bits, int8_t* codes) {
  const uint32_t amax = block_amax(values, n);
  const BFloat16 bound = encode_scale(amax, qmax_of(bits));  // also finds NaN, Inf, and blocks too small to have codes
  if (bits == 8 || !has_codes(bound)) {
    encode_block(values, n, bound, codes);
    return bound;
  }
  const BFloat16 stored = search_scale(values, n, float_of(amax));
  const float scale = to_float(stored);
  if (!has_codes(stored)) memset(codes, 0, n);
  else for (int64_t i = 0; i < n; ++i) codes[i] = encode4(values[i], scale);
  return stored;
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
