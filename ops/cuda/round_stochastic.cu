// Round fp32 to bf16, up or down at random: a thread for each eight elements, which are written as 16 bytes.
#include "launch.cuh"

namespace {
namespace zeropp {

constexpr int kRoundedPerThread = 8;

__device__ inline uint32_t random_bits(uint64_t word, int64_t i) { return word >> 16 * (i % 4) & 0xFFFF; }

__global__ void __launch_bounds__(kThreads)
round_eights(const float* values, int64_t seed, int64_t numel, bool has_vectors, uint16_t* output) {
  const int64_t first = kRoundedPerThread * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (first >= numel) return;
  if (!has_vectors || first + kRoundedPerThread > numel) {
    for (int64_t i = first; i < min(first + kRoundedPerThread, numel); ++i) {
      output[i] = round_stochastic(values[i], random_bits(random_word(seed, i / 4), i));
    }
    return;
  }
  Words<4> rounded;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Words<4> from = *reinterpret_cast<const Words<4>*>(values + first + 4 * half);
    const uint64_t word = random_word(seed, first / 4 + half);
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = round_stochastic(float_of(from.at[i]), random_bits(word, i));
    rounded.at[2 * half] = bits[0] | bits[1] << 16;
    rounded.at[2 * half + 1] = bits[2] | bits[3] << 16;
  }
  *reinterpret_cast<Words<4>*>(output + first) = rounded;
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(round_stochastic)(const float* values, int64_t seed, int64_t numel, uint16_t* out, void* stream) {
  using namespace zeropp;
  const bool has_vectors = is_aligned(values) && is_aligned(out);
  const dim3 grid(static_cast<unsigned>(ceil_div(numel, kRoundedPerThread * kThreads)));
  return launch(round_eights, grid, kThreads, stream, values, seed, numel, has_vectors, out);
}
