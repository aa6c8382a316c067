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

// Two floats as 16-bit floats, with the bits that `assign` of format.h gives each. NaNs take extra instructions.
template <class T, bool kMayBeNaN>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  uint32_t pair = round_pair(low, high, T{});
  if (!kMayBeNaN) return pair;
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

template <class T, int N, bool kMayBeNaN>
__device__ __forceinline__ Words<N> narrow(const float* values) {
  Words<N> words;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == sizeof(float)) words.at[i] = bits_of(values[i]);
    else words.at[i] = narrow_pair<T, kMayBeNaN>(values[2 * i], values[2 * i + 1]);
  }
  return words;
}

// ---- A tile, from and to memory. `numel` of its elements exist.
//
// [Note: tails] Whole tiles are moved 16 bytes at a time. All others (the last tile of a part) are moved element by
// element. Elements behind the last count as zeros, which change no block's amax, and they are never written. A warp's
// 32 lanes all take the same branch, so they still meet at the shuffles that follow.
//
// [Note: shifted rows] A flat shard has no padding, so a parameter that follows a small one may begin anywhere. A tile
// there is moved as the aligned vectors of 16 bytes that hold it, and each lane puts the vector it needs together from
// two of them: its own and that of the next lane. What a load reads beyond the tile lies in the same 16 bytes as an
// element of the tile, and is dropped. A store writes the elements before the first aligned vector, and those behind
// the last, one by one.

template <class T>
__device__ __forceinline__ int bytes_past_boundary(const T* memory) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(memory) % 16);
}

// Is this tile moved in vectors? Vectors of 16 bytes can be shifted. (Others occur where a tile's values are converted on
// the way.) Tiles in a wire are always aligned, and need no code for shifting: kAligned.
template <int kWords, bool kAligned, class T>
__device__ __forceinline__ bool moves_in_vectors(const T* memory, int numel) {
  return numel == kTileNumel && ((kWords == 4 && !kAligned) || is_aligned(memory));
}

