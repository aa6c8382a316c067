// Multiply a few rows of activations by a frozen weight. Generation reads codes this way and never makes a dense
// weight.
//
// [Note: tensor cores for a few rows] The goal is the time that reading the codes takes. At INT4 that leaves a lane
// three instructions per weight, too few to decode it and multiply it with several inputs in fp32. So tensor cores
// multiply. Codes and levels are integers of at most 8 bits, exact in bf16. Products are summed over those columns of a
// step that share a scale, then scaled. Inputs in bf16 are factors as they are: a product of tensor cores has eight
// columns, one for each of eight inputs. Others are
// split into two bf16, x = high + low up to 2^-17 of x, which take two columns, and make four inputs.
//
// A thread block computes 32 rows of the weight with up to four products side by side, for which a code is decoded once.
// Each of its warps takes every eighth step of 128 columns, and the sums of the warps are added in their order, so the
// result does not depend on timing. Its last bits are not those of ops/cpu, since the order of additions differs. Each
// result differs from the exact sum by less than 2^-15 of sum |x w|, and is rounded to the dtype of the inputs with the
// bias in it. Weights whose blocks or rows are not multiples of 128 columns take `multiply_elements`, which adds in the
// order of ops/cpu and gives its bits.
#include "../frozen_format.h"
#include "elements.cuh"
#include "launch.cuh"
#include "levels.cuh"

namespace {
namespace zeropp {

constexpr int kStep = 128;           // columns, 32 for each of the 4 lanes of a quad
constexpr int kMatmulWarps = 8;
constexpr int kTileRows = 16;        // rows of one product of tensor cores
constexpr int kRowTiles = 2;
constexpr int kBlockRows = kRowTiles * kTileRows;

// [Note: codes ahead] A warp that loads codes, waits, and multiplies leaves the memory idle while it multiplies. So a warp
// begins to copy the codes of later steps to shared memory before it multiplies those of this one. Every lane reads back
// what it copied itself, and no lane waits for another. What a thread block of 8 warps has under way is 3 steps of INT4 or 2
// of INT8 a warp, 48 or 64 KB, beside the one that it works on. An H100 needs some 20 KB per SM to keep its memory busy.
//
// The columns are not split over thread blocks beyond the warps of one. A weight of 4096 rows has 128 thread blocks for the
// 132 SMs of an H100. One of 1024 rows has 32, and would be read in 0.6 us by all SMs in place of 2.6 us, but its sums would
// have to meet in a second kernel, which costs as much. (Predicted from rates, not measured.)
template <int kBits>
constexpr int kStages = kBits == 4 ? 4 : 3;

// A lane's share of a step: 32 codes of a row.
template <int kBits>
struct CodeRun {
  static constexpr int kWords = kBits / 4;  // of 16 bytes
  Words<4> at[kWords];

  // Codes 4 i .. 4 i + 3 as bf16, in two pairs. INT4: their levels.
  __device__ void pairs(int i, uint32_t& first, uint32_t& second) const {
    if constexpr (kBits == 4) {
      level_pairs(at[0].at[i / 2] >> i % 2 * 16, first, second);
    } else {
      first = round_pair(code(i, 0), code(i, 1), BFloat16{});
      second = round_pair(code(i, 2), code(i, 3), BFloat16{});
    }
  }

 private:
  __device__ float code(int word, int byte) const {
    const uint32_t biased = at[word / 4].at[word % 4] ^ 0x80808080;
    return float_of(__byte_perm(biased, 0x4B000000, 0x7540 + byte)) - (8388608.0f + 128);
  }
};

// A warp's codes of one step in shared memory: neighbouring lanes in neighbouring words, so that no two meet in a bank.
template <int kBits>
struct CodeStage {
  Words<4> at[2 * kRowTiles][CodeRun<kBits>::kWords][kLanes];

  __device__ void begin_load(int run, const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < CodeRun<kBits>::kWords; ++i) begin_copy(&at[run][i][lane_index()], from + 16 * i);
  }

