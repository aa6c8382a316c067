// From the C ABI to a grid: which kernels take a wire, and how many warps they need.
#pragma once

#include <cuda_runtime.h>

#include "wire.cuh"

namespace {
namespace zeropp {

constexpr int64_t kMaxGridRows = 65535;

// Do the kernels on rows take this block? They take 32, 64 .. 1024 elements.
inline bool is_row_block(int64_t block) {
  return (block & (block - 1)) == 0 && block >= kLanes && block <= kTileNumel;
}

// Does a wire have such blocks, and an address that allows 16-byte accesses?
inline bool has_row_blocks(const Layout& layout, const void* wire) {
  return is_row_block(layout.block) && is_aligned(wire);
}

// May the scales of a frozen weight be read as numbers? As views into larger buffers they may begin at an odd address.
inline bool has_even_scales(const uint8_t* scales) { return reinterpret_cast<uintptr_t>(scales) % sizeof(BFloat16) == 0; }

inline int log2_floor(int64_t value) {
  int log2 = 0;
  while (value >> (log2 + 1)) ++log2;
  return log2;
}

// A tile has about 1024 elements, and exactly so many if blocks are a power of two. Tiles of odd blocks have an even
// number of them, so that INT4 codes begin at a byte. A part has at most one block more than its elements fill.
inline Tiling tiling_of(const Layout& layout) {
  const int log2_blocks = log2_floor(max(kTileNumel / layout.block, 1 + layout.block % 2));
  const int64_t num_blocks = layout.numel / layout.block + layout.num_parts;
  const int64_t num_tiles = layout.num_parts ? (num_blocks >> log2_blocks) + layout.num_parts : 0;
  return {static_cast<int>(layout.block), log2_blocks, static_cast<int>(num_tiles)};
}

template <class Byte>
Wires<Byte> wires_of(Byte* bytes, const Layout& layout) {
  return {bytes, layout, log2_floor(layout.block)};
}

inline int status_of(cudaError_t error) { return error == cudaSuccess ? kOk : kCudaError + static_cast<int>(error); }

// Calls launch(T{}) with the type of a dtype code.
template <class Launch>
int for_dtype(int64_t dtype, const Launch& launch) {
  if (dtype == kFloat32) return launch(float{});
  if (dtype == kBFloat16) return launch(BFloat16{});
  return launch(Float16{});
}

// Launches a kernel with so many bytes of shared memory beside what it declares. Returns a ZeroppStatus.
template <class... Parameters, class... Arguments>
int launch_with_shared(int shared_bytes, void (*kernel)(Parameters...), dim3 grid, int threads, void* stream,
                       Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.dynamicSmemBytes = shared_bytes;
  if (shared_bytes > 48 << 10) {  // more has to be asked for, on each device
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return status_of(error);
  }
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  return status_of(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, void* stream, Arguments... arguments) {
  return launch_with_shared(0, kernel, grid, threads, stream, arguments...);
}

// Launches a warp for each tile of a slice, along x. Slices lie along y and, if they are too many for it, z.
template <class... Parameters, class... Arguments>
int launch_tiles(void (*kernel)(Parameters...), const Tiling& tiling, int64_t num_slices, void* stream,
                 Arguments... arguments) {
  const int64_t layers = ceil_div(num_slices, kMaxGridRows), rows = ceil_div(num_slices, layers);
  const dim3 grid(static_cast<unsigned>(ceil_div(tiling.num_tiles, kWarps)), static_cast<unsigned>(rows),
                  static_cast<unsigned>(layers));
  return launch(kernel, grid, kThreads, stream, tiling, num_slices, arguments...);
}

}  // namespace zeropp
}  // namespace
