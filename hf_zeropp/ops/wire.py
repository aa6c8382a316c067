"""Encode slices for the wire and decode them: ``quantize`` and ``dequantize``.

Each operator stands here twice. The first function, with a leading underscore, declares it: the annotations say how its
arguments look to PyTorch and to C (``operator.py``), the body checks them and returns what comes out. The second is the public
function, with defaults and documentation. ``wire_sum.py`` and ``wire_delta.py`` hold the other operators in the same form, and
``ops/README.md`` explains how to add one.

The mathematics is in ``reference.py``, and the format is in ``format.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops import reference
from hf_zeropp.ops.checks import check_dtype, count_slices, flat_result
from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.operator import Bytes, Floats, Result
from hf_zeropp.ops.register import operator


# Encoding and decoding permute slices while they read and write them anyway. A permutation of its own would copy the
# unit once more, and it would need a second buffer of its size.
@operator(reference.quantize, out="uint8_t*")
def _quantize(input: Floats, layout: WireLayout, slice_rows: int) -> Result:
    num_slices = count_slices("input", input, layout.numel, "slice_rows", slice_rows)
    return flat_result(num_slices, layout.nbytes, torch.uint8, input.device)


def quantize(input: Tensor, layout: WireLayout, *, slice_rows: int = 1, out: Tensor | None = None) -> Tensor:
    """Encode K slices for the wire (qwZ and qgZ, ZeRO++ sections 3.1 and 3.3).

    Args:
        input: K * layout.numel elements of any shape, contiguous, in fp32, bf16 or fp16.
        layout: of one slice.
        slice_rows: R of K = R * C. Slice r * C + c of the input becomes slice c * R + r of the wire: rank order
            y * N + x becomes [x, y], as the two hops of a collective need it.
        out: uint8, K * layout.nbytes bytes, every one of which is written. None for a new tensor.

    Returns:
        uint8 [K * layout.nbytes], or ``out``.

    Raises:
        TypeError: ``input`` or ``out`` of another dtype.
        ValueError: sizes, devices or strides that do not fit.
    """
    return _quantize(input, layout, slice_rows, out=out)


@operator(reference.dequantize, out="void*")
def _dequantize(wire: Bytes, layout: WireLayout, dtype: torch.dtype, slice_rows: int) -> Result:
    check_dtype(dtype)
    num_slices = count_slices("wire", wire, layout.nbytes, "slice_rows", slice_rows)
    return flat_result(num_slices, layout.numel, dtype, wire.device)


def dequantize(
    wire: Tensor, layout: WireLayout, *, dtype: torch.dtype, slice_rows: int = 1, out: Tensor | None = None
) -> Tensor:
    """Decode K slices.

    Args:
        wire: uint8, K * layout.nbytes bytes.
        layout: of one slice.
        dtype: fp32, bf16 or fp16.
        slice_rows: R of K = R * C. Slice r * C + c of the wire becomes slice c * R + r of the output, so decoding with C
            undoes the order of encoding with R.
        out: K * layout.numel elements of ``dtype``. None for a new tensor.

    Returns:
        [K * layout.numel] in ``dtype``, or ``out``.

    Raises:
        TypeError: ``wire``, ``dtype`` or ``out`` of another dtype.
        ValueError: sizes, devices or strides that do not fit.
    """
    return _dequantize(wire, layout, dtype, slice_rows, out=out)