  __device__ CodeRun<kBits> get(int run) const {
    CodeRun<kBits> codes;
#pragma unroll
    for (int i = 0; i < CodeRun<kBits>::kWords; ++i) codes.at[i] = at[run][i][lane_index()];
    return codes;
  }
};

// The high and low bf16 of two inputs.
struct SplitPair {
  uint32_t high, low;
};

// The largest bf16. An input beyond it could round to Inf, which its low half cannot take back. What is beyond is in the low half
// instead, so an Inf or NaN is there too.
constexpr float kLargest = 3.38953139e38f;

__device__ __forceinline__ float within_bf16(float value) { return fmaxf(fminf(value, kLargest), -kLargest); }

__device__ __forceinline__ SplitPair split(float first, float second) {
  const uint32_t high = round_pair(within_bf16(first), within_bf16(second), BFloat16{});
  float high_first, high_second;
  widen_pair(high, high_first, high_second, BFloat16{});
  return {high, round_pair(first - high_first, second - high_second, BFloat16{})};
}

template <class In>
constexpr bool kIsSplit = !std::is_same_v<In, BFloat16>;

template <class In>
constexpr int kTileInputs = kIsSplit<In> ? 4 : 8;  // of one product of tensor cores

// A lane's share of a step's inputs: 32 elements of one column of the product.
struct InputRun {
  uint32_t pairs[16];  // pair i: elements 2 i and 2 i + 1
};

// The lanes of group g (lane / 4) hold column g. Split inputs: the high halves of input g / 2 if g is even, its low halves
// if g is odd. Both groups need all 32 elements of the input: each lane loads and splits 16 of them and exchanges halves
// with its partner.
template <class In>
__device__ __forceinline__ InputRun load_inputs(const In* from, bool exists) {
  constexpr int kWords = kIsSplit<In> ? 16 * sizeof(In) / 16 : 4;
  const int odd = kIsSplit<In> ? lane_index() / 4 % 2 : 0;
  Words<4> words[kWords] = {};
#pragma unroll
  for (int i = 0; i < kWords && exists; ++i) words[i] = reinterpret_cast<const Words<4>*>(from)[kWords * odd + i];
  InputRun run;
  if constexpr (kIsSplit<In>) {
    float values[16];
#pragma unroll
    for (int i = 0; i < kWords; ++i) widen<In>(words[i], values + i * kVector<In>);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SplitPair mine = split(values[2 * i], values[2 * i + 1]);
      const uint32_t theirs = __shfl_xor_sync(kAllLanes, odd ? mine.high : mine.low, 4);
      run.pairs[i] = odd ? theirs : mine.high;
      run.pairs[8 + i] = odd ? mine.low : theirs;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) run.pairs[i] = words[i / 4].at[i % 4];
  }
  return run;
}

