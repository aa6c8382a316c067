// Multiply a few rows of activations by a frozen weight. Generation reads codes this way and never makes a dense
// weight.
//
// A group of weight rows passes a run of the inputs' columns together, so that the inputs come from the first-level
// cache. Of each row and input 32 partial sums ("lanes") are kept, as the operator is defined (frozen_reference.py).
//
// [Note: exact products] An input of 16 bits has a significand of at most 11 bits, a level one of at most 7: their product
// is exact in fp32. A fused multiply-add then has the bits of a product and a sum that round apart, which the definition
// asks for, at half the instructions. Two things are left to the others: inputs of 32 bits, and inputs so large that a
// product could be an Inf (an Inf itself, and NaN, are such inputs too).
//
// [Note: codes in registers] With AVX-512, 16 INT4 codes become floats by three instructions: eight bytes are copied to all
// eight words of 64 bits, each word is shifted by another number of bits, and the low nibbles of its halves look up their
// levels in a table of 16. Element k of 16 comes to lie at 2k, and element k + 8 at 2k + 1. The inputs are brought into
// the same order once, before the loop, and the lanes back into theirs at the end.
#include "frozen.h"

#include <algorithm>
#include <vector>

namespace {
namespace zeropp {

constexpr int64_t kGroupRows = 16;   // rows of the weight that pass a run of columns together
constexpr int64_t kRunNumel = 4096;  // elements of all inputs in a run: half of the first-level cache
constexpr int kInputsAtOnce = 8;     // whose sums registers hold
constexpr uint32_t kLargestExact = (127 + 120) << 23;  // 2^120: its products with levels are finite

// Does the loop over blocks want 16 elements in another order?
#if defined(__AVX512F__)
constexpr bool kShuffled4 = true;
#else
constexpr bool kShuffled4 = false;
#endif

// 32 elements of an input, in cache lines of their own.
struct alignas(64) Lanes {
  float at[kMatmulLanes];
};

// Up to kInputsAtOnce inputs as fp32 in whole blocks, zeros behind the last column: then the inner loops need no tail.
struct Inputs {
  int count;
  std::vector<Lanes> values;  // [columns / 32, count]
  bool is_exact;              // [Note: exact products]

  Inputs(const char* x, int64_t dtype, int64_t num_inputs, const FrozenRows& shape)
      : count(static_cast<int>(num_inputs)), values(num_inputs * shape.num_blocks() * shape.block / kMatmulLanes) {
    std::vector<float> input(shape.num_blocks() * shape.block);
    uint32_t amax = 0;
    for (int64_t m = 0; m < num_inputs; ++m) {
      const char* from = x + m * shape.columns * item_size(dtype);
      if (dtype == kFloat32) memcpy(input.data(), from, shape.columns * sizeof(float));
      else if (dtype == kBFloat16) convert(reinterpret_cast<const BFloat16*>(from), shape.columns, input.data());
      else convert(reinterpret_cast<const Float16*>(from), shape.columns, input.data());
      amax = std::max(amax, block_amax(input.data(), shape.columns));
      put(m, input, kShuffled4 && shape.bits == 4);
    }
    is_exact = dtype != kFloat32 && amax < kLargestExact;
  }

 private:
  void put(int64_t m, const std::vector<float>& input, bool shuffles) {
    for (int64_t i = 0; i < static_cast<int64_t>(input.size()); i += 16) {
      float* to = values[i / kMatmulLanes * count + m].at + i % kMatmulLanes;
      for (int k = 0; k < 16; ++k) to[k] = input[i + (shuffles ? k / 2 + k % 2 * 8 : k)];
    }
  }
};

// A run of `numel` codes of a row, in blocks of `block` with 16 bits of scales each.
struct CodeRun {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t numel, block;
};

// lanes[m][l] += scale * (x[m][l] w[l] + x[m][l + 32] w[l + 32] + ...) for each block, with the scale of the lane's half,, and for M inputs. The order of the
// additions is part of the operator's definition, so all instruction sets keep it and give the same bits.
#if defined(__AVX512F__)
template <int kBits>
void load_floats(const uint8_t* codes, __m512 (&floats)[2]) {
  for (int half = 0; half < 2; ++half) {
    if constexpr (kBits == 8) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * half));
      floats[half] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    } else {
      int64_t nibbles;
      memcpy(&nibbles, codes + 8 * half, sizeof nibbles);
      const __m512i shifted = _mm512_srlv_epi64(_mm512_set1_epi64(nibbles), _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28));
      floats[half] = _mm512_permutexvar_ps(shifted, level_floats());
    }
  }
}

