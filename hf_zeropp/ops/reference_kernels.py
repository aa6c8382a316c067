"""Runs the operators in PyTorch, on any device: the oracle of the tests, and the kernels where there are no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.operator import Operator
from hf_zeropp.ops.pieces import PIECE_NUMEL, num_elements, run_in_pieces


class ReferenceKernels:
    """The operators in PyTorch, on any device.

    Args:
        piece_numel: elements from which on an operator of the wire runs piece by piece (``pieces.py``), to bound its memory.
    """

    name = "reference"

    def __init__(self, piece_numel: int = PIECE_NUMEL) -> None:
        self._piece_numel = piece_numel

    def run(self, operator: Operator, arguments: Sequence[Any], counts: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Fill ``outs`` with the result of the operator's reference; see ``CompiledKernels.run``."""
        layout = next((value for value in arguments if isinstance(value, WireLayout)), None)
        if layout is not None and num_elements(operator, arguments) > self._piece_numel:
            run_in_pieces(operator, arguments, outs[0], self._piece_numel)
            return
        # References return new tensors and are copied from only afterwards, so ``out`` may be one of the arguments.
        # Bytes of a wire are all written. Results in elements skip gaps, which hold zeros in a reference's result and
        # other chunks' values in ``out``.
        results = operator.reference(*arguments)
        for out, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
            if layout is None or not layout.has_gaps or out.dtype == torch.uint8:
                out.copy_(result.view_as(out))
            else:
                _copy_parts(out, result, layout)


def _copy_parts(out: Tensor, result: Tensor, layout: WireLayout) -> None:
    """Copy the elements that ``layout`` describes. Those in gaps keep their values: [Note: layouts with gaps]."""
    for part in layout.parts:
        here = slice(part.element, part.element + part.numel)
        out.view(-1, layout.numel)[:, here] = result.view(-1, layout.numel)[:, here]
