"""Runs the operators in PyTorch, on any device: the oracle of the tests, and the kernels where there are no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_zeropp.ops.operator import Operator


class ReferenceKernels:
    """The operators in PyTorch, on any device."""

    name = "reference"

    def run(self, operator: Operator, arguments: Sequence[Any], counts: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Fill ``outs`` with the result of the operator's reference; see ``CompiledKernels.run``."""
        # References return new tensors and are copied from only afterwards, so ``out`` may be one of the arguments.
        results = operator.reference(*arguments)
        for out, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
            out.copy_(result.view_as(out))