// sums += scale * products of a step, for one tile of 16 rows and kTiles of columns; a lane has rows g and g + 8. In
// INT4 the first half of the products, of pairs 0 .. 7, takes the first scale.
template <int kBits, int kTiles>
__device__ __forceinline__ void add_step(const CodeRun<kBits> (&codes)[2], const RunScales (&scales)[2],
                                         const InputRun (&inputs)[kTiles], float (&sums)[kTiles][4]) {
  constexpr int kNumScales = kBits == 4 ? 2 : 1, kProducts = 8 / kNumScales;
#pragma unroll
  for (int half = 0; half < kNumScales; ++half) {
    float products[kTiles][4] = {};
#pragma unroll
    for (int s = half * kProducts; s < (half + 1) * kProducts; ++s) {
      uint32_t a[4];
      codes[0].pairs(s, a[0], a[2]);
      codes[1].pairs(s, a[1], a[3]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint32_t b[2] = {inputs[n].pairs[2 * s], inputs[n].pairs[2 * s + 1]};
        multiply_tile(a, b, products[n]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) sums[i / 4][i % 4] += products[i / 4][i % 4] * scales[i % 4 / 2].at[half];
  }
}

// Inputs, the weight, and where the results go.
struct Product {
  const void* x;  // [num_inputs, columns]
  int64_t dtype;  // of x and output
  int num_inputs;
  const uint8_t* codes;
  const uint8_t* scales;
  FrozenRows shape;
  const void* bias;  // [rows] or null
  int64_t bias_dtype;
  void* output;  // [num_inputs, rows]

  __device__ void store(int64_t input, int64_t row, float sum) const {
    if (bias) sum += load_element(bias, bias_dtype, row);
    store_element(output, dtype, input * shape.rows + row, sum);
  }
};

// The codes and scales that one lane needs. A step takes 128 columns of the weight, and a lane multiplies 32 of them, in
// each of kRuns rows that lie 8 apart. Codes are copied kAhead steps before they are used, scales are read one before.
template <int kBits>
struct CodesAhead {
  static constexpr int kRuns = 2 * kRowTiles, kAhead = kStages<kBits> - 1;

  const Product& product;
  CodeStage<kBits>* stages;  // of the warp
  int64_t first_row;         // of the lane

  // Lanes behind the last row repeat it, and store nothing.
  __device__ int64_t row(int run) const { return min(first_row + 8 * run, product.shape.rows - 1); }
  __device__ int num_steps() const { return static_cast<int>(product.shape.columns / kStep); }

  // Behind the last step this begins no copies, but a group all the same: groups are counted.
  __device__ void begin_step(int step, int stage) const {
    const int64_t column = static_cast<int64_t>(step) * kStep + lane_index() % 4 * 32;
#pragma unroll
    for (int i = 0; i < kRuns && step < num_steps(); ++i) {
      stages[stage].begin_load(i, product.codes + row(i) * product.shape.code_bytes() + column * kBits / 8);
    }
    end_copies();
  }

  __device__ void load_scales(int step, BFloat16 (&scales)[kRuns]) const {
    const int steps_per_block = static_cast<int>(product.shape.block) / kStep;
    const int index = ::min(step, num_steps() - 1) / steps_per_block;
    const auto* typed = reinterpret_cast<const BFloat16*>(product.scales);
#pragma unroll
    for (int i = 0; i < kRuns; ++i) scales[i] = typed[row(i) * product.shape.num_blocks() + index];
  }
};

template <int kBits>
constexpr int kSharedBytes = kMatmulWarps * kStages<kBits> * static_cast<int>(sizeof(CodeStage<kBits>));

template <int kBits, class In, int kTiles>
__global__ void __launch_bounds__(kMatmulWarps * kLanes, kTiles == 1 ? 2 : 1) multiply_rows(Product product) {
  constexpr int kInputs = kTiles * kTileInputs<In>;
  using Codes = CodesAhead<kBits>;
  ZEROPP_LAUNCHED_SHARED(memory);
  const FrozenRows& shape = product.shape;
  const int warp = threadIdx.x / kLanes, group = lane_index() / 4, quad = lane_index() % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kBlockRows;
  const int first_input = blockIdx.y * kInputs, column_input = group / (kIsSplit<In> ? 2 : 1);
  const In* x = static_cast<const In*>(product.x);
  const Codes codes{product, reinterpret_cast<CodeStage<kBits>*>(memory) + warp * kStages<kBits>, first_row + group};
#pragma unroll
  for (int i = 0; i < Codes::kAhead; ++i) codes.begin_step(warp + i * kMatmulWarps, i);
  BFloat16 scales[Codes::kRuns];
  codes.load_scales(warp, scales);
  float sums[kRowTiles][kTiles][4] = {};
  int stage = 0, free_stage = Codes::kAhead;
  for (int step = warp; step < codes.num_steps(); step += kMatmulWarps) {
    codes.begin_step(step + Codes::kAhead * kMatmulWarps, free_stage);
    free_stage = stage;
    RunScales step_scales[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < Codes::kRuns; ++i) step_scales[i / 2][i % 2] = run_scales(scales[i], kBits);
    codes.load_scales(step + kMatmulWarps, scales);
    InputRun inputs[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int input = first_input + n * kTileInputs<In> + column_input;
      const int64_t column = static_cast<int64_t>(step) * kStep + quad * 32;
      inputs[n] = load_inputs(x + input * shape.columns + column, input < product.num_inputs);
    }
    wait_for_copies<Codes::kAhead>();
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const CodeRun<kBits> runs[2] = {codes.stages[stage].get(2 * t), codes.stages[stage].get(2 * t + 1)};
      add_step<kBits, kTiles>(runs, step_scales[t], inputs, sums[t]);
    }
    stage = stage + 1 == kStages<kBits> ? 0 : stage + 1;
  }
  __syncthreads();  // the memory of all codes is free for the sums
  auto* partial = reinterpret_cast<float(*)[kBlockRows][kInputs]>(memory);
  static_assert(kMatmulWarps * sizeof *partial <= kSharedBytes<kBits>);
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles * kTiles; ++i) {
    const int n = i / (2 * kRowTiles), half = i % (2 * kRowTiles);  // of the rows of a tile: g or g + 8
    const float first = sums[half / 2][n][half % 2 * 2], second = sums[half / 2][n][half % 2 * 2 + 1];
    float* to = partial[warp][8 * half + group] + n * kTileInputs<In>;
    if constexpr (kIsSplit<In>) to[quad] = first + second;
    else to[2 * quad] = first, to[2 * quad + 1] = second;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kInputs * kBlockRows; i += kMatmulWarps * kLanes) {
    const int input = first_input + i / kBlockRows;
    const int64_t row = first_row + i % kBlockRows;
    if (input >= product.num_inputs || row >= shape.rows) continue;
    float sum = 0;
    for (int w = 0; w < kMatmulWarps; ++w) sum += partial[w][i % kBlockRows][i / kBlockRows];
    product.store(input, row, sum);
  }
}

