// Decode the rows of a frozen weight.
#include "../frozen_format.h"
#include "elements.cuh"
#include "launch.cuh"
#include "levels.cuh"

namespace {
namespace zeropp {

// add_blocks of codes.cuh for INT4: levels in place of codes, and two scales in a block. A lane's V elements are part of one
// run of 16.
template <int V>
__device__ __forceinline__ void add_level_blocks(const FetchedBlocks<4>& fetched, int log2_block, Staging& staging,
                                                 float (&values)[kPerLane]) {
  reinterpret_cast<Words<4>*>(staging.codes)[lane_index()] = fetched.codes[0];
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kPerLane / V; ++j) {
    const int element = element_of<V>(j);
    const uint32_t stored = __shfl_sync(kAllLanes, static_cast<uint32_t>(fetched.scale.bits), element >> log2_block);
    const float scale = run_scales_of(static_cast<uint16_t>(stored)).at[element / kRun % 2];
    const uint32_t codes = take_fields<4, V>(staging.codes, element);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const uint32_t biased = __byte_perm(biased_levels(codes >> i / 4 * 16), kIntegerBits, 0x7540 + i % 4);
      values[j * V + i] += (float_of(biased) - code_offset<8>()) * scale;
    }
  }
  __syncwarp();
}

// Rows of whole blocks follow each other without a gap, so the weight is one run of `numel` elements in tiles.
template <class Out, int kBits>
__global__ void __launch_bounds__(kThreads)
unpack_rows(const uint8_t* codes, const uint8_t* scales, int64_t numel, int log2_block, Out* output) {
  __shared__ Staging staging[kWarps];
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes) * kTileNumel;
  if (first >= numel) return;
  const BlockMemory<const uint8_t> from{scales + (first >> log2_block) * sizeof(BFloat16), codes + first * kBits / 8,
                                        static_cast<int>(min(kTileNumel, numel - first)), log2_block};
  float values[kPerLane];
  clear(values);
  const FetchedBlocks<kBits> fetched = fetch_blocks<kBits>(from);
  Staging& mine = staging[threadIdx.x / kLanes];
  if constexpr (kBits == 4) add_level_blocks<kVector<Out>>(fetched, log2_block, mine, values);
  else add_blocks<kBits, kVector<Out>>(fetched, log2_block, mine, values);
  store_rows<kVector<Out>>(values, from.numel, output + first);
}

// A thread for each element: for all other rows.
__global__ void __launch_bounds__(kThreads)
unpack_elements(const uint8_t* codes, const uint8_t* scales, FrozenRows shape, void* output, int64_t dtype) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= shape.rows * shape.columns) return;
  const int64_t row = index / shape.columns, column = index % shape.columns;
  const uint8_t* from = scales + (row * shape.num_blocks() + column / shape.block) * sizeof(BFloat16);
  const float scale = run_scales(read_unaligned<BFloat16>(from), shape.bits).at[column / kRun % 2];
  const int code = code_of(codes + row * shape.code_bytes(), static_cast<int>(shape.bits), column);
  store_element(output, dtype, index, static_cast<float>(shape.bits == 4 ? frozen_level_of(code) : code) * scale);
}

template <class Out>
int launch_rows(const uint8_t* codes, const uint8_t* scales, const FrozenRows& shape, void* output, void* stream) {
  const int64_t numel = shape.rows * shape.columns;
  const dim3 grid(static_cast<unsigned>(ceil_div(numel, kTileNumel * kWarps)));
  const auto kernel = shape.bits == 8 ? unpack_rows<Out, 8> : unpack_rows<Out, 4>;
  Out* typed = static_cast<Out*>(output);
  return launch(kernel, grid, kThreads, stream, codes, scales, numel, log2_floor(shape.block), typed);
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_unpack)(const uint8_t* codes, const uint8_t* scales, int64_t columns, int64_t bits, int64_t block,
                             int64_t dtype, int64_t rows, void* out, void* stream) {
  using namespace zeropp;
  const FrozenRows shape{rows, columns, block, bits};
  if (columns % block == 0 && is_row_block(block) && is_aligned(codes) && has_even_scales(scales)) {
    return for_dtype(dtype, [&](auto type) {
      return launch_rows<decltype(type)>(codes, scales, shape, out, stream);
    });
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(rows * columns, kThreads)));
  return launch(unpack_elements, grid, kThreads, stream, codes, scales, shape, out, dtype);
}
