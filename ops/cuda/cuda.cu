// The functions of the CUDA library that are no kernels: words for errors, and a look for devices.
#include <cuda_runtime.h>

#include "../abi.h"

ZEROPP_EXPORT const char* zeropp_error_text(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status - kCudaError));
}

ZEROPP_EXPORT int zeropp_find_devices(int* count) {
  const cudaError_t error = cudaGetDeviceCount(count);
  return error == cudaSuccess ? kOk : kCudaError + static_cast<int>(error);
}
