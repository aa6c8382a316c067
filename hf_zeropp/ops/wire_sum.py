"""Add up slices that several ranks sent: the operators of the gradient reduction (qgZ, ZeRO++ section 3.3).

Declarations and public functions stand side by side as in ``wire.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops import reference
from hf_zeropp.ops.checks import check_dtype, check_same_segments, count_sums, rows_result
from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.operator import Bytes, Fp32, Result
from hf_zeropp.ops.register import operator


@operator(reference.dequantize_sum, out="void*")
def _dequantize_sum(
    wire: Bytes, layout: WireLayout, num_sources: int, initial: Fp32 | None, scale: float, dtype: torch.dtype
) -> Result:
    check_dtype(dtype)
    num_sums = count_sums(wire, layout, num_sources, initial)
    return rows_result(num_sums, layout.numel, dtype, wire.device)


def dequantize_sum(
    wire: Tensor,
    layout: WireLayout,
    *,
    num_sources: int,
    initial: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Decode slices from several ranks and add them up: out[p] = (initial[p] + sum over s of wire[s, p]) * scale.

    Sums are fp32, in the order of the sources, and are rounded to ``dtype`` last.

    Args:
        wire: uint8 [num_sources, P, layout.nbytes].
        layout: of one slice.
        num_sources: ranks whose slices are added.
        initial: fp32 [P, layout.numel], or None to start from source 0.
        scale: factor of the sum.
        dtype: fp32, bf16 or fp16.
        out: P * layout.numel elements of ``dtype``. It may be ``initial``, to accumulate in place. None for a new tensor.

    Returns:
        [P, layout.numel] in ``dtype``, or ``out``.

    Raises:
        TypeError: a tensor or ``dtype`` of another dtype.
        ValueError: sizes, devices or strides that do not fit.
    """
    return _dequantize_sum(wire, layout, num_sources, initial, scale, dtype, out=out)


@operator(reference.dequantize_sum_quantize, out="uint8_t*")
def _dequantize_sum_quantize(
    wire: Bytes, layout: WireLayout, out_layout: WireLayout, num_sources: int, initial: Fp32 | None
) -> Result:
    check_same_segments(layout, out_layout)
    num_sums = count_sums(wire, layout, num_sources, initial)
    return rows_result(num_sums, out_layout.nbytes, torch.uint8, wire.device)


def dequantize_sum_quantize(
    wire: Tensor,
    layout: WireLayout,
    out_layout: WireLayout,
    *,
    num_sources: int,
    initial: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Encode the sum of ``dequantize_sum`` for the next hop, without an fp32 intermediate in memory.

    Args:
        wire: uint8 [num_sources, P, layout.nbytes].
        layout: of one slice of ``wire``.
        out_layout: of one slice of the result. It has the segment sizes of ``layout``; bits, block and raw dtype may differ.
        num_sources: ranks whose slices are added.
        initial: fp32 [P, layout.numel], or None to start from source 0.
        out: uint8, P * out_layout.nbytes bytes, every one of which is written. None for a new tensor.

    Returns:
        uint8 [P, out_layout.nbytes], or ``out``.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: layouts of other segments, or sizes, devices or strides that do not fit.
    """
    return _dequantize_sum_quantize(wire, layout, out_layout, num_sources, initial, out=out)
