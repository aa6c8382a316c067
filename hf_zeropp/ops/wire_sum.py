"""Add up slices that several ranks sent: the operators of the gradient reduction (qgZ, ZeRO++ section 3.3).

Declarations and public functions stand side by side as in ``wire.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops import reference
from hf_zeropp.ops.checks import (
    check_dtype,
    check_rotation,
    check_same_segments,
    count_slices,
    count_sums,
    rows_result,
)
from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.operator import Bytes, Fp32, Result, UpdatedBytes, check_size
from hf_zeropp.ops.register import operator


@operator(reference.dequantize_sum, out="void*")
def _dequantize_sum(
    wire: Bytes,
    layout: WireLayout,
    num_sources: int,
    initial: Fp32 | None,
    scale: float,
    dtype: torch.dtype,
    rotate: bool,
) -> Result:
    check_dtype(dtype)
    check_rotation(layout, rotate)
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
    rotate: bool = False,
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
        rotate: rotate the sum before it is scaled. This undoes the rotation of sources that were rotated when encoded.
        out: P * layout.numel elements of ``dtype``. It may be ``initial``, to accumulate in place. None for a new tensor.

    Returns:
        [P, layout.numel] in ``dtype``, or ``out``.

    Raises:
        TypeError: a tensor or ``dtype`` of another dtype.
        ValueError: sizes, devices or strides that do not fit, or a layout with gaps without ``out``.
    """
    return _dequantize_sum(wire, layout, num_sources, initial, scale, dtype, rotate, out=out)


# This operator needs no ``rotate``. A rotation is linear, so the sum of rotated slices is the rotated sum, and crosses
# the nodes as it is. The last ``dequantize_sum`` rotates it back, once, after all sources are added.
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


@operator(reference.quantize_with_feedback, out="uint8_t*")
def _quantize_with_feedback(
    wire: Bytes | None,
    layout: WireLayout,
    out_layout: WireLayout,
    residual_layout: WireLayout,
    num_sources: int,
    initial: Fp32 | None,
    rotate: bool,
    decay: float,
    rescale: float,
    residual: UpdatedBytes,
) -> Result:
    check_same_segments(layout, out_layout, residual_layout)
    check_rotation(out_layout, rotate)
    _check_residual_layout(out_layout, residual_layout)
    # With a decay of 0 the residual would become itself, and never take up an error.
    if not 0 < decay <= 1:
        raise ValueError(f"expected a decay in (0, 1], got {decay}")
    # Without a wire, ``initial`` is the whole sum: the gradients of this rank where a node has no other rank, or the
    # partial sums of earlier micro-steps where the last one has no gradients.
    if wire is not None:
        num_sums = count_sums(wire, layout, num_sources, initial)
    elif initial is not None and num_sources == 0:
        num_sums = count_slices("initial", initial, out_layout.numel)
    else:
        raise ValueError("expected a wire, or num_sources=0 and what to start from, got neither")
    check_size("residual", residual, num_sums * residual_layout.nbytes)
    return rows_result(num_sums, out_layout.nbytes, torch.uint8, residual.device)


def _check_residual_layout(out_layout: WireLayout, residual_layout: WireLayout) -> None:
    # Kernels encode the same tile with both layouts, so it must hold whole blocks in both.
    if [part.bits == 0 for part in residual_layout.parts] != [part.bits == 0 for part in out_layout.parts]:
        raise ValueError("expected residual_layout to quantize the parts that out_layout quantizes, and no others")
    if residual_layout.block != out_layout.block:
        raise ValueError(
            f"expected residual_layout with the blocks of out_layout, {out_layout.block}, got {residual_layout.block}"
        )


def quantize_with_feedback(
    wire: Tensor | None,
    layout: WireLayout,
    out_layout: WireLayout,
    residual: Tensor,
    residual_layout: WireLayout,
    *,
    num_sources: int,
    initial: Tensor | None = None,
    rotate: bool = False,
    decay: float = 1.0,
    rescale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Encode a sum with error feedback: the residual keeps the error of one call, and the next call adds it.

    With t the sum of ``dequantize_sum_quantize`` (rotated, if asked) and e = residual * rescale, t + e is encoded. With r the
    error of that, the residual becomes (1 - decay) e + decay r (LoCo, arXiv 2407.04480; r alone for a decay of 1). A block of
    the residual that is not finite counts as zero. Raw parts have no error, and their residual stays as it is.

    Args:
        wire: uint8 [num_sources, P, layout.nbytes], or None, if the sum is ``initial`` alone.
        layout: of one slice of ``wire``.
        out_layout: of one slice of the result.
        residual: uint8 [P, residual_layout.nbytes], changed in place; zeros to begin with.
        residual_layout: quantizes the parts that ``out_layout`` quantizes, in blocks of the same size.
        num_sources: ranks whose slices are added; 0 without a wire.
        initial: fp32 [P, layout.numel], or None to start from source 0.
        rotate: rotate the sum before it is encoded.
        decay: weight of the newest error in the residual, in (0, 1].
        rescale: factor of the residual before it is added.
        out: uint8, P * out_layout.nbytes bytes, every one of which is written. None for a new tensor.

    Returns:
        uint8 [P, out_layout.nbytes], or ``out``.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: layouts, sizes, devices or strides that do not fit, or neither ``wire`` nor ``initial``.
    """
    # The tensor that is updated comes last, beside ``out``, which PyTorch's schema also marks as written.
    arguments = (wire, layout, out_layout, residual_layout, num_sources, initial, rotate, decay, rescale, residual)
    return _quantize_with_feedback(*arguments, out=out)
