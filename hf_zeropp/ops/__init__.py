"""Operators on wire buffers: quantize, dequantize and sum, on CPU and CUDA."""

from hf_zeropp.ops.kernels import CompiledKernels, compiled_kernels, kernel_info, set_kernels
from hf_zeropp.ops.wire import (
    dequantize,
    dequantize_sum,
    dequantize_sum_quantize,
    dequantize_update,
    quantize,
    quantize_difference,
    quantize_with_feedback,
)

__all__ = [
    "CompiledKernels",
    "compiled_kernels",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_quantize",
    "dequantize_update",
    "kernel_info",
    "quantize",
    "quantize_difference",
    "quantize_with_feedback",
    "set_kernels",
]
