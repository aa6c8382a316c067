// A tile's values in the registers of a warp: loaded, converted and stored.
//
// A tile has 1024 elements, 32 per lane, in rows of 32 vectors of V elements: of each row j, lane l holds the elements
// (32 j + l) V .. (32 j + l) V + V - 1. If V elements fill 16 bytes, a load or store moves a row of 512 contiguous
// bytes, and all rows of a tile are on their way before the first is used.
#pragma once

#include "ptx.cuh"

namespace {
namespace zeropp {

constexpr int kLanes = 32;
constexpr int kTileNumel = 1024;
constexpr int kPerLane = kTileNumel / kLanes;
constexpr uint32_t kAllLanes = 0xFFFFFFFF;

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements in 16 bytes

__device__ __forceinline__ int lane_index() { return threadIdx.x % kLanes; }

// The first element of this lane's vector in row j.
template <int V>
__device__ __forceinline__ int element_of(int j) {
  return (j * kLanes + lane_index()) * V;
}

// N words of memory. The alignment lets the compiler move them in one instruction, or in as few as possible.
template <int N>
struct alignas(N < 4 ? 4 * N : 16) Words {
  uint32_t at[N];
};

ZEROPP_HD bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// ---- Words and the floats in them.

__device__ __forceinline__ void widen_pair(uint32_t pair, float& low, float& high, BFloat16) {
  low = float_of(pair << 16);
  high = float_of(pair & 0xFFFF0000);
}

__device__ __forceinline__ uint32_t canonical_nan(BFloat16) { return kBFloat16NaN; }
__device__ __forceinline__ uint32_t canonical_nan(Float16) { return kFloat16NaN; }

// Two floats as 16-bit floats, with the bits that `assign` of format.h gives each.
template <class T>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  uint32_t pair = round_pair(low, high, T{});
  if (low != low) pair = (pair & 0xFFFF0000) | canonical_nan(T{});
  if (high != high) pair = (pair & 0x0000FFFF) | canonical_nan(T{}) << 16;
  return pair;
}

template <class T, int N>
__device__ __forceinline__ void widen(const Words<N>& words, float* values) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == sizeof(float)) values[i] = float_of(words.at[i]);
    else widen_pair(words.at[i], values[2 * i], values[2 * i + 1], T{});
  }
}

template <class T, int N>
__device__ __forceinline__ Words<N> narrow(const float* values) {
  Words<N> words;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == sizeof(float)) words.at[i] = bits_of(values[i]);
    else words.at[i] = narrow_pair<T>(values[2 * i], values[2 * i + 1]);
  }
  return words;
}

__device__ __forceinline__ bool is_finite(BFloat16 value) { return (value.bits & 0x7F80) != 0x7F80; }

// ---- A tile, from and to memory. `numel` of its elements exist.
//
// [Note: tails] Whole tiles at aligned addresses are moved 16 bytes at a time. All others (the last tile of a part, and
// memory that is not 16-byte aligned) are moved element by element. Elements behind the last count as zeros, which
// change no block's amax, and they are never written. A warp's 32 lanes all take the same branch, so they still meet at
// the shuffles that follow.

template <class T>
__device__ __forceinline__ bool is_whole(const T* memory, int numel) {
  return numel == kTileNumel && is_aligned(memory);
}

template <int V, class T>
__device__ __forceinline__ auto row_vector(const T* from, int j) {
  return reinterpret_cast<const Words<V * sizeof(T) / 4>*>(from)[j * kLanes + lane_index()];
}

// A lane's V values of row j, with zeros behind the last element.
template <int V, class T>
__device__ __forceinline__ void load_elements(const T* from, int numel, int j, float* values) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int element = element_of<V>(j) + i;
    values[i] = element < numel ? to_float(from[element]) : 0.0f;
  }
}

template <int V, class T>
__device__ __forceinline__ void load_rows(const T* from, int numel, float (&values)[kPerLane]) {
  constexpr int kRows = kPerLane / V;
  if (is_whole(from, numel)) {
    decltype(row_vector<V>(from, 0)) rows[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) rows[j] = row_vector<V>(from, j);
#pragma unroll
    for (int j = 0; j < kRows; ++j) widen<T>(rows[j], values + j * V);
  } else {
#pragma unroll
    for (int j = 0; j < kRows; ++j) load_elements<V>(from, numel, j, values + j * V);
  }
}

// values <- combine(value, element), with the elements of a tile in memory. Up to 64 bytes per lane are on their way at
// once. There is no room for more, because the values take registers too.
template <int V, class T, class Combine>
__device__ __forceinline__ void combine_rows(const T* from, int numel, float (&values)[kPerLane],
                                             const Combine& combine) {
  constexpr int kRows = kPerLane / V, kAtOnce = min(kRows, 64 / (V * sizeof(T)));
  const auto combine_row = [&](int j, const float* elements) {
#pragma unroll
    for (int i = 0; i < V; ++i) values[j * V + i] = combine(values[j * V + i], elements[i]);
  };
  float elements[V];
  if (is_whole(from, numel)) {
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      decltype(row_vector<V>(from, 0)) rows[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) rows[j] = row_vector<V>(from, first + j);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        widen<T>(rows[j], elements);
        combine_row(first + j, elements);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      load_elements<V>(from, numel, j, elements);
      combine_row(j, elements);
    }
  }
}

// values += the elements of a tile.
template <int V, class T>
__device__ __forceinline__ void add_rows(const T* from, int numel, float (&values)[kPerLane]) {
  combine_rows<V>(from, numel, values, [](float value, float element) { return value + element; });
}

template <int V, class T>
__device__ __forceinline__ void store_rows(const float (&values)[kPerLane], int numel, T* to) {
  constexpr int kWords = V * sizeof(T) / 4, kRows = kPerLane / V;
  if (is_whole(to, numel)) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      reinterpret_cast<Words<kWords>*>(to)[j * kLanes + lane_index()] = narrow<T, kWords>(values + j * V);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int element = element_of<V>(i / V) + i % V;
    if (element < numel) assign(to[element], values[i]);
  }
}

}  // namespace zeropp
}  // namespace
