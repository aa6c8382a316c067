// Can a device run the code of this library? CUDA tells by loading it, and makes a context for that: some hundred MB on a GPU that
// the process may never use. The same rules as a function of numbers need none. tests/ops/test_native.py compiles it for the host.
#pragma once

namespace {
namespace zeropp {

enum class Fit { kRuns, kDriverTooOld, kNoCode };

// What the library holds, in the numbers of `__CUDA_ARCH__`: 860 stands for compute capability 8.6.
struct Code {
  const int* architectures;  // those with machine code
  int num_architectures;
  int ptx;      // the oldest one whose PTX is kept, or 0
  int toolkit;  // the version of CUDA that compiled it: 13000 is 13.0
};

// `driver` is the version of CUDA that the driver brings.
constexpr Fit fit_of(const Code& code, int device, int driver) {
  for (int i = 0; i < code.num_architectures; ++i) {
    // Machine code runs on devices of its major version whose minor version is not less.
    const int architecture = code.architectures[i];
    if (architecture / 100 == device / 100 && architecture <= device) return Fit::kRuns;
  }
  // The driver compiles PTX for newer devices, if it knows the PTX of the toolkit.
  if (code.ptx == 0 || device < code.ptx) return Fit::kNoCode;
  return driver < code.toolkit ? Fit::kDriverTooOld : Fit::kRuns;
}

}  // namespace zeropp
}  // namespace
