// What the CPU library shares between instruction sets: which of them this machine runs, and the thread pool.
#include "../abi.h"
#include "parallel.h"

#include <cstring>

ParallelFor zeropp_parallel_for = nullptr;

extern "C" ZEROPP_EXPORT void zeropp_set_parallel_for(void* address) {
  zeropp_parallel_for = reinterpret_cast<ParallelFor>(address);
}

// Does this machine run the kernels compiled for `name`?
extern "C" ZEROPP_EXPORT int zeropp_supports(const char* name) {
  if (strcmp(name, "baseline") == 0) return 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (strcmp(name, "avx2") == 0) return avx2;
  if (strcmp(name, "avx512") == 0) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return 0;
}
