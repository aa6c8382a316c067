"""Encode how slices differ from a base that both sides hold, and bring the base up to date: weight deltas.

Every node keeps a copy of the weights, the base. A rank then sends only the difference between its shard and the base, in few
bits, and every rank that holds the base, the sender included, adds the same decoded difference to it. The next difference is
taken from the updated base, so it includes whatever this one rounded away.

Declarations and public functions stand side by side as in ``wire.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops import reference
from hf_zeropp.ops.checks import check_same_segments, count_slices, flat_result
from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.operator import Bytes, Floats, Result, check_size
from hf_zeropp.ops.register import operator


@operator(reference.quantize_difference, out="uint8_t*")
def _quantize_difference(input: Floats, base: Bytes, base_layout: WireLayout, layout: WireLayout) -> Result:
    check_same_segments(base_layout, layout)
    num_slices = count_slices("input", input, layout.numel)
    check_size("base", base, num_slices * base_layout.nbytes)
    return flat_result(num_slices, layout.nbytes, torch.uint8, input.device)


def quantize_difference(
    input: Tensor, base: Tensor, base_layout: WireLayout, layout: WireLayout, *, out: Tensor | None = None
) -> Tensor:
    """Encode the difference between K slices and the values in ``base``. Raw parts of ``layout`` carry the values themselves.

    Args:
        input: K * layout.numel elements, contiguous, in fp32, bf16 or fp16.
        base: uint8 [K, base_layout.nbytes].
        base_layout: of one slice of ``base``; the segment sizes are those of ``layout``.
        layout: of one slice of the result.
        out: uint8, K * layout.nbytes bytes, every one of which is written. None for a new tensor.

    Returns:
        uint8 [K * layout.nbytes], or ``out``.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: layouts of other segments, or sizes, devices or strides that do not fit.
    """
    return _quantize_difference(input, base, base_layout, layout, out=out)


# Nothing but the wire and the base goes into an update. The sender has exact values and must not use them: ranks that
# hold the same base and decode the same wire get equal bits, and only then does the next difference mean the same to
# all.
@operator(reference.dequantize_update, out="uint8_t*")
def _dequantize_update(wire: Bytes, layout: WireLayout, base: Bytes, base_layout: WireLayout) -> Result:
    # Blocks and bits of the two layouts may differ: the base is usually 16-bit, and differences have a few bits.
    check_same_segments(base_layout, layout)
    num_slices = count_slices("wire", wire, layout.nbytes)
    check_size("base", base, num_slices * base_layout.nbytes)
    return flat_result(num_slices, base_layout.nbytes, torch.uint8, base.device)


def dequantize_update(
    wire: Tensor, layout: WireLayout, base: Tensor, base_layout: WireLayout, *, out: Tensor | None = None
) -> Tensor:
    """Add the differences in ``wire`` to the values in ``base``, in fp32, and encode the sums as the base is encoded.

    Raw parts of ``wire`` replace those of the base.

    Args:
        wire: uint8 [K, layout.nbytes].
        layout: of one slice of ``wire``.
        base: uint8 [K, base_layout.nbytes].
        base_layout: of one slice of ``base`` and of the result; the segment sizes are those of ``layout``.
        out: uint8, K * base_layout.nbytes bytes, every one of which is written. It may be ``base``, to update it in place.
            None for a new tensor.

    Returns:
        uint8 [K * base_layout.nbytes], or ``out``.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: layouts of other segments, or sizes, devices or strides that do not fit.
    """
    return _dequantize_update(wire, layout, base, base_layout, out=out)