// rows[j] <- the 16 bytes that begin 4 kSkipped bytes (and 2 more, if `selector` says so) behind the lane's own vector
// of row j. The vector behind that of lane 31 is lane 0's of row j + 1.
template <int kSkipped, int kRows>
__device__ __forceinline__ void shift_by_words(Words<4> (&rows)[kRows + 1], uint32_t selector) {
  const int lane = lane_index(), next_lane = (lane + 1) % kLanes;
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    uint32_t words[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      if (i + kSkipped < 4) {
        words[i] = rows[j].at[i + kSkipped];
      } else {
        const int at = i + kSkipped - 4;
        words[i] = __shfl_sync(kAllLanes, lane == 0 ? rows[j + 1].at[at] : rows[j].at[at], next_lane);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[j].at[i] = __byte_perm(words[i], words[i + 1], selector);
  }
}

// The same for any even number of bytes under 16. Of the last element of `rows` lane 0's counts.
template <int kRows>
__device__ __forceinline__ void shift_rows(Words<4> (&rows)[kRows + 1], int bytes) {
  const uint32_t selector = bytes % 4 ? 0x5432 : 0x3210;
  if (bytes < 4) shift_by_words<0, kRows>(rows, selector);
  else if (bytes < 8) shift_by_words<1, kRows>(rows, selector);
  else if (bytes < 12) shift_by_words<2, kRows>(rows, selector);
  else shift_by_words<3, kRows>(rows, selector);
}

// The lane's vectors of kRows rows from row `first` on. The last element of `rows` is for `shift_rows`.
template <int kWords, int kRows, bool kAligned, class T>
__device__ __forceinline__ void load_vectors(const T* from, int first, Words<kWords> (&rows)[kRows + 1]) {
  const int shift = kWords == 4 && !kAligned ? bytes_past_boundary(from) : 0;
  const auto* vectors = reinterpret_cast<const Words<kWords>*>(reinterpret_cast<const uint8_t*>(from) - shift);
#pragma unroll
  for (int j = 0; j < kRows; ++j) rows[j] = vectors[(first + j) * kLanes + lane_index()];
  if constexpr (kWords == 4 && !kAligned) {
    if (shift == 0) return;
    rows[kRows] = {};
    if (lane_index() == 0) rows[kRows] = vectors[(first + kRows) * kLanes];
    shift_rows<kRows>(rows, shift);
  }
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
  constexpr int kWords = V * sizeof(T) / 4, kRows = kPerLane / V;
  // Shifting takes registers, so fewer rows are on their way at once there.
  constexpr int kShiftedAtOnce = min(kRows, 4);
  if (numel == kTileNumel && is_aligned(from)) {
    Words<kWords> rows[kRows + 1];
    load_vectors<kWords, kRows, true>(from, 0, rows);
#pragma unroll
    for (int j = 0; j < kRows; ++j) widen<T>(rows[j], values + j * V);
  } else if (moves_in_vectors<kWords, false>(from, numel)) {
#pragma unroll
    for (int first = 0; first < kRows; first += kShiftedAtOnce) {
      Words<kWords> rows[kShiftedAtOnce + 1];
      load_vectors<kWords, kShiftedAtOnce, false>(from, first, rows);
#pragma unroll
      for (int j = 0; j < kShiftedAtOnce; ++j) widen<T>(rows[j], values + (first + j) * V);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kRows; ++j) load_elements<V>(from, numel, j, values + j * V);
  }
}

// values <- combine(value, element), with the elements of a tile in memory. Up to 64 bytes per lane are on their way at
// once. There is no room for more, because the values take registers too.
template <int V, bool kAligned = false, class T, class Combine>
__device__ __forceinline__ void combine_rows(const T* from, int numel, float (&values)[kPerLane],
                                             const Combine& combine) {
  constexpr int kWords = V * sizeof(T) / 4, kRows = kPerLane / V, kAtOnce = min(kRows, 16 / kWords);
  const auto combine_row = [&](int j, const float* elements) {
#pragma unroll
    for (int i = 0; i < V; ++i) values[j * V + i] = combine(values[j * V + i], elements[i]);
  };
  float elements[V];
  if (moves_in_vectors<kWords, kAligned>(from, numel)) {
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      Words<kWords> rows[kAtOnce + 1];
      load_vectors<kWords, kAtOnce, kAligned>(from, first, rows);
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

// values += the elements of a tile in a wire.
template <int V, class T>
__device__ __forceinline__ void add_rows(const T* from, int numel, float (&values)[kPerLane]) {
  combine_rows<V, true>(from, numel, values, [](float value, float element) { return value + element; });
}

// Element `index` of those that the words hold.
template <class T, int N>
__device__ __forceinline__ T element_in(const Words<N>& words, int index) {
  if constexpr (sizeof(T) == sizeof(float)) return float_of(words.at[index]);
  else return T{static_cast<uint16_t>(words.at[index / 2] >> 16 * (index % 2))};
}

// The elements of a tile at an address that is no multiple of 16: [Note: shifted rows].
template <int V, class T, int kRows>
__device__ __forceinline__ void store_shifted(Words<4> (&rows)[kRows + 1], T* to) {
  const int lane = lane_index(), head = (16 - bytes_past_boundary(to)) / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (lane == 0 && i < head) to[i] = element_in<T>(rows[0], i);
    if (lane == kLanes - 1 && i >= head) to[kTileNumel - V + i] = element_in<T>(rows[kRows - 1], i);
  }
  rows[kRows] = {};
  shift_rows<kRows>(rows, head * static_cast<int>(sizeof(T)));
  auto* vectors = reinterpret_cast<Words<4>*>(to + head);
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    if (j < kRows - 1 || lane < kLanes - 1) vectors[j * kLanes + lane] = rows[j];
  }
}

// Is a value of any lane NaN? Every lane gets the answer.
__device__ __forceinline__ bool has_nan(const float (&values)[kPerLane]) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) found |= values[i] != values[i];
  return __ballot_sync(kAllLanes, found) != 0;
}

template <int V, class T, int kRows>
__device__ __forceinline__ void narrow_rows(const float (&values)[kPerLane], Words<V * sizeof(T) / 4> (&rows)[kRows]) {
  constexpr int kWords = V * sizeof(T) / 4;
  // One vote of the warp costs less than care for every element. Floats of 32 bits stay as they are.
  if (sizeof(T) < sizeof(float) && has_nan(values)) {
#pragma unroll
    for (int j = 0; j < kPerLane / V; ++j) rows[j] = narrow<T, kWords, true>(values + j * V);
  } else {
#pragma unroll
    for (int j = 0; j < kPerLane / V; ++j) rows[j] = narrow<T, kWords, false>(values + j * V);
  }
}

template <int V, bool kAligned = false, class T>
__device__ __forceinline__ void store_rows(const float (&values)[kPerLane], int numel, T* to) {
  constexpr int kWords = V * sizeof(T) / 4, kRows = kPerLane / V;
  if (moves_in_vectors<kWords, kAligned>(to, numel)) {
    Words<kWords> rows[kRows + 1];
    narrow_rows<V, T>(values, rows);
    if constexpr (kWords == 4 && !kAligned) {
      if (!is_aligned(to)) return store_shifted<V, T, kRows>(rows, to);
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) reinterpret_cast<Words<kWords>*>(to)[j * kLanes + lane_index()] = rows[j];
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
