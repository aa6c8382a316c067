// The quantization format: one definition, for C++ and CUDA.
//
// The scalar functions below are the mathematics, and kernels inline them in their loops. hf_zeropp/ops/blocks.py
// states them in PyTorch. All agree bit for bit: [Note: bitwise agreement] there says why, and what it takes of every
// compiler (no contraction to fused multiply-add, no fast-math). hf_zeropp/ops/format.py decides where everything lies
// in memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "abi.h"

#if defined(__CUDACC__)
#define ZEROPP_HD __host__ __device__ __forceinline__
#else
#define ZEROPP_HD inline
#endif

// A library built for several instruction sets compiles this header once for each. Internal linkage keeps the linker
// from merging the copies into one, which could then run AVX-512 code on a machine that has none.
namespace {
namespace zeropp {

using Part = ZeroppPart;
using Layout = ZeroppLayout;

// ---- Constants. tests/ops/test_abi.py compares them with those of hf_zeropp/ops.

constexpr int64_t kMaxBlock = 4096;
constexpr int64_t kCodesAtAByte = 8;  // runs of this many codes fill whole bytes in every width
constexpr uint32_t kInfBits = 0x7F800000;
constexpr uint16_t kBFloat16NaN = 0x7FC0;
constexpr uint16_t kFloat16NaN = 0x7E00;
constexpr uint16_t kScaleNaN = 0x7FC0;            // the scale of a block that holds a NaN or an Inf
constexpr uint16_t kScaleMin = (127 - 100) << 7;  // 2^-100: smaller scales are stored as zero
constexpr uint16_t kScaleMax = 0x7F7F;            // where rounding up would give Inf

// ---- Integers.

ZEROPP_HD constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
ZEROPP_HD int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
ZEROPP_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ZEROPP_HD int64_t item_size(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// The place of a slice after the permutation: of K = R * C slices, slice r * C + c moves to c * R + r.
template <class Integer>
ZEROPP_HD Integer permuted_index(Integer slice, Integer num_slices, Integer slice_rows) {
  const Integer columns = num_slices / slice_rows, row = slice / columns;
  return (slice - row * columns) * slice_rows + row;
}

ZEROPP_HD int64_t permuted(int64_t slice, int64_t num_slices, int64_t slice_rows) {
  // Every warp passes here, and GPUs divide numbers of 64 bits by some 70 instructions. Usually nothing is permuted, and
  // there are no more slices than ranks.
  if (slice_rows == 1 || slice_rows == num_slices) return slice;
  if (num_slices > 0xFFFFFFFF) return permuted_index<int64_t>(slice, num_slices, slice_rows);
  return permuted_index<uint32_t>(static_cast<uint32_t>(slice), static_cast<uint32_t>(num_slices),
                                  static_cast<uint32_t>(slice_rows));
}

ZEROPP_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZEROPP_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- Memory at any address: a wire, and the words and floats in it, may begin anywhere.

template <class T>
ZEROPP_HD T read_unaligned(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
ZEROPP_HD void write_unaligned(uint8_t* to, T value) {
  memcpy(to, &value, sizeof value);
}

// ---- 16-bit floats. Conversions round to nearest even and make NaNs canonical. They use integer arithmetic, which the
// flush-to-zero modes of processors cannot touch.

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

ZEROPP_HD float to_float(float value) { return value; }

ZEROPP_HD float to_float(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

ZEROPP_HD float to_float(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7FFF;
  const uint32_t rebias = magnitude < 0x7C00 ? (127 - 15) << 23 : (255 - 31) << 23;
  const uint32_t normal = (magnitude << 13) + rebias;
  const uint32_t denormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return float_of(sign | (magnitude < 0x0400 ? denormal : normal));
}

ZEROPP_HD void assign(float& to, float value) { to = value; }

// Takes no NaN but the canonical one: the addition below could turn others into an Inf.
ZEROPP_HD uint16_t round_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

ZEROPP_HD void assign(BFloat16& to, float value) {
  to.bits = value != value ? kBFloat16NaN : round_to_bfloat16(value);
}

ZEROPP_HD void assign(Float16& to, float value) {
  const uint32_t magnitude = bits_of(value) & 0x7FFFFFFF;
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const uint32_t rebased = magnitude - ((127 - 15) << 23);
  const uint32_t normal = (rebased + 0xFFF + (rebased >> 13 & 1)) >> 13;
  // The last place of 0.5 is worth 2^-24, the smallest denormal of fp16, so adding to it rounds as fp16 does.
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t finite = magnitude < 0x38800000 ? denormal : normal;
  const uint32_t rounded = sign | (magnitude >= 0x477FF000 ? 0x7C00 : finite);  // from 65520 on: Inf
  to.bits = static_cast<uint16_t>(magnitude > kInfBits ? kFloat16NaN : rounded);
}

// ---- Scales.

ZEROPP_HD constexpr int qmax_of(int64_t bits) { return (1 << (bits - 1)) - 1; }

// Codes of 4 and 3 bits are square roots: [Note: roots] in hf_zeropp/ops/blocks.py. A code c stands for c |c| scales there, and
// for c scales in all other widths: its level.
ZEROPP_HD constexpr bool has_roots(int64_t bits) { return bits == 4 || bits == 3; }
ZEROPP_HD constexpr int level_of(int code, int64_t bits) { return has_roots(bits) ? code * (code < 0 ? -code : code) : code; }
ZEROPP_HD constexpr int largest_level_of(int64_t bits) { return level_of(qmax_of(bits), bits); }

// An element's share in its block's amax. As integers, magnitudes are ordered as floats are, with Inf and NaN above
// all. The magnitudes of bf16 are the upper halves of those of fp32, so 16 bits are enough to compare them.
ZEROPP_HD int32_t magnitude(float value) { return static_cast<int32_t>(bits_of(value) & 0x7FFFFFFF); }
ZEROPP_HD int16_t magnitude(BFloat16 value) { return static_cast<int16_t>(value.bits & 0x7FFF); }

ZEROPP_HD uint32_t amax_bits(int32_t amax) { return static_cast<uint32_t>(amax); }
ZEROPP_HD uint32_t amax_bits(int16_t amax) { return static_cast<uint32_t>(amax) << 16; }

// The bf16 scale of a block: the quotient amax / largest level, rounded up, so that its largest element is never clipped.
ZEROPP_HD BFloat16 round_scale(uint32_t amax, float quotient) {
  const uint32_t up = (bits_of(quotient) + 0xFFFF) >> 16;
  const uint32_t finite = up > kScaleMax ? kScaleMax : up;  // an Inf would make NaNs of all codes 0
  return {static_cast<uint16_t>(amax >= kInfBits ? kScaleNaN : finite < kScaleMin ? 0 : finite)};
}

ZEROPP_HD BFloat16 encode_scale(uint32_t amax, int64_t bits) {
  return round_scale(amax, float_of(amax) / static_cast<float>(largest_level_of(bits)));
}

// Encoding divides each element by this step and rounds the quotient. The step is half a scale where codes are roots, and the
// scale in all other widths.
ZEROPP_HD float step_of(BFloat16 scale, int64_t bits) { return has_roots(bits) ? 0.5f * to_float(scale) : to_float(scale); }

// Do a block's elements have codes? Under the scales 0 and NaN all codes are 0.
ZEROPP_HD bool has_codes(BFloat16 scale) { return scale.bits != 0 && scale.bits != kScaleNaN; }

// ---- Codes.

// Adding this to a small float rounds it half to even and leaves the integer in the low bits, in two's complement.
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

// rint(value / step), for a scale that has codes. The definition clamps the result. No clamp is needed here: the scale was
// rounded up from amax / largest level, so the quotient exceeds that of amax by a rounding error at most, and rounds to it.
ZEROPP_HD int8_t encode(float value, float step) {
  return static_cast<int8_t>(bits_of(value / step + kRoundToInteger));
}

// [Note: quotients of bf16] For bf16 values, multiplying by the reciprocal finds the same code without a division.
//
// The significands of value and step are integers X and S of 8 bits, and value / step is 2^c X / S. It is enough to
// look at c >= -2, since smaller quotients plainly have the code 0. The code changes where the quotient is a
// half-integer, and any other quotient is at least 2^-3 / 255 > 2^-11 away from one. The product with the reciprocal is
// off by less than 2^-16. Adding kSnap rounds it to a multiple of 2^-12: half-integers become exact again, and no other
// quotient reaches or passes one.
constexpr float kSnap = 3072.0f;  // 1.5 * 2^11

ZEROPP_HD int8_t encode(BFloat16 value, float reciprocal) {
  const float snapped = to_float(value) * reciprocal + kSnap;
  return static_cast<int8_t>(bits_of(snapped + (kRoundToInteger - kSnap)));
}

// The second argument of `encode` for values of this type.
ZEROPP_HD float divisor_for(float, float step) { return step; }
ZEROPP_HD float divisor_for(BFloat16, float step) { return 1.0f / step; }

// steps, up to 98 -> sign * rint(sqrt(|steps| / 2)). The root k begins at 2 k^2 - 2 k + 1.
ZEROPP_HD int8_t root_of(int8_t steps) {
  const auto size = static_cast<int8_t>(steps < 0 ? -steps : steps);
  const auto root = static_cast<int8_t>((size > 0) + (size > 4) + (size > 12) + (size > 24) + (size > 40) + (size > 60) +
                                        (size > 84));
  return static_cast<int8_t>(steps < 0 ? -root : root);
}

ZEROPP_HD float decode(int8_t level, float scale) { return static_cast<float>(level) * scale; }

}  // namespace zeropp
}  // namespace
