// Threads: PyTorch's own pool, so that `torch.set_num_threads` governs these kernels too and no second pool competes.
#pragma once

#include <cstdint>

// The signature of `torch_parallel_for`, a stable C function of libtorch_cpu; it returns nonzero after an exception.
using ParallelBody = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int (*)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);

// Handed over by zeropp_set_parallel_for; null means serial.
extern ParallelFor zeropp_parallel_for;

namespace {
namespace zeropp {

// body(begin, end) over disjoint ranges that cover [0, count), none much smaller than `grain`.
template <class Body>
bool parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (zeropp_parallel_for == nullptr || count <= grain) {
    body(0, count);
    return true;
  }
  const ParallelBody call = [](int64_t begin, int64_t end, void* context) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  return zeropp_parallel_for(0, count, grain, call, const_cast<Body*>(&body)) == 0;
}

}  // namespace zeropp
}  // namespace
