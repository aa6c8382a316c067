// Rotations: 32-slices times the Hadamard matrix (format.h). Each slice is transformed in vector registers. Compilers
// do not manage that from plain loops, so the vectors are spelled out, as types that GCC and Clang know on every
// machine.
#pragma once

#include "../format.h"

#include <utility>

namespace {
namespace zeropp {

#if defined(__AVX512F__)
constexpr int kVectorLanes = 16;
#elif defined(__AVX2__)
constexpr int kVectorLanes = 8;
#else
constexpr int kVectorLanes = 4;
#endif
constexpr int kSliceVectors = kRotationSlice / kVectorLanes;
constexpr std::make_integer_sequence<int, kVectorLanes> kEachLane;

typedef float Vector __attribute__((vector_size(4 * kVectorLanes)));
typedef Vector VectorInMemory __attribute__((aligned(4), may_alias));  // floats in memory are aligned to 4 bytes only

// Each lane's value from the lane `step` apart.
template <int step, int... lane>
Vector partners(Vector values, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(values, values, (lane ^ step)...);
#else  // GCC, which knows Clang's name from version 12 on only
  typedef int Lanes __attribute__((vector_size(4 * kVectorLanes)));
  return __builtin_shuffle(values, Lanes{(lane ^ step)...});
#endif
}

// -1 in the lanes that take a difference, 1 in those that take a sum.
template <int step, int... lane>
Vector signs(std::integer_sequence<int, lane...>) {
  return Vector{(lane & step ? -1.0f : 1.0f)...};
}

// Sums and differences of elements `step` apart. If both lie in one vector, every lane adds its partner's value and its
// own times its sign. Multiplying by a sign is exact, so the bits are those of a sum or a difference.
template <int step>
void rotate_stage(Vector (&slice)[kSliceVectors]) {
  constexpr int distance = step / kVectorLanes;
  for (int i = 0; i < kSliceVectors; ++i) {
    if constexpr (distance == 0) {
      slice[i] = partners<step>(slice[i], kEachLane) + slice[i] * signs<step>(kEachLane);
    } else if (!(i & distance)) {
      const Vector low = slice[i], high = slice[i + distance];
      slice[i] = low + high;
      slice[i + distance] = low - high;
    }
  }
}

// Rotates the whole slices among n values, and copies the values behind them. `in` may be `out`.
inline void rotate_slices(const float* in, int64_t n, float* out) {
  const int64_t whole = n / kRotationSlice * kRotationSlice;
  for (int64_t first = 0; first < whole; first += kRotationSlice) {
    // Named in full, since `auto` would drop the attributes of the type.
    const VectorInMemory* from = reinterpret_cast<const VectorInMemory*>(in + first);
    VectorInMemory* to = reinterpret_cast<VectorInMemory*>(out + first);
    Vector slice[kSliceVectors];
    for (int i = 0; i < kSliceVectors; ++i) slice[i] = from[i];
    rotate_stage<1>(slice);
    rotate_stage<2>(slice);
    rotate_stage<4>(slice);
    rotate_stage<8>(slice);
    rotate_stage<16>(slice);
    for (int i = 0; i < kSliceVectors; ++i) to[i] = slice[i] * kRotationNorm;
  }
  for (int64_t i = whole; i < n; ++i) out[i] = in[i];
}

}  // namespace zeropp
}  // namespace
