// The C ABI: all that crosses the border between Python and the two compiled libraries. Plain C.
//
// libzeropp_cpu exports every kernel below once per instruction set, for example zeropp_quantize_avx512. libzeropp_cuda
// exports the same kernels as zeropp_quantize_cuda and so on. ZEROPP_ISA is that suffix, and CMake defines it. Sources
// include this header, so the compiler refuses a definition with other arguments. Python derives the same prototypes
// from the declarations of the operators (hf_zeropp/ops/operator.py), and tests/ops/test_abi.py compares both.
//
// A kernel takes the arguments of its operator in their order, then counts, then the tensors to fill, then a CUDA
// stream:
//
// - Pointers are to the first elements of tensors. The caller has checked them: contiguous, of the sizes that the
//   layouts ask for, and not empty. `x_dtype` is the dtype of tensor `x`.
// - A ZeroppLayout lies in the host's memory, and its parts lie where the tensors do: on the GPU for CUDA kernels.
// - `num_slices` counts the slices of the result.
// - `stream` is the CUDA stream to run in. CPU kernels ignore it.
// - The result is a ZeroppStatus.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
#define ZEROPP_EXTERN extern "C"
#else
#define ZEROPP_EXTERN extern
#endif
#define ZEROPP_EXPORT ZEROPP_EXTERN __attribute__((visibility("default")))
#define ZEROPP_JOIN_(a, b) a##_##b
#define ZEROPP_JOIN(a, b) ZEROPP_JOIN_(a, b)
#define ZEROPP_KERNEL(name) ZEROPP_EXPORT int ZEROPP_JOIN(zeropp_##name, ZEROPP_ISA)

// ---- Types.

// A dtype code is a position in `FLOAT_DTYPES` of hf_zeropp/ops/format.py.
enum ZeroppDType { kFloat32, kBFloat16, kFloat16 };

// hf_zeropp/ops/native.py turns these into exceptions.
enum ZeroppStatus {
  kOk = 0,
  kParallelFailed = 1,
  kCudaError = 1000,  // and above: 1000 + cudaError_t, for which zeropp_error_text has words
};

// Offsets of one segment in a slice: a row of `WireLayout.table`. Bytes count from the start of the slice's wire.
struct ZeroppPart {
  int64_t element;      // first element, in the slice
  int64_t numel;
  int64_t bits;         // of a code: 2 to 8; 0 for raw
  int64_t scales;       // byte offset of the scales
  int64_t codes;        // byte offset of the codes or raw bytes
  int64_t end;          // byte offset behind the padding
  int64_t first_block;  // index of its first block, in the slice; raw segments count blocks too
};
typedef struct ZeroppPart ZeroppPart;

// `WireLayout` of hf_zeropp/ops/format.py, which decides where everything lies.
struct ZeroppLayout {
  const ZeroppPart* parts;
  int64_t num_parts;
  int64_t numel;      // elements of one slice
  int64_t nbytes;     // bytes of one slice on the wire
  int64_t block;      // elements that share one scale
  int64_t raw_dtype;  // ZeroppDType of raw segments
};
typedef struct ZeroppLayout ZeroppLayout;

// `torch_parallel_for`, a stable C function of libtorch_cpu. It returns nonzero after an exception.
typedef void (*ZeroppParallelBody)(int64_t begin, int64_t end, void* context);
typedef int (*ZeroppParallelFor)(int64_t begin, int64_t end, int64_t grain, ZeroppParallelBody body, void* context);

// ---- libzeropp_cpu alone.

// Hands over PyTorch's thread pool. Null means that kernels run on one thread.
ZEROPP_EXPORT void zeropp_set_parallel_for(ZeroppParallelFor parallel_for);

// Does this machine run the kernels of this instruction set?
ZEROPP_EXPORT int zeropp_supports(const char* name);

// ---- libzeropp_cuda alone.

// Returns the meaning of a status from kCudaError on.
ZEROPP_EXPORT const char* zeropp_error_text(int status);

// Counts the devices, without a context on any. Returns a ZeroppStatus: an error if there is none, or the library has no code
// that any of them and the driver take.
ZEROPP_EXPORT int zeropp_find_devices(int* count);

