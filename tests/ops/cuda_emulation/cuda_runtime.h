// The CUDA execution model on one CPU thread, for tests: g++ compiles the kernels of ops/cuda with this header in place of
// CUDA's own.
//
// Each thread of a block is a fiber. A fiber runs until it must meet others, at a shuffle, a vote or a barrier, and the
// next one runs; so lanes advance in lockstep from meeting to meeting, and between two meetings in any order. What a warp
// may not rely on, that lanes run together without __syncwarp, fails here as it may on a GPU. A meeting that some lanes
// of a warp never reach, or reach at another place, ends the program with a message.
//
// This checks arithmetic and indexing. It knows nothing of memory latency, caches or scheduling, nor whether ptxas and
// the hardware do what the source says.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess,
  cudaErrorNoDevice = 100,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace emulation {

constexpr int kLanes = 32;

// Runs `body(context)` once for each thread of each block of a grid.
void run_grid(dim3 grid, dim3 block, void (*body)(void*), void* context);

// Every lane of the warp leaves `value` and gets all lanes' values; every lane must name the same `place`.
const uint32_t* exchange(uint32_t value, const char* place);

// Waits for every thread of the block.
void wait_for_block();

}  // namespace emulation

#define EMULATION_TEXT_(x) #x
#define EMULATION_TEXT(x) EMULATION_TEXT_(x)
#define EMULATION_PLACE __FILE__ ":" EMULATION_TEXT(__LINE__)

// ---- What the kernels use of CUDA. Masks are ignored: only whole warps meet.

inline float __emulated_shuffle(float value, int lane, const char* place) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t other = emulation::exchange(bits, place)[lane % emulation::kLanes];
  memcpy(&value, &other, sizeof value);
  return value;
}
inline uint32_t __emulated_shuffle(uint32_t value, int lane, const char* place) {
  return emulation::exchange(value, place)[lane % emulation::kLanes];
}
inline int __emulated_shuffle(int value, int lane, const char* place) {
  return static_cast<int>(__emulated_shuffle(static_cast<uint32_t>(value), lane, place));
}
inline uint32_t __emulated_ballot(bool vote, const char* place) {
  const uint32_t* votes = emulation::exchange(vote, place);
  uint32_t mask = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) mask |= votes[lane] << lane;
  return mask;
}
inline int __emulated_sum(int value, const char* place) {
  const uint32_t* values = emulation::exchange(static_cast<uint32_t>(value), place);
  uint32_t sum = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) sum += values[lane];
  return static_cast<int>(sum);
}

#define EMULATION_LANE (static_cast<int>(threadIdx.x) % emulation::kLanes)
#define __shfl_sync(mask, value, lane) __emulated_shuffle(value, lane, EMULATION_PLACE)
#define __shfl_xor_sync(mask, value, step) __emulated_shuffle(value, EMULATION_LANE ^ (step), EMULATION_PLACE)
#define __shfl_down_sync(mask, value, step) __emulated_shuffle(value, EMULATION_LANE + (step), EMULATION_PLACE)
#define __ballot_sync(mask, vote) __emulated_ballot(vote, EMULATION_PLACE)
#define __reduce_add_sync(mask, value) __emulated_sum(value, EMULATION_PLACE)
#define __syncwarp() static_cast<void>(emulation::exchange(0, EMULATION_PLACE))
#define __syncthreads() emulation::wait_for_block()

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return __builtin_clz(static_cast<uint32_t>(bits)); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}

inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

// One thread runs at a time, so nothing can come between.
inline uint32_t atomicOr(uint32_t* to, uint32_t bits) {
  const uint32_t before = *to;
  *to |= bits;
  return before;
}
inline unsigned long long atomicCAS(unsigned long long* to, unsigned long long expected, unsigned long long value) {
  const unsigned long long before = *to;
  if (before == expected) *to = value;
  return before;
}

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// ---- Devices. Tests set which there are, as 90 for compute capability 9.0, and what the driver knows.

#define __CUDA_ARCH_LIST__ 800, 900
#define ZEROPP_OLDEST_PTX 900
#define CUDART_VERSION 13000

extern "C" __attribute__((visibility("default"))) inline int emulated_devices[4] = {80}, emulated_driver = 13000;

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  for (int device : emulated_devices) *count += device != 0;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulated_driver;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const int capability = emulated_devices[device];
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Parameters... arguments) {
  auto call = [&] { kernel(arguments...); };
  const auto body = [](void* context) { (*static_cast<decltype(call)*>(context))(); };
  emulation::run_grid(config->gridDim, config->blockDim, body, &call);
  return cudaSuccess;
}
