// The C ABI. Every instruction set exports the same functions, its name behind: zeropp_quantize_avx512, and the CUDA
// library as well: zeropp_quantize_cuda.
//
// Pointers are to first elements of tensors that the caller has checked: contiguous, sized by the layout, not empty.
// A Layout is the host's; its parts lie where the tensors do. Results are Status codes (format.h). The last argument of
// every kernel is the CUDA stream it runs on; on the CPU it has no use.
#pragma once

#define ZEROPP_EXPORT __attribute__((visibility("default")))
#define ZEROPP_JOIN_(a, b) a##_##b
#define ZEROPP_JOIN(a, b) ZEROPP_JOIN_(a, b)
#define ZEROPP_KERNEL(name) extern "C" ZEROPP_EXPORT int ZEROPP_JOIN(zeropp_##name, ZEROPP_ISA)