// ---- Kernels, in both libraries.
#if defined(ZEROPP_ISA)

// Encodes slices. Slice r * C + c of the input becomes slice c * R + r of the wire, with R = slice_rows.
ZEROPP_KERNEL(quantize)(const void* input, int64_t input_dtype, const ZeroppLayout* layout, int64_t slice_rows,
                        int64_t num_slices, uint8_t* out, void* stream);

// Decodes slices, permuted in the same way.
ZEROPP_KERNEL(dequantize)(const uint8_t* wire, const ZeroppLayout* layout, int64_t dtype, int64_t slice_rows,
                          int64_t num_slices, void* out, void* stream);

// out = (initial + sum of the sources) * scale. wire: [num_sources, num_slices, nbytes]; initial: [num_slices, numel]
// or null.
ZEROPP_KERNEL(dequantize_sum)(const uint8_t* wire, const ZeroppLayout* layout, int64_t num_sources,
                              const float* initial, float scale, int64_t dtype, int64_t num_slices, void* out,
                              void* stream);

// Encodes initial + sum of the sources.
ZEROPP_KERNEL(dequantize_sum_quantize)(const uint8_t* wire, const ZeroppLayout* layout, const ZeroppLayout* out_layout,
                                       int64_t num_sources, const float* initial, int64_t num_slices, uint8_t* out,
                                       void* stream);

// Encodes input - base; raw parts of `layout` carry the input itself.
ZEROPP_KERNEL(quantize_difference)(const void* input, int64_t input_dtype, const uint8_t* base,
                                   const ZeroppLayout* base_layout, const ZeroppLayout* layout, int64_t num_slices,
                                   uint8_t* out, void* stream);

// Encodes base + wire as the base is encoded; raw parts of the wire replace the base's. `out` may be `base`.
ZEROPP_KERNEL(dequantize_update)(const uint8_t* wire, const ZeroppLayout* layout, const uint8_t* base,
                                 const ZeroppLayout* base_layout, int64_t num_slices, uint8_t* out, void* stream);

// Encodes how slices differ from their base (changes_format.h). wire: [num_slices, capacity]; sizes: what each row takes
// of it. starts: [num_slices, blocks], where payloads begin in a row. The tensors but `sizes` may be empty.
ZEROPP_KERNEL(encode_changes)(const uint8_t* input, const uint8_t* base, int64_t num_slices, int64_t slice_bytes,
                              int64_t* sizes, uint8_t* wire, int64_t* starts, void* stream);

// Applies the changes of slices to their base. The wire of slice k has sizes[k] bytes from offsets[k] on. failed:
// [num_slices], 0 or what is damaged. starts: as above. The tensors but offsets, sizes and `failed` may be empty.
ZEROPP_KERNEL(apply_changes)(const uint8_t* wire, const int64_t* offsets, const int64_t* sizes, uint8_t* base,
                             int64_t wire_bytes, int64_t num_slices, int64_t slice_bytes, int64_t* failed,
                             int64_t* starts, void* stream);

// Encodes the rows of a frozen weight. Scales are bf16.
ZEROPP_KERNEL(frozen_pack)(const void* weight, int64_t weight_dtype, int64_t bits, int64_t block, int64_t rows,
                           int64_t columns, uint8_t* codes, uint8_t* scales, void* stream);

// Decodes the rows of a frozen weight.
ZEROPP_KERNEL(frozen_unpack)(const uint8_t* codes, const uint8_t* scales, int64_t columns, int64_t bits, int64_t block,
                             int64_t dtype, int64_t rows, void* out, void* stream);

// A few rows times a transposed frozen weight, with the bias (or null) added. x: [num_inputs <= 32, columns]; out:
// [num_inputs, rows], in the dtype of x.
ZEROPP_KERNEL(frozen_matmul)(const void* x, int64_t x_dtype, const uint8_t* codes, const uint8_t* scales,
                             const void* bias, int64_t bias_dtype, int64_t columns, int64_t bits, int64_t block,
                             int64_t num_inputs, int64_t rows, void* out, void* stream);

#endif
