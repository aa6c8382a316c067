"""Four ranks as two nodes under the default settings, and the bound of a gradient's error there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from toy import POLICIES, Reduction, backward

from hf_zeropp import ZeroPPHandle, apply_zeropp

REDUCTION = Reduction(node_bits=8, cross_bits=4, ranks_per_node=2)


def apply(model: nn.Module, overlap: bool, **settings) -> ZeroPPHandle:
    return apply_zeropp(model, {"ranks_per_node": 2, "overlap": overlap} | settings)


def accumulate(model: nn.Module, handle: ZeroPPHandle, rank: int, steps: Sequence[int]) -> None:
    """Run a micro-step for each number of ``steps``, of which the last one ends the step."""
    for index, step in enumerate(steps):
        handle.set_last_micro_step(index == len(steps) - 1)
        backward(model, rank, step)


def reduction_in(policy: str) -> Reduction:
    return Reduction(8, 4, 2, POLICIES[policy].reduce_dtype or torch.float32)
