// The few instructions that C++ has no words for. tests/ops/cuda_emulation/ptx.h has the same functions for a CPU and
// defines the guard ZEROPP_PTX, so the kernels compile there as they stand.
#ifndef ZEROPP_PTX
#define ZEROPP_PTX

#include "../format.h"

namespace {
namespace zeropp {

// Two floats as bf16 or fp16, each rounded to nearest even, with `low` in the low half. A NaN becomes 0x7FFF.
__device__ __forceinline__ uint32_t round_pair(float low, float high, BFloat16) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t round_pair(float low, float high, Float16) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The square root, off by a few units in the last place.
__device__ __forceinline__ float approximate_root(float value) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}

// Two fp16 as floats.
__device__ __forceinline__ void widen_pair(uint32_t pair, float& low, float& high, Float16) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

// sums[16, 8] += a[16, 16] b[16, 8]: bf16 factors, fp32 sums. With g = lane / 4 and t = lane % 4 a lane holds
//   a     rows g, g + 8, g, g + 8 of columns 2t .. 2t + 1, and twice the same of columns 2t + 8 .. 2t + 9, as a[0..3]
//   b     rows 2t .. 2t + 1 and 2t + 8 .. 2t + 9 of column g, as b[0..1]
//   sums  columns 2t .. 2t + 1 of row g, then of row g + 8
__device__ __forceinline__ void multiply_tile(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&sums)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Begins to copy 16 bytes to shared memory, past the L1 cache. Copies form groups: those up to a call of `end_copies`. The
// lane that began a copy may read it behind `wait_for_copies<n>`, which waits for all groups but the last n.
__device__ __forceinline__ void begin_copy(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

template <int n>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory");
}

// Shared memory whose size the launch says.
#define ZEROPP_LAUNCHED_SHARED(name) extern __shared__ __align__(16) uint8_t name[]

}  // namespace zeropp
}  // namespace
#endif
