"""Checks that several operators of the wire share, and the results that they return.

They complete the checks that derive from annotations (``operator.py``), which have already made sure of dtypes, devices and
contiguity. All raise ``ValueError`` or ``TypeError``, with a text to which ``Operator.check`` adds the operator's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zeropp.ops.format import FLOAT_DTYPES, WireLayout
from hf_zeropp.ops.operator import Filled, Result, check_size


def flat_result(num_slices: int, slice_size: int, dtype: torch.dtype, device: torch.device) -> Result:
    """Return the result of an operator that fills one tensor [num_slices * slice_size]."""
    return Result(device, (num_slices,), (Filled((num_slices * slice_size,), dtype),))


def rows_result(num_slices: int, slice_size: int, dtype: torch.dtype, device: torch.device) -> Result:
    """Return the result of an operator that fills one tensor [num_slices, slice_size]."""
    return Result(device, (num_slices,), (Filled((num_slices, slice_size), dtype),))


def count_slices(name: str, tensor: Tensor, slice_size: int, divisor_name: str = "slices", divisor: int = 1) -> int:
    """Return how many slices a tensor holds.

    Args:
        name: the argument's name, for errors.
        tensor: contiguous, of any shape.
        slice_size: elements of one slice; bytes, on the wire.
        divisor_name: the name of ``divisor``, for errors.
        divisor: must divide the number of slices.
    """
    num_slices = tensor.numel() // max(slice_size, 1)  # an empty layout has no slices to tell apart
    if num_slices * slice_size != tensor.numel():
        raise ValueError(
            f"expected {name} to hold whole slices of {slice_size} elements, got {tensor.numel()} elements: "
            "pass the layout it was made with"
        )
    if divisor < 1 or num_slices % divisor:
        raise ValueError(f"expected {divisor_name} >= 1 that divides {num_slices} slices, got {divisor}")
    return num_slices


def count_sums(wire: Tensor, layout: WireLayout, num_sources: int, initial: Tensor | None) -> int:
    """Return P, the number of sums that ``wire`` [num_sources, P, layout.nbytes] gives, to which ``initial`` must fit."""
    # Sources come first in the wire, because an all-to-all receives all that one rank sent as one run of bytes.
    num_sums = count_slices("wire", wire, layout.nbytes, "num_sources", num_sources) // num_sources
    if initial is not None:
        check_size("initial", initial, num_sums * layout.numel)
    return num_sums


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless wires decode to ``dtype``."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"expected dtype float32, bfloat16 or float16, got {dtype}: decode to one of them")


def check_same_segments(*layouts: WireLayout) -> None:
    """Raise unless all layouts have segments of the same sizes: kernels visit their parts side by side."""
    # Parts are matched by position, so an equal number of elements in all is not enough.
    first, *others = layouts
    for other in others:
        sizes, other_sizes = ([segment.numel for segment in layout.segments] for layout in (first, other))
        if sizes != other_sizes:
            raise ValueError(
                f"expected layouts with equal segment sizes, got {sizes} and {other_sizes}: build all from the same "
                "parameters"
            )