template <int kBits, bool kExact, int M>
void add_run(const Lanes* x, const CodeRun& run, Lanes* lanes) {
  __m512 totals[M][2];
  for (int i = 0; i < 2 * M; ++i) totals[i / 2][i % 2] = _mm512_load_ps(lanes[i / 2].at + i % 2 * 16);
  for (int64_t b = 0; b * run.block < run.numel; ++b) {
    __m512 sums[M][2], weights[2];
    for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
    const auto add_codes = [&](const uint8_t* codes) {
      load_floats<kBits>(codes, weights);
      for (int i = 0; i < 2 * M; ++i) {
        const __m512 input = _mm512_load_ps(x[i / 2].at + i % 2 * 16);
        __m512& sum = sums[i / 2][i % 2];
        if (kExact) sum = _mm512_fmadd_ps(input, weights[i % 2], sum);
        else sum = _mm512_add_ps(sum, _mm512_mul_ps(input, weights[i % 2]));
      }
      x += M;
    };
    const int64_t n = min(run.numel - b * run.block, run.block);
    const uint8_t* codes = run.codes + b * run.block * kBits / 8;
    int64_t i = 0;
    for (; i + kMatmulLanes <= n; i += kMatmulLanes) add_codes(codes + i * kBits / 8);
    if (i < n) {  // a row's end
      uint8_t padded[kMatmulLanes] = {};
      memcpy(padded, codes + i * kBits / 8, ceil_div((n - i) * kBits, 8));
      add_codes(padded);
    }
    const RunScales scales = run_scales(load_scale(run.scales, b), kBits);
    for (int m = 0; m < M; ++m) {
      for (int half = 0; half < 2; ++half) {  // a half of the lanes meets one scale
        const __m512 scale = _mm512_set1_ps(scales.at[half]);
        totals[m][half] = _mm512_add_ps(totals[m][half], _mm512_mul_ps(sums[m][half], scale));
      }
    }
  }
  for (int i = 0; i < 2 * M; ++i) _mm512_store_ps(lanes[i / 2].at + i % 2 * 16, totals[i / 2][i % 2]);
}
#else
// The same for one input and one block, whose codes are floats. Not inlined: beside the loop over inputs compilers find no
// vectors.
__attribute__((noinline)) void add_block(const Lanes* __restrict x, int64_t stride, const float* __restrict weights,
                                         int64_t numel, const RunScales& scales, float* __restrict lanes) {
  float sums[kMatmulLanes] = {};
  for (int64_t i = 0; i < numel; i += kMatmulLanes, x += stride) {
    for (int64_t l = 0; l < kMatmulLanes; ++l) sums[l] += x->at[l] * weights[i + l];
  }
  for (int64_t l = 0; l < kRun; ++l) lanes[l] += sums[l] * scales.at[0];
  for (int64_t l = kRun; l < kMatmulLanes; ++l) lanes[l] += sums[l] * scales.at[1];
}

template <int kBits, bool kExact, int M>
void add_run(const Lanes* x, const CodeRun& run, Lanes* lanes) {
  alignas(64) int8_t levels[kMaxBlock];
  alignas(64) float weights[kMaxBlock];
  for (int64_t b = 0; b * run.block < run.numel; ++b) {
    const int64_t n = min(run.numel - b * run.block, run.block), padded = ceil_div(n, kMatmulLanes) * kMatmulLanes;
    const uint8_t* packed = run.codes + b * run.block * kBits / 8;
    const int8_t* codes = kBits == 4 ? levels : reinterpret_cast<const int8_t*>(packed);
    if (kBits == 4) look_up_levels(packed, n, levels);
    for (int64_t i = 0; i < n; ++i) weights[i] = codes[i];
    for (int64_t i = n; i < padded; ++i) weights[i] = 0;
    const RunScales scales = run_scales(load_scale(run.scales, b), kBits);
    for (int m = 0; m < M; ++m) add_block(x + m, M, weights, padded, scales, lanes[m].at);
    x += padded / kMatmulLanes * M;
  }
}
#endif

