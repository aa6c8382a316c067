// The C ABI. Every instruction set exports the same functions, its name behind: zeropp_quantize_avx512.
//
// Pointers are to first elements of tensors that the caller has checked: contiguous, sized by the layout, not empty.
// Results are Status codes. The last argument of every kernel is a CUDA stream; on the CPU it has no use.
#pragma once

#define ZEROPP_EXPORT __attribute__((visibility("default")))
#define ZEROPP_JOIN_(a, b) a##_##b
#define ZEROPP_JOIN(a, b) ZEROPP_JOIN_(a, b)
#define ZEROPP_KERNEL(name) extern "C" ZEROPP_EXPORT int ZEROPP_JOIN(zeropp_##name, ZEROPP_ISA)
