// The part of the CPU library that all instruction sets share: which of them this machine runs, and the thread pool.
#include "parallel.h"

#include <cstring>

ZeroppParallelFor zeropp_parallel_for = nullptr;

ZEROPP_EXPORT void zeropp_set_parallel_for(ZeroppParallelFor parallel_for) { zeropp_parallel_for = parallel_for; }

ZEROPP_EXPORT int zeropp_supports(const char* name) {
  if (strcmp(name, "baseline") == 0) return 1;
#if defined(__x86_64__)
  // The same features as in the compiler flags of ops/CMakeLists.txt.
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
