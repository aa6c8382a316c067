// Blocks of a tile in registers -> scales and codes in memory, and back, for blocks of 32, 64 .. 1024 elements.
//
// Rows of values and 16-byte vectors of codes are spread differently over the lanes, so codes change lanes in shared
// memory. There lane b also leaves what all need to know of block b.
#pragma once

#include "rows.cuh"

namespace {
namespace zeropp {

// [Note: division by reciprocal] Let b be a block's scale and r = 1 / b, correctly rounded. Then
//
//     q = a r,   e = a - q b,   q' = q + e r,       the last two by one fused multiply-add each,
//
// is a / b correctly rounded (Markstein's theorem; e is exact), three instructions to the ten of a division, unless
// something underflows or b's significand is all ones. Scales are bf16, never all ones, from 2^-100 to 2^126: r is normal,
// and e underflows only where |a / b| < 2^-10, which both quotients round to the code 0.
struct Divisor {
  float scale;
  float reciprocal;  // 0: a block without codes

  __device__ float quotient(float value) const {
    const float estimate = value * reciprocal;
    return __fmaf_rn(__fmaf_rn(-estimate, scale, value), reciprocal, estimate);
  }
};

struct alignas(16) Staging {  // a warp's
  uint8_t codes[kTileNumel];
  uint32_t amax[kLanes];
  Divisor divisors[kLanes];
};

// Where a tile's blocks lie. Pointers are to what belongs to the tile; codes are 16-byte aligned.
template <class Byte>
struct BlockMemory {
  Byte* scales;
  Byte* codes;
  int numel;
  int log2_block;

  __device__ int num_blocks() const { return (numel + (1 << log2_block) - 1) >> log2_block; }
};

// ---- Encode.

// Leaves the amax of every block in staging.amax.
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
    if (lane_index() % lanes == 0) staging.amax[element_of<V>(j) >> log2_block] = amax[j];
  }
}

__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// A lane's V values of one row -> V * kBits bits of codes, at their place.
template <int kBits, int V>
__device__ __forceinline__ void stage_codes(const float* values, const Divisor& divisor, uint8_t* codes) {
  uint32_t bits[8] = {};
#pragma unroll
  for (int i = 0; i < V; ++i) bits[i] = bits_of(divisor.quotient(values[i]) + kRoundToInteger);
  const uint32_t mask = divisor.reciprocal != 0.0f ? 0xFFFFFFFF : 0;
  if constexpr (kBits == 8) {
    Words<V / 4> words;
#pragma unroll
    for (int i = 0; i < V / 4; ++i) words.at[i] = mask & pack_bytes(bits[4 * i], bits[4 * i + 1], bits[4 * i + 2], bits[4 * i + 3]);
    *reinterpret_cast<Words<V / 4>*>(codes) = words;
  } else {
    const uint32_t even = pack_bytes(bits[0], bits[2], bits[4], bits[6]) & 0x0F0F0F0F;
    const uint32_t odd = pack_bytes(bits[1], bits[3], bits[5], bits[7]) & 0x0F0F0F0F;
    const uint32_t word = mask & (even | odd << 4);
    if constexpr (V == 8) *reinterpret_cast<uint32_t*>(codes) = word;
    else *reinterpret_cast<uint16_t*>(codes) = static_cast<uint16_t>(word);
  }
}

// `num_scales`: scales to write, padding (zeros) included. The padding of codes fills their last 16 bytes.
template <int kBits, int V>
__device__ __forceinline__ void encode_blocks(const float (&values)[kPerLane], const BlockMemory<uint8_t>& to,
                                              int num_scales, Staging& staging) {
  const int lane = lane_index();
  stage_amax<V>(values, to.log2_block, staging);
  __syncwarp();
  const BFloat16 stored = encode_scale(lane < to.num_blocks() ? staging.amax[lane] : 0, qmax_of(kBits));
  if (lane < num_scales) reinterpret_cast<BFloat16*>(to.scales)[lane] = stored;
  const float scale = to_float(stored);
  staging.divisors[lane] = {scale, has_codes(stored) ? 1.0f / scale : 0.0f};
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPerLane / V; ++j) {
    const int element = element_of<V>(j);
    const Divisor divisor = staging.divisors[element >> to.log2_block];
    stage_codes<kBits, V>(values + j * V, divisor, staging.codes + element * kBits / 8);
  }
  __syncwarp();
