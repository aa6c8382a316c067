// The quantization format: one definition, for C++ and CUDA.
//
// Part and Layout mirror `Part` and `WireLayout` of hf_zeropp/format.py, which decides where everything lies. The
// scalar functions below are the mathematics; kernels inline them in their loops, and hf_zeropp/reference.py states
// them in PyTorch. All agree bit for bit, which asks of every compiler: no contraction to fused multiply-add, no
// fast-math.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ZEROPP_HD __host__ __device__ __forceinline__
#else
#define ZEROPP_HD inline
#endif

// A library built for several instruction sets compiles this header once for each. Internal linkage keeps the linker
// from merging the copies into one, which could then run AVX-512 code on a machine that has none.
namespace {
namespace zeropp {

enum DType : int64_t { kFloat32, kBFloat16, kFloat16 };  // positions in format.FLOAT_DTYPES
enum Status : int {  // native.py words them
  kOk,
  kParallelFailed,
  kCudaError = 1000,  // and above: 1000 + cudaError_t, which zeropp_error_text of the CUDA library words
};

constexpr int64_t kMaxBlock = 4096;
constexpr uint32_t kInfBits = 0x7F800000;
constexpr uint16_t kBFloat16NaN = 0x7FC0;
constexpr uint16_t kFloat16NaN = 0x7E00;
constexpr uint16_t kScaleNaN = kBFloat16NaN;     // the scale of a block that holds a NaN or an Inf
constexpr uint16_t kScaleMin = (127 - 100) << 7;  // 2^-100: smaller scales are stored as zero

// Where one segment lies in a slice. Byte offsets count from the start of the slice's wire.
struct Part {
  int64_t element;      // first element, in the slice
  int64_t numel;
  int64_t bits;         // of a code: 8, 4, 3, 2; 0 for raw
  int64_t scales;       // byte offset of the scales
  int64_t codes;        // byte offset of the codes or raw bytes
  int64_t end;          // byte offset behind the padding
  int64_t first_block;  // index of its first block, in the slice
};

struct Layout {
  const Part* parts;
  int64_t num_parts;
  int64_t numel;      // elements of one slice
  int64_t nbytes;     // wire bytes of one slice
  int64_t block;      // elements that share one scale
  int64_t raw_dtype;  // DType of raw segments
};

ZEROPP_HD constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
ZEROPP_HD int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
ZEROPP_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ZEROPP_HD int64_t item_size(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Of K = R * C slices, slice r * C + c moves to c * R + r.
ZEROPP_HD int64_t permuted(int64_t slice, int64_t num_slices, int64_t slice_rows) {
  const int64_t columns = num_slices / slice_rows;
  return slice % columns * slice_rows + slice / columns;
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

// ---- 16-bit floats: to nearest even, NaNs canonical, by integer arithmetic, which flush-to-zero modes cannot touch.

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

// For all but NaNs other than the canonical one.
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
  // Added to 0.5, whose last place is worth 2^-24, a float rounds to a multiple of the smallest half.
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t finite = magnitude < 0x38800000 ? denormal : normal;
  const uint32_t rounded = sign | (magnitude >= 0x477FF000 ? 0x7C00 : finite);  // from 65520 on: Inf
  to.bits = static_cast<uint16_t>(magnitude > kInfBits ? kFloat16NaN : rounded);
}

// ---- Blocks.

ZEROPP_HD constexpr int qmax_of(int64_t bits) { return (1 << (bits - 1)) - 1; }

// What |value| contributes to a block's amax. As integers, magnitudes are ordered as floats are, Inf and NaN above all;
// those of bf16 are the upper halves of fp32's.
ZEROPP_HD int32_t magnitude(float value) { return static_cast<int32_t>(bits_of(value) & 0x7FFFFFFF); }
ZEROPP_HD int16_t magnitude(BFloat16 value) { return static_cast<int16_t>(value.bits & 0x7FFF); }

ZEROPP_HD uint32_t amax_bits(int32_t amax) { return static_cast<uint32_t>(amax); }
ZEROPP_HD uint32_t amax_bits(int16_t amax) { return static_cast<uint32_t>(amax) << 16; }

// The bf16 scale of a block: amax / qmax, rounded up, so that its largest element is never clipped.
ZEROPP_HD BFloat16 encode_scale(uint32_t amax, int qmax) {
  const uint32_t up = (bits_of(float_of(amax) / static_cast<float>(qmax)) + 0xFFFF) >> 16;
  return {static_cast<uint16_t>(amax >= kInfBits ? kScaleNaN : up < kScaleMin ? 0 : up)};
}

// Do a block's elements have codes? Under the scales 0 and NaN all of them are 0.
ZEROPP_HD bool has_codes(BFloat16 scale) { return scale.bits != 0 && scale.bits != kScaleNaN; }

// Added to a small float, rounds it half to even and leaves the integer in the low bits, in two's complement.
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

// rint(value / scale), for a scale that has codes. The quotient exceeds qmax by no more than a rounding error, since
// the scale was rounded up from amax / qmax, and so rounds to qmax: the definition's clamp has nothing left to do.
ZEROPP_HD int8_t encode(float value, float scale) {
  return static_cast<int8_t>(bits_of(value / scale + kRoundToInteger));
}

// [Note: quotients of bf16] Of bf16 values a multiplication finds the same code. With integers X, S of 8 bits, value / scale
// is 2^c X / S, c >= -2 where the code is not plainly 0: a half-integer, or at least 2^-3 / 255 > 2^-11 away from one. The
// product with the reciprocal is off by less than 2^-16. Added to kSnap, it is rounded to a multiple of 2^-12: half-integers
// become exact again, and nothing else gets to one or past it.
constexpr float kSnap = 3072.0f;  // 1.5 * 2^11

ZEROPP_HD int8_t encode(BFloat16 value, float reciprocal) {
  const float snapped = to_float(value) * reciprocal + kSnap;
  return static_cast<int8_t>(bits_of(snapped + (kRoundToInteger - kSnap)));
}

// What `encode` takes beside values of this type.
ZEROPP_HD float divisor_for(float, float scale) { return scale; }
ZEROPP_HD float divisor_for(BFloat16, float scale) { return 1.0f / scale; }

// ---- Rotations: a slice of so many elements times the Hadamard matrix, by sums and differences of elements 1, 2, 4, 8 and 16
// apart, in this order; then times this, which makes the matrix its own inverse.
constexpr int kRotationSlice = 32;
constexpr float kRotationNorm = 0.17677669529663687f;  // 1 / sqrt(32)

ZEROPP_HD float decode(int8_t code, float scale) { return static_cast<float>(code) * scale; }

}  // namespace zeropp
}  // namespace
