// Blocks of a tile in registers -> scales and codes in memory, and back, for blocks of 32, 64 .. 1024 elements.
//
// Rows of values and 16-byte vectors of codes are spread differently over the lanes of a warp, so codes change lanes in
// shared memory. Lane b also leaves the scale of block b there, for all lanes to read.
#pragma once

#include "pack.cuh"

namespace {
namespace zeropp {

// [Note: division by reciprocal] Let b be a block's step and r = 1 / b, correctly rounded. Then
//
//     q = a r,   e = a - q b,   q' = q + e r,       the last two by one fused multiply-add each,
//
// is a / b correctly rounded (Markstein's theorem; e is exact). These are three instructions in place of the ten of a
// division. The theorem has two exceptions. It fails if b's significand is all ones: a bf16 scale has only 8 bits, so
// it never is. It also fails if something underflows:
//
// - Steps are at least 2^-101, so e underflows only if |a / b| < 2^-9, and then both quotients round to the code 0.
// - Steps above 2^126, which codes of 2 bits have, make r a denormal that is off by up to 2^-22. Then q' is off
//   by 2^-44 before it is rounded, and a / b with the 8 bits of b is never that near to where roundings change.
struct Divisor {
  float step;
  float reciprocal;  // 0: a block without codes

  __device__ float quotient(float value) const {
    const float estimate = value * reciprocal;
    return __fmaf_rn(__fmaf_rn(-estimate, step, value), reciprocal, estimate);
  }
};

// encode_scale of format.h, with the division by a constant made a product in the same way. Here the theorem fails where
// something underflows, but then amax is far below 2^-100, and the scale is zero either way. (On a CPU, every one of the
// 2^31 magnitudes was found to have the same scale in every width, Inf and NaN included.)
template <int kBits>
__device__ __forceinline__ BFloat16 encode_scale_of(uint32_t amax) {
  constexpr int kMax = largest_level_of(kBits);
  return round_scale(amax, Divisor{kMax, 1.0f / kMax}.quotient(float_of(amax)));
}

// A quotient -> the code, in the low bits of a float. The root of an integer is never near to where its rounding changes, so an
// approximate one will do.
template <int kBits>
__device__ __forceinline__ uint32_t round_quotient(float quotient) {
  const float rounded = quotient + kRoundToInteger;
  if constexpr (!has_roots(kBits)) return bits_of(rounded);
  const float steps = rounded - kRoundToInteger;
  return bits_of(copysignf(approximate_root(0.5f * fabsf(steps)), steps) + kRoundToInteger);
}

// Shared memory of one warp.
struct alignas(16) Staging {
  uint8_t codes[kTileNumel];
  uint32_t amax[kLanes];
  Divisor divisors[kLanes];
};

// The memory of a tile's blocks. Pointers are to the tile's own scales and codes; codes are 16-byte aligned.
template <class Byte>
struct BlockMemory {
  Byte* scales;
  Byte* codes;
  int numel;
  int log2_block;

  __device__ int num_blocks() const { return (numel + (1 << log2_block) - 1) >> log2_block; }
};

// ---- Encode.

// Leaves the amax of every block in staging.amax. A block of fewer elements than a row spans some lanes of one row. A
// larger block spans whole rows, which are then combined within each lane.
template <int V>
__device__ __forceinline__ void stage_amax(const float (&values)[kPerLane], int log2_block, Staging& staging) {
  constexpr int kRows = kPerLane / V;
  uint32_t amax[kRows] = {};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) amax[i / V] = ::max(amax[i / V], static_cast<uint32_t>(magnitude(values[i])));
  const int block = 1 << log2_block, lanes = ::min(block / V, kLanes), rows = block / (V * kLanes);
  for (int step = 1; step < lanes; step *= 2) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) amax[j] = ::max(amax[j], __shfl_xor_sync(kAllLanes, amax[j], step));
  }
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (step < rows && (j & step) == 0) amax[j] = amax[j + step] = ::max(amax[j], amax[j + step]);
    }
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    if ((lane_index() & (lanes - 1)) == 0) staging.amax[element_of<V>(j) >> log2_block] = amax[j];
  }
}