#pragma unroll
  for (int at = 16 * lane; at < kTileNumel * kBits / 8; at += 16 * kLanes) {
    if (8 * at >= to.numel * kBits) break;
    *reinterpret_cast<Words<4>*>(to.codes + at) = *reinterpret_cast<const Words<4>*>(staging.codes + at);
  }
  __syncwarp();  // the staging is free again
}

// ---- Decode, in two steps, so that the codes of several sources can be on their way at once.

template <int kBits>
struct FetchedBlocks {
  Words<4> codes[kBits / 4];
  BFloat16 scale;  // lane b has that of block b
};

template <int kBits>
__device__ __forceinline__ FetchedBlocks<kBits> fetch_blocks(const BlockMemory<const uint8_t>& from) {
  const int lane = lane_index();
  FetchedBlocks<kBits> fetched = {};
#pragma unroll
  for (int i = 0; i < kBits / 4; ++i) {
    const int at = 16 * (i * kLanes + lane);
    if (8 * at < from.numel * kBits) fetched.codes[i] = *reinterpret_cast<const Words<4>*>(from.codes + at);
  }
  if (lane < from.num_blocks()) fetched.scale = reinterpret_cast<const BFloat16*>(from.scales)[lane];
  return fetched;
}

// values += V codes * scale. An unsigned byte u in the low bits of 2^23 is the float 2^23 + u: no conversion is needed.
template <int kBits, int V>
__device__ __forceinline__ void add_codes(const uint8_t* codes, float scale, float* values) {
  constexpr int kBias = kBits == 8 ? 128 : 8;
  constexpr float kOffset = 8388608.0f + kBias;
  uint32_t bytes[2];  // two words of four codes, biased; of INT4 the even and the odd codes
  if constexpr (kBits == 8) {
#pragma unroll
    for (int i = 0; i < V / 4; ++i) bytes[i] = reinterpret_cast<const Words<V / 4>*>(codes)->at[i] ^ 0x80808080;
  } else {
    uint32_t nibbles;
    if constexpr (V == 8) nibbles = *reinterpret_cast<const uint32_t*>(codes) ^ 0x88888888;
    else nibbles = *reinterpret_cast<const uint16_t*>(codes) ^ 0x8888;
    bytes[0] = nibbles & 0x0F0F0F0F;
    bytes[1] = nibbles >> 4 & 0x0F0F0F0F;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int word = kBits == 8 ? i / 4 : i % 2, byte = kBits == 8 ? i % 4 : i / 2;
    values[i] += (float_of(__byte_perm(bytes[word], 0x4B000000, 0x7540 + byte)) - kOffset) * scale;
  }
}

template <int kBits, int V>
__device__ __forceinline__ void add_blocks(const FetchedBlocks<kBits>& fetched, int log2_block, Staging& staging,
                                           float (&values)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kBits / 4; ++i) {
    reinterpret_cast<Words<4>*>(staging.codes)[i * kLanes + lane_index()] = fetched.codes[i];
  }
  const float scale = to_float(fetched.scale);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPerLane / V; ++j) {
    const int element = element_of<V>(j);
    const float scale_of_block = __shfl_sync(kAllLanes, scale, element >> log2_block);
    add_codes<kBits, V>(staging.codes + element * kBits / 8, scale_of_block, values + j * V);
  }
  __syncwarp();
}

}  // namespace zeropp
}  // namespace
