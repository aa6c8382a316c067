// Decode the rows of a frozen weight.
#include "../frozen_format.h"
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

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
  add_blocks<kBits, kVector<Out>>(fetch_blocks<kBits>(from), log2_block, staging[threadIdx.x / kLanes], values);
  store_rows<kVector<Out>>(values, from.numel, output + first);
}

// A thread for each element: for all other rows.
__global__ void __launch_bounds__(kThreads)
unpack_elements(const uint8_t* codes, const uint8_t* scales, FrozenRows shape, void* output, int64_t dtype) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= shape.rows * shape.columns) return;
  const int64_t row = index / shape.columns, column = index % shape.columns;
  const Part part{0, shape.columns, shape.bits, 0, 0, 0, 0};
  const uint8_t* row_scales = scales + row * shape.num_blocks() * sizeof(BFloat16);
  const BFloat16 scale = scale_of(row_scales, part, static_cast<int>(shape.block), column);
  const int8_t code = code_of(codes + row * shape.code_bytes(), static_cast<int>(shape.bits), column);
  store_element(output, dtype, index, decode(code, to_float(scale)));
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
