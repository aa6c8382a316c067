// A tile of a slice's wire: raw, INT8 or INT4, as its part says. All lanes of a warp take the same branch.
#pragma once

#include "codes.cuh"
#include "tile.cuh"

namespace {
namespace zeropp {

// visit(T{}) with the type that `dtype` names. (The host has its own, in launch.cuh: one function cannot call lambdas of
// both.)
template <class Visit>
__device__ __forceinline__ auto with_dtype(int64_t dtype, const Visit& visit) {
  if (dtype == kFloat32) return visit(float{});
  if (dtype == kBFloat16) return visit(BFloat16{});
  return visit(Float16{});
}

// One slice's part of a tile, in a wire whose blocks have 2^log2_block elements.
template <class Byte>
struct TileMemory {
  Byte* wire;  // of the slice
  const Part& part;
  const Tile& tile;
  int log2_block;

  __device__ BlockMemory<Byte> blocks(int bits) const {
    const int64_t first_block = tile.first >> log2_block;
    return {wire + part.scales + first_block * sizeof(BFloat16), wire + part.codes + tile.first * bits / 8, tile.numel,
            log2_block};
  }

  template <class T>
  __device__ auto raw() const {
    using Element = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    return reinterpret_cast<Element*>(wire + part.codes) + tile.first;
  }

  // Scales to write with this tile: the part's last brings the padding.
  __device__ int num_scales() const {
    if (!tile.is_last(part)) return blocks(8).num_blocks();
    return static_cast<int>((part.codes - part.scales) / sizeof(BFloat16) - (tile.first >> log2_block));
  }
};

__device__ __forceinline__ void write_zeros(uint8_t* from, const uint8_t* to) {
  for (uint8_t* at = from + lane_index(); at < to; at += kLanes) *at = 0;
}

// values -> the tile's scales and codes, or raw elements, and the padding behind the part's last.
template <int V>
__device__ __forceinline__ void encode_tile(const float (&values)[kPerLane], const TileMemory<uint8_t>& to,
                                            int64_t raw_dtype, Staging& staging) {
  if (to.part.bits == 8) return encode_blocks<8, V>(values, to.blocks(8), to.num_scales(), staging);
  if (to.part.bits == 4) return encode_blocks<4, V>(values, to.blocks(4), to.num_scales(), staging);
  with_dtype(raw_dtype, [&](auto type) {
    using T = decltype(type);
    T* elements = to.raw<T>();
    store_rows<V>(values, to.tile.numel, elements);
    if (to.tile.is_last(to.part)) write_zeros(reinterpret_cast<uint8_t*>(elements + to.tile.numel), to.wire + to.part.end);
  });
}

// values += source 0, += source 1, ...: each tile memory `stride` bytes behind the last. As many sources as fit 64 bytes
// of codes to a lane are on their way at once.
template <int kBits, int V>
__device__ __forceinline__ void add_quantized(TileMemory<const uint8_t> from, int64_t num_sources, int64_t stride,
                                              Staging& staging, float (&values)[kPerLane]) {
  constexpr int kAtOnce = 16 / kBits;
  for (int64_t source = 0; source < num_sources; source += kAtOnce) {
    FetchedBlocks<kBits> fetched[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (source + i < num_sources) fetched[i] = fetch_blocks<kBits>(from.blocks(kBits));
      from.wire += stride;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (source + i < num_sources) add_blocks<kBits, V>(fetched[i], from.log2_block, staging, values);
    }
  }
}

template <int V>
__device__ __forceinline__ void add_raw(TileMemory<const uint8_t> from, int64_t num_sources, int64_t stride,
                                        int64_t raw_dtype, float (&values)[kPerLane]) {
  with_dtype(raw_dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t source = 0; source < num_sources; ++source, from.wire += stride) {
      add_rows<V>(from.raw<T>(), from.tile.numel, values);
    }
  });
}

template <int V>
__device__ __forceinline__ void add_sources(const TileMemory<const uint8_t>& from, int64_t num_sources, int64_t stride,
                                            int64_t raw_dtype, Staging& staging, float (&values)[kPerLane]) {
  if (from.part.bits == 8) return add_quantized<8, V>(from, num_sources, stride, staging, values);
  if (from.part.bits == 4) return add_quantized<4, V>(from, num_sources, stride, staging, values);
  add_raw<V>(from, num_sources, stride, raw_dtype, values);
}

// What sums start from: adding anything to -0 leaves it as it is, +0 and -0 included.
__device__ __forceinline__ void clear(float (&values)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] = -0.0f;
}

}  // namespace zeropp
}  // namespace
