// What is asked of the CUDA library besides its kernels.
#include <cuda_runtime.h>

#include "../abi.h"
#include "../format.h"

// What a status from kCudaError on means.
extern "C" ZEROPP_EXPORT const char* zeropp_error_text(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status - zeropp::kCudaError));
}

// Is there a device, and a driver that this library can use? kOk, or a status.
extern "C" ZEROPP_EXPORT int zeropp_find_devices(int* count) {
  const cudaError_t error = cudaGetDeviceCount(count);
  return error == cudaSuccess ? zeropp::kOk : zeropp::kCudaError + error;
}
