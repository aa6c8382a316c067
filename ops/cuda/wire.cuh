// A tile of a slice's wire. Its part says whether it is raw or has codes of 2 to 8 bits. All lanes of a warp work
// on one part, so they take the same branch.
#pragma once

#include <type_traits>

#include "codes.cuh"
#include "tile.cuh"

namespace {
namespace zeropp {

// Calls visit(T{}) with the type of a dtype code. (The host has a function of its own in launch.cuh, because one
// function cannot call lambdas of both.)
template <class Visit>
__device__ __forceinline__ auto with_dtype(int64_t dtype, const Visit& visit) {
  if (dtype == kFloat32) return visit(float{});
  if (dtype == kBFloat16) return visit(BFloat16{});
  return visit(Float16{});
}

template <int n>
using Bits = std::integral_constant<int, n>;

// Calls visit(Bits<n>{}) with n = `bits`, the width of a code. Widths that settings offer today are compared first.
template <class Visit>
__device__ __forceinline__ void with_bits(int64_t bits, const Visit& visit) {
  if (bits == 8) visit(Bits<8>{});
  else if (bits == 4) visit(Bits<4>{});
  else if (bits == 3) visit(Bits<3>{});
  else if (bits == 2) visit(Bits<2>{});
  else if (bits == 5) visit(Bits<5>{});
  else if (bits == 6) visit(Bits<6>{});
  else visit(Bits<7>{});
}

// The memory of a tile in one slice's wire, whose blocks have 2^log2_block elements.
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

  // The number of scales to write with this tile. The last tile of a part writes the padding as well.
  __device__ int num_scales() const {
    if (!tile.is_last(part)) return blocks(8).num_blocks();
    return static_cast<int>((part.codes - part.scales) / sizeof(BFloat16) - (tile.first >> log2_block));
  }
};

// The wires of several slices of one layout.
template <class Byte>
struct Wires {
  Byte* bytes;  // [num_slices, nbytes]
  Layout layout;
  int log2_block;  // of layout.block, if it is a power of two

  __device__ const Part& part(const Tile& tile) const { return layout.parts[tile.part]; }
  __device__ Byte* slice(int64_t index) const { return bytes + index * layout.nbytes; }
  __device__ TileMemory<Byte> memory(const Tile& tile, int64_t index) const {
    return {slice(index), part(tile), tile, log2_block};
  }
};

__device__ __forceinline__ void write_zeros(uint8_t* from, const uint8_t* to) {
  for (uint8_t* at = from + lane_index(); at < to; at += kLanes) *at = 0;
}

// values -> the tile's scales and codes, and the padding behind a part's last tile.
template <int V>
__device__ __forceinline__ void encode_quantized(const float (&values)[kPerLane], const TileMemory<uint8_t>& to,
                                                 Staging& staging) {
  with_bits(to.part.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    encode_blocks<kBits, V>(values, to.blocks(kBits), to.num_scales(), staging);
  });
}

// The same for a tile that may also be raw.
template <int V>
__device__ __forceinline__ void encode_tile(const float (&values)[kPerLane], const TileMemory<uint8_t>& to,
                                            int64_t raw_dtype, Staging& staging) {
  if (to.part.bits) return encode_quantized<V>(values, to, staging);
  with_dtype(raw_dtype, [&](auto type) {
    using T = decltype(type);
    T* elements = to.raw<T>();
    store_rows<V, true>(values, to.tile.numel, elements);
    uint8_t* end = reinterpret_cast<uint8_t*>(elements + to.tile.numel);
    if (to.tile.is_last(to.part)) write_zeros(end, to.wire + to.part.end);
  });
}

// values += source 0, then += source 1, and so on. Each source lies `stride` bytes behind the last. As many sources are
// on their way at once as fit into 64 bytes of codes per lane.
template <int kBits, int V, bool kFused>
__device__ __forceinline__ void add_quantized(const TileMemory<const uint8_t>& from, int64_t num_sources, int64_t stride,
                                              Staging& staging, float (&values)[kPerLane]) {
  constexpr int kAtOnce = 4 / kFetches<kBits>;
  // What the part says is read once. (Stores to the staging could change it, as far as the compiler knows.)
  BlockMemory<const uint8_t> blocks = from.blocks(kBits);
  for (int left = static_cast<int>(num_sources); left > 0; left -= kAtOnce) {
    FetchedBlocks<kBits> fetched[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i < left) fetched[i] = fetch_blocks<kBits>(blocks);
      blocks.scales += stride;
      blocks.codes += stride;
    }
    if constexpr (kFused) {
      bool overflows = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i < left) overflows |= may_overflow(fetched[i].scale);
      }
      // No model survives such numbers, so the code is short: each source is read once more.
      if (__ballot_sync(kAllLanes, overflows)) {
        blocks.scales -= kAtOnce * stride;
        blocks.codes -= kAtOnce * stride;
#pragma unroll 1
        for (int i = 0; i < kAtOnce; ++i) {
          if (i < left) {
            add_blocks<kBits, V>(fetch_blocks<kBits>(blocks), blocks.log2_block, staging, values);
          }
          blocks.scales += stride;
          blocks.codes += stride;
        }
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i < left) add_blocks<kBits, V, kFused>(fetched[i], from.log2_block, staging, values);
    }
  }
}

template <int V>
__device__ __forceinline__ void add_raw(const TileMemory<const uint8_t>& from, int64_t num_sources, int64_t stride,
                                        int64_t raw_dtype, float (&values)[kPerLane]) {
  with_dtype(raw_dtype, [&](auto type) {
    using T = decltype(type);
    const uint8_t* elements = reinterpret_cast<const uint8_t*>(from.raw<T>());
    for (int64_t source = 0; source < num_sources; ++source, elements += stride) {
      add_rows<V>(reinterpret_cast<const T*>(elements), from.tile.numel, values);
    }
  });
}

template <int V, bool kFused>
__device__ __forceinline__ void add_sources(const TileMemory<const uint8_t>& from, int64_t num_sources, int64_t stride,
                                            int64_t raw_dtype, Staging& staging, float (&values)[kPerLane]) {
  if (from.part.bits) {
    return with_bits(from.part.bits, [&](auto bits) {
      add_quantized<decltype(bits)::value, V, kFused>(from, num_sources, stride, staging, values);
    });
  }
  add_raw<V>(from, num_sources, stride, raw_dtype, values);
}

// values += one tile.
template <int V>
__device__ __forceinline__ void add_tile(const TileMemory<const uint8_t>& from, int64_t raw_dtype, Staging& staging,
                                         float (&values)[kPerLane]) {
  add_sources<V, false>(from, 1, 0, raw_dtype, staging, values);
}

// Sums start from -0: adding a value to it gives that value, +0 and -0 included.
__device__ __forceinline__ void clear(float (&values)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] = -0.0f;
}

}  // namespace zeropp
}  // namespace
