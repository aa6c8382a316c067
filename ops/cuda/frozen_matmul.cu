// Multiply a few rows of activations by a frozen weight. Generation reads codes this way and never makes a dense
// weight.
//
// [Note: tensor cores for a few rows] The goal is the time that reading the codes takes. At INT4 that leaves a lane
// three instructions per weight, too few to decode it and multiply it with several inputs in fp32. So tensor cores
// multiply. Codes are integers of at most 8 bits, exact in bf16, and sums are scaled after a block is summed. An input
// is split into two bf16, x = high + low up to 2^-17 of x, which take two of the eight columns of a product. That makes
// four inputs.
//
// A thread block computes 32 rows of the weight. Each of its warps takes every eighth step of 128 columns, and the sums
// of the warps are added in their order, so the result does not depend on timing. Its last bits are not those of
// ops/cpu, since the order of additions differs. Each result differs from the exact sum by less than 2^-15 of sum |x
// w|. Weights whose blocks or rows are not multiples of 128 columns take `multiply_elements`, which adds in the order
// of ops/cpu and gives its bits.
#include "../frozen_format.h"
#include "elements.cuh"
#include "launch.cuh"

namespace {
namespace zeropp {

constexpr int kStep = 128;           // columns, 32 for each of the 4 lanes of a quad
constexpr int kMatmulWarps = 8;
constexpr int kTileRows = 16;        // rows of one product of tensor cores
constexpr int kRowTiles = 2;
constexpr int kBlockRows = kRowTiles * kTileRows;

// A lane's share of a step: 32 codes of a row.
template <int kBits>
struct CodeRun {
  Words<4> at[kBits / 4];

  // Codes 8 u + p and 8 u + p + 4 as bf16, with p < 4. They lie 16 bits apart (INT4) or a word apart (INT8), so that
  // one instruction takes out both.
  __device__ uint32_t pair(int u, int p) const {
    if constexpr (kBits == 4) {
      const uint32_t biased = at[0].at[u] ^ 0x88888888;
      return subtract_pair((biased >> 4 * p & 0x000F000F) | 0x43004300, 0x43084308);  // 128 + 8 + code, less 136
    } else {
      return round_pair(code(2 * u, p), code(2 * u + 1, p), BFloat16{});
    }
  }

