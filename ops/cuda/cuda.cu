// The functions of the CUDA library that are no kernels: words for errors, and a look for devices.
#include <cuda_runtime.h>

#include "../abi.h"
#include "devices.h"

namespace {

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // nvcc's, also while it compiles for the host
constexpr zeropp::Code kCode = {kArchitectures, sizeof kArchitectures / sizeof *kArchitectures, ZEROPP_OLDEST_PTX,
                                CUDART_VERSION};

cudaError_t look_at(int device, int driver) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return error;
  switch (zeropp::fit_of(kCode, 100 * major + 10 * minor, driver)) {
    case zeropp::Fit::kRuns: return cudaSuccess;
    case zeropp::Fit::kDriverTooOld: return cudaErrorUnsupportedPtxVersion;
    default: return cudaErrorNoKernelImageForDevice;
  }
}

}  // namespace

ZEROPP_EXPORT const char* zeropp_error_text(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status - kCudaError));
}

ZEROPP_EXPORT int zeropp_find_devices(int* count) {
  // Nothing here makes a context: ranks may ask before they choose their GPU, and each would make one on the first.
  int driver = 0;
  cudaError_t error = cudaGetDeviceCount(count);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&driver);
  if (error == cudaSuccess) {
    error = cudaErrorNoDevice;
    for (int device = 0; device < *count && error != cudaSuccess; ++device) error = look_at(device, driver);
  }
  cudaGetLastError();  // or the first launch would report it again
  return error == cudaSuccess ? kOk : kCudaError + static_cast<int>(error);
}
