// Round fp32 to bf16, up or down at random.
#include "../format.h"
#include "parallel.h"

ZEROPP_KERNEL(round_stochastic)(const float* values, int64_t seed, int64_t numel, uint16_t* out, void*) {
  using namespace zeropp;
  constexpr int64_t kRun = 1024;
  const bool ok = parallel_for(ceil_div(numel, kRun), 16, [&](int64_t begin, int64_t end) {
    alignas(64) uint64_t words[kRun / 4];
    alignas(64) uint16_t random[kRun];
    for (int64_t first = begin * kRun; first < min(end * kRun, numel); first += kRun) {
      for (int64_t i = 0; i < kRun / 4; ++i) words[i] = random_word(seed, first / 4 + i);
      memcpy(random, words, sizeof random);  // the lowest bits are those of the first element
      const int64_t n = min(kRun, numel - first);
      for (int64_t i = 0; i < n; ++i) out[first + i] = round_stochastic(values[first + i], random[i]);
    }
  });
  return ok ? kOk : kParallelFailed;
}
