// Threads: PyTorch's own pool, so that `torch.set_num_threads` governs these kernels too and no second pool competes.
#pragma once

#include "../abi.h"

// Set by zeropp_set_parallel_for; null means one thread.
extern ZeroppParallelFor zeropp_parallel_for;

namespace {
namespace zeropp {

// Runs body(begin, end) over disjoint ranges that cover [0, count), none of them much smaller than `grain`. Returns
// whether all went well.
template <class Body>
bool parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (zeropp_parallel_for == nullptr || count <= grain) {
    body(0, count);
    return true;
  }
  const ZeroppParallelBody call = [](int64_t begin, int64_t end, void* context) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  return zeropp_parallel_for(0, count, grain, call, const_cast<Body*>(&body)) == 0;
}

}  // namespace zeropp
}  // namespace