// A warp for each row. Its lanes are those of ops/cpu/frozen_matmul.cpp.
__global__ void __launch_bounds__(kThreads) multiply_elements(Product product) {
  const FrozenRows& shape = product.shape;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (row >= shape.rows) return;
  for (int input = 0; input < product.num_inputs; ++input) {
    float lane = 0;
    for (int64_t b = 0; b < shape.num_blocks(); ++b) {
      float sum = 0;
      for (int64_t i = lane_index(); i < ceil_div(shape.block_size(b), kLanes) * kLanes; i += kLanes) {
        const int64_t column = b * shape.block + i;
        if (column >= shape.columns) continue;  // a product of zeros
        const int code = code_of(product.codes + row * shape.code_bytes(), static_cast<int>(shape.bits), column);
        const float level = static_cast<float>(shape.bits == 4 ? frozen_level_of(code) : code);
        sum += load_element(product.x, product.dtype, input * shape.columns + column) * level;
      }
      const uint8_t* scale = product.scales + (row * shape.num_blocks() + b) * sizeof(BFloat16);
      lane += sum * run_scales(read_unaligned<BFloat16>(scale), shape.bits).at[lane_index() / kRun];
    }
    for (int half = kLanes / 2; half; half /= 2) lane += __shfl_down_sync(kAllLanes, lane, half);
    if (lane_index() == 0) product.store(input, row, lane);
  }
}

// One product, or several side by side. More inputs than those hold lie along the grid's rows.
template <int kBits, class In>
int launch_rows(const Product& product, void* stream) {
  constexpr int kWide = kIsSplit<In> ? 2 : 4;  // as registers hold
  const bool is_narrow = product.num_inputs <= kTileInputs<In>;
  const int64_t inputs = kTileInputs<In> * (is_narrow ? 1 : kWide);
  const dim3 grid(static_cast<unsigned>(ceil_div(product.shape.rows, kBlockRows)),
                  static_cast<unsigned>(ceil_div(product.num_inputs, inputs)));
  const auto kernel = is_narrow ? multiply_rows<kBits, In, 1> : multiply_rows<kBits, In, kWide>;
  return launch_with_shared(kSharedBytes<kBits>, kernel, grid, kMatmulWarps * kLanes, stream, product);
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_matmul)(const void* x, int64_t x_dtype, const uint8_t* codes, const uint8_t* scales,
                             const void* bias, int64_t bias_dtype, int64_t columns, int64_t bits, int64_t block,
                             int64_t num_inputs, int64_t rows, void* out, void* stream) {
  using namespace zeropp;
  const Product product{x, x_dtype, static_cast<int>(num_inputs), codes, scales,
                        {rows, columns, block, bits}, bias, bias_dtype, out};
  if (columns % block == 0 && block % kStep == 0 && is_aligned(codes) && is_aligned(x) && has_even_scales(scales)) {
    return for_dtype(x_dtype, [&](auto type) {
      using In = decltype(type);
      return bits == 8 ? launch_rows<8, In>(product, stream) : launch_rows<4, In>(product, stream);
    });
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, kWarps)));
  return launch(multiply_elements, grid, kThreads, stream, product);
}