// A lane's V values of one row -> their codes, at their place among the tile's.
template <int kBits, int V>
__device__ __forceinline__ void stage_codes(const float* values, const Divisor& divisor, uint8_t* codes, int element) {
  uint32_t rounded[V];
#pragma unroll
  for (int i = 0; i < V; ++i) rounded[i] = round_quotient<kBits>(divisor.quotient(values[i]));
  const int mask = divisor.reciprocal != 0.0f ? -1 : 0;  // for words of any size
  if constexpr (kBits == 8) {
    Words<V / 4> words;
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      words.at[i / 4] = mask & pack_bytes(rounded[i], rounded[i + 1], rounded[i + 2], rounded[i + 3]);
    }
    *reinterpret_cast<Words<V / 4>*>(codes + element) = words;
  } else {
    put_fields<kBits, V>(mask & pack_fields<kBits, V>(rounded), codes, element);
  }
}

// values -> scales and codes in memory. `num_scales` scales are written, padding (zeros) included. Codes are written 16
// bytes at a time: those behind the last element are 0, so the padding fills the last 16 bytes.
template <int kBits, int V>
__device__ __forceinline__ void encode_blocks(const float (&values)[kPerLane], const BlockMemory<uint8_t>& to,
                                              int num_scales, Staging& staging) {
  const int lane = lane_index();
  stage_amax<V>(values, to.log2_block, staging);
  __syncwarp();
  const BFloat16 stored = encode_scale_of<kBits>(lane < to.num_blocks() ? staging.amax[lane] : 0);
  if (lane < num_scales) reinterpret_cast<BFloat16*>(to.scales)[lane] = stored;
  const float step = step_of(stored, kBits);
  staging.divisors[lane] = {step, has_codes(stored) ? 1.0f / step : 0.0f};
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPerLane / V; ++j) {
    const int element = element_of<V>(j);
    const Divisor divisor = staging.divisors[element >> to.log2_block];
    stage_codes<kBits, V>(values + j * V, divisor, staging.codes, element);
  }
  __syncwarp();
#pragma unroll
  for (int at = 16 * lane; at < kTileNumel * kBits / 8; at += 16 * kLanes) {
    if (8 * at >= to.numel * kBits) break;
    *reinterpret_cast<Words<4>*>(to.codes + at) = *reinterpret_cast<const Words<4>*>(staging.codes + at);
  }
  __syncwarp();  // the staging is free again
}

// ---- Decode. Fetching and adding are two steps, so that the codes of several sources can be on their way at once.

template <int kBits>
constexpr int kFetches = (kBits + 3) / 4;  // of 16 bytes, per lane; other widths than 8 and 4 leave some lanes idle

template <int kBits>
struct FetchedBlocks {
  Words<4> codes[kFetches<kBits>];
  BFloat16 scale;  // lane b holds the scale of block b
};

template <int kBits>
__device__ __forceinline__ FetchedBlocks<kBits> fetch_blocks(const BlockMemory<const uint8_t>& from) {
  const int lane = lane_index();
  FetchedBlocks<kBits> fetched = {};
#pragma unroll
  for (int i = 0; i < kFetches<kBits>; ++i) {
    const int at = 16 * (i * kLanes + lane);
    if (8 * at < from.numel * kBits) fetched.codes[i] = *reinterpret_cast<const Words<4>*>(from.codes + at);
  }
  if (lane < from.num_blocks()) fetched.scale = reinterpret_cast<const BFloat16*>(from.scales)[lane];
  return fetched;
}

// values += the decoded blocks. With kFused no product may overflow: [Note: fused sums].
template <int kBits, int V, bool kFused = false>
__device__ __forceinline__ void add_blocks(const FetchedBlocks<kBits>& fetched, int log2_block, Staging& staging,
                                           float (&values)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kFetches<kBits>; ++i) {
    reinterpret_cast<Words<4>*>(staging.codes)[i * kLanes + lane_index()] = fetched.codes[i];
  }
  const float scale = to_float(fetched.scale);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPerLane / V; ++j) {
    const int element = element_of<V>(j);
    const float scale_of_block = __shfl_sync(kAllLanes, scale, element >> log2_block);
    add_codes<kBits, V, kFused>(staging.codes, element, scale_of_block, values + j * V);
  }
  __syncwarp();
}

}  // namespace zeropp
}  // namespace
