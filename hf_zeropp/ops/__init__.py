"""Operators on wire buffers and frozen weights: quantize, dequantize and sum, on CPU and CUDA.

Reading order: ``format.py`` (bytes), ``blocks.py`` and ``reference.py`` (mathematics), ``wire.py`` (two operators from end to
end), ``operator.py`` and ``register.py`` (how PyTorch and C learn of them), ``kernels.py`` and ``native.py`` (who computes
them). The compiled kernels are in ``ops/`` at the top of the repository; ``ops/README.md`` explains how to add one.
"""

from hf_zeropp.ops.changes_format import (
    DamagedWireError,
    apply_changes,
    changes_buffers,
    encode_changes,
    refuse_damaged,
)
from hf_zeropp.ops.kernels import CompiledKernels, compiled_kernels, kernel_info, set_kernels
from hf_zeropp.ops.wire import dequantize, quantize
from hf_zeropp.ops.wire_delta import dequantize_update, quantize_difference
from hf_zeropp.ops.wire_sum import dequantize_sum, dequantize_sum_quantize

__all__ = [
    "CompiledKernels",
    "DamagedWireError",
    "apply_changes",
    "changes_buffers",
    "compiled_kernels",
    "dequantize",
    "dequantize_sum",
    "dequantize_sum_quantize",
    "dequantize_update",
    "encode_changes",
    "kernel_info",
    "quantize",
    "quantize_difference",
    "refuse_damaged",
    "set_kernels",
]