// The sum of the lanes: the upper half is added to the lower half until one lane is left.
inline float fold(float* lanes, bool is_shuffled) {
  for (int64_t l = 0; l < 16; ++l) lanes[l] += lanes[l + 16];
  if (is_shuffled) {
    float ordered[16];
    for (int k = 0; k < 16; ++k) ordered[k / 2 + k % 2 * 8] = lanes[k];
    memcpy(lanes, ordered, sizeof ordered);
  }
  for (int64_t half = 8; half; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// Where the codes and scales of a weight lie.
struct Weight {
  const uint8_t* codes;
  const uint8_t* scales;
  FrozenRows shape;

  // Blocks [from, to) of a row.
  CodeRun run(int64_t row, int64_t from, int64_t to) const {
    const int64_t end = min(to * shape.block, shape.columns), first = row * shape.num_blocks() + from;
    return {codes + row * shape.code_bytes() + from * shape.block * shape.bits / 8, scales + first * sizeof(BFloat16),
            end - from * shape.block, shape.block};
  }
};

// Fills the lanes [row][m][32] of rows [begin, end) and M inputs.
template <int kBits, bool kExact, int M>
void add_rows(const Inputs& inputs, const Weight& weight, int64_t begin, int64_t end, Lanes* lanes) {
  const int64_t num_blocks = weight.shape.num_blocks(), at_once = max(kRunNumel / (M * weight.shape.block), 1);
  for (int64_t from = 0; from < num_blocks; from += at_once) {
    const int64_t to = min(from + at_once, num_blocks);
    const Lanes* x = inputs.values.data() + from * weight.shape.block / kMatmulLanes * M;
    for (int64_t row = begin; row < end; ++row) {
      const CodeRun run = weight.run(row, from, to);
      // What comes next: the same run of the next row, or, behind the last row, the first one's next run.
      const CodeRun next = row + 1 < end ? weight.run(row + 1, from, to) : weight.run(begin, to, to);
      prefetch(next.codes, run.numel * kBits / 8);
      add_run<kBits, kExact, M>(x, run, lanes + (row - begin) * M);
    }
  }
}

// The same for any number of inputs up to M, of any width.
template <int M = kInputsAtOnce>
void add_inputs(const Inputs& inputs, const Weight& weight, int64_t begin, int64_t end, Lanes* lanes) {
  if constexpr (M > 1) {
    if (inputs.count < M) return add_inputs<M - 1>(inputs, weight, begin, end, lanes);
  }
  const auto add = [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if (inputs.is_exact) add_rows<kBits, true, M>(inputs, weight, begin, end, lanes);
    else add_rows<kBits, false, M>(inputs, weight, begin, end, lanes);
  };
  if (weight.shape.bits == 8) add(std::integral_constant<int, 8>{});
  else add(std::integral_constant<int, 4>{});
}

inline float load_bias(const void* bias, int64_t dtype, int64_t row) {
  if (bias == nullptr) return 0.0f;
  if (dtype == kFloat32) return static_cast<const float*>(bias)[row];
  if (dtype == kBFloat16) return to_float(static_cast<const BFloat16*>(bias)[row]);
  return to_float(static_cast<const Float16*>(bias)[row]);
}

inline void store_result(void* out, int64_t dtype, int64_t index, float value) {
  if (dtype == kFloat32) assign(static_cast<float*>(out)[index], value);
  else if (dtype == kBFloat16) assign(static_cast<BFloat16*>(out)[index], value);
  else assign(static_cast<Float16*>(out)[index], value);
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_matmul)(const void* x, int64_t x_dtype, const uint8_t* codes, const uint8_t* scales,
                             const void* bias, int64_t bias_dtype, int64_t columns, int64_t bits, int64_t block,
                             int64_t num_inputs, int64_t rows, void* out, void*) {
  using namespace zeropp;
  const Weight weight{codes, scales, {rows, columns, block, bits}};
  std::vector<Inputs> groups;
  for (int64_t first = 0; first < num_inputs; first += kInputsAtOnce) {
    const char* from = static_cast<const char*>(x) + first * columns * item_size(x_dtype);
    groups.emplace_back(from, x_dtype, min(num_inputs - first, kInputsAtOnce), weight.shape);
  }
  const auto multiply = [&](int64_t begin, int64_t end) {  // rows of the weight
    Lanes lanes[kGroupRows * kInputsAtOnce];
    int64_t first = 0;
    for (const Inputs& inputs : groups) {
      memset(lanes, 0, (end - begin) * inputs.count * sizeof *lanes);
      add_inputs(inputs, weight, begin, end, lanes);
      for (int64_t i = 0; i < (end - begin) * inputs.count; ++i) {
        const int64_t row = begin + i / inputs.count, m = first + i % inputs.count;
        const float sum = fold(lanes[i].at, kShuffled4 && bits == 4);
        store_result(out, x_dtype, m * rows + row, bias ? sum + load_bias(bias, bias_dtype, row) : sum);
      }
      first += inputs.count;
    }
  };
  const auto run = [&](int64_t first, int64_t last) {  // groups of rows
    for (int64_t group = first; group < last; ++group) {
      multiply(group * kGroupRows, min((group + 1) * kGroupRows, rows));
    }
  };
  const int64_t grain = 32768 / (kGroupRows * (columns + 1)) + 1;
  return parallel_for(ceil_div(rows, kGroupRows), grain, run) ? kOk : kParallelFailed;
}