 private:
  __device__ float code(int word, int byte) const {
    const uint32_t biased = at[word / 4].at[word % 4] ^ 0x80808080;
    return float_of(__byte_perm(biased, 0x4B000000, 0x7540 + byte)) - (8388608.0f + 128);
  }
};

template <int kBits>
__device__ __forceinline__ CodeRun<kBits> load_run(const uint8_t* from) {
  CodeRun<kBits> run;
#pragma unroll
  for (int i = 0; i < kBits / 4; ++i) run.at[i] = reinterpret_cast<const Words<4>*>(from)[i];
  return run;
}

// The high and low bf16 of two inputs.
struct SplitPair {
  uint32_t high, low;
};

__device__ __forceinline__ float rest_of(float value, float high) {
  const float rest = value - high;
  return rest == rest ? rest : 0.0f;  // an Inf is all in its high half
}

__device__ __forceinline__ SplitPair split(float first, float second) {
  const uint32_t high = round_pair(first, second, BFloat16{});
  float high_first, high_second;
  widen_pair(high, high_first, high_second, BFloat16{});
  return {high, round_pair(rest_of(first, high_first), rest_of(second, high_second), BFloat16{})};
}

// A lane's share of a step's inputs. The lanes of group g (lane / 4) hold column g of the product: the high halves of
// input g / 2 if g is even, its low halves if g is odd. Both groups need all 32 elements of the input: each lane loads
// and splits 16 of them and exchanges halves with its partner.
struct InputRun {
  uint32_t pairs[16];  // pair 4 u + p: elements 8 u + p and 8 u + p + 4
};

__device__ __forceinline__ InputRun load_inputs(const float* from, bool exists) {
  const int odd = lane_index() / 4 % 2;
  Words<4> words[4] = {};
#pragma unroll
  for (int i = 0; i < 4 && exists; ++i) words[i] = reinterpret_cast<const Words<4>*>(from)[4 * odd + i];
  InputRun run;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int u = i / 4, p = i % 4;
    const SplitPair mine = split(float_of(words[2 * u].at[p]), float_of(words[2 * u + 1].at[p]));
    const uint32_t theirs = __shfl_xor_sync(kAllLanes, odd ? mine.high : mine.low, 4);
    run.pairs[i] = odd ? theirs : mine.high;
    run.pairs[8 + i] = odd ? mine.low : theirs;
  }
  return run;
}

// sums += scale * products of a step, for one tile of 16 rows; a lane has rows g and g + 8.
template <int kBits>
__device__ __forceinline__ void add_step(const CodeRun<kBits> (&codes)[2], const float (&scales)[2],
                                         const InputRun& inputs, float (&sums)[4]) {
  float products[4] = {};
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const int u = s / 2, p = s % 2 * 2;
    const uint32_t a[4] = {codes[0].pair(u, p), codes[1].pair(u, p), codes[0].pair(u, p + 1), codes[1].pair(u, p + 1)};
    const uint32_t b[2] = {inputs.pairs[2 * s], inputs.pairs[2 * s + 1]};
    multiply_tile(a, b, products);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += products[i] * scales[i / 2];
}

template <int kBits>
__global__ void __launch_bounds__(kMatmulWarps * kLanes)
multiply_rows(const float* x, int num_inputs, const uint8_t* codes, const BFloat16* scales, FrozenRows shape,
              float* output) {
  __shared__ float partial[kMatmulWarps][kBlockRows][kMaxInputs];
  const int warp = threadIdx.x / kLanes, group = lane_index() / 4, quad = lane_index() % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kBlockRows;
  const int steps_per_block = static_cast<int>(shape.block) / kStep;
  float sums[kRowTiles][4] = {};
  for (int step = warp; step < shape.columns / kStep; step += kMatmulWarps) {
    const int64_t column = static_cast<int64_t>(step) * kStep + quad * 32;
    CodeRun<kBits> runs[kRowTiles][2];
    float run_scales[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      // Lanes behind the last row repeat it, and store nothing.
      const int64_t row = min(first_row + 8 * i + group, shape.rows - 1);
      runs[i / 2][i % 2] = load_run<kBits>(codes + row * shape.code_bytes() + column * kBits / 8);
      run_scales[i / 2][i % 2] = to_float(scales[row * shape.num_blocks() + step / steps_per_block]);
    }
    const InputRun inputs = load_inputs(x + group / 2 * shape.columns + column, group / 2 < num_inputs);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) add_step<kBits>(runs[t], run_scales[t], inputs, sums[t]);
  }
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    partial[warp][8 * i + group][quad] = sums[i / 2][i % 2 * 2] + sums[i / 2][i % 2 * 2 + 1];
  }
  __syncthreads();
  const int input = threadIdx.x / kBlockRows;
  const int64_t row = first_row + threadIdx.x % kBlockRows;
  if (input >= num_inputs || row >= shape.rows) return;
  float sum = 0;
  for (int w = 0; w < kMatmulWarps; ++w) sum += partial[w][threadIdx.x % kBlockRows][input];
  output[input * shape.rows + row] = sum;
}

// A warp for each row. Its lanes are those of ops/cpu/frozen_matmul.cpp.
__global__ void __launch_bounds__(kThreads)
multiply_elements(const float* x, int num_inputs, const uint8_t* codes, const BFloat16* scales, FrozenRows shape,
                  float* output) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (row >= shape.rows) return;
  const int64_t stride = shape.num_blocks() * shape.block;
  for (int input = 0; input < num_inputs; ++input) {
    float lane = 0;
    for (int64_t b = 0; b < shape.num_blocks(); ++b) {
      float sum = 0;
      for (int64_t i = lane_index(); i < ceil_div(shape.block_size(b), kLanes) * kLanes; i += kLanes) {
        const int64_t column = b * shape.block + i;
        const bool exists = column < shape.columns;
        const int code = exists ? code_of(codes + row * shape.code_bytes(), static_cast<int>(shape.bits), column) : 0;
        sum += x[input * stride + column] * static_cast<float>(code);
      }
      lane += sum * to_float(scales[row * shape.num_blocks() + b]);
    }
    for (int half = kLanes / 2; half; half /= 2) lane += __shfl_down_sync(kAllLanes, lane, half);
    if (lane_index() == 0) output[input * shape.rows + row] = lane;
  }
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_matmul)(const float* x, const uint8_t* codes, const uint8_t* scales, int64_t columns, int64_t bits,
                             int64_t block, int64_t num_inputs, int64_t rows, float* out, void* stream) {
  using namespace zeropp;
  const FrozenRows shape{rows, columns, block, bits};
  const BFloat16* typed_scales = reinterpret_cast<const BFloat16*>(scales);
  if (columns % block == 0 && block % kStep == 0 && is_aligned(codes) && is_aligned(x)) {
    const dim3 grid(static_cast<unsigned>(ceil_div(rows, kBlockRows)));
    const auto kernel = bits == 8 ? multiply_rows<8> : multiply_rows<4>;
    return launch(kernel, grid, kMatmulWarps * kLanes, stream, x, num_inputs, codes, typed_scales, shape, out);
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, kWarps)));
  return launch(multiply_elements, grid, kThreads, stream, x, num_inputs, codes, typed_scales, shape, out);
}
