"""Four ranks as two nodes under the default settings, and the bound of a gradient's error there."""

from __future__ import annotations

import torch
import torch.nn as nn
from toy import POLICIES, Reduction

from hf_zeropp import ZeroPPHandle, apply_zeropp

REDUCTION = Reduction(node_bits=8, cross_bits=4, ranks_per_node=2)


def apply(model: nn.Module, overlap: bool, **settings) -> ZeroPPHandle:
    return apply_zeropp(model, {"ranks_per_node": 2, "overlap": overlap} | settings)


def reduction_in(policy: str) -> Reduction:
    return Reduction(8, 4, 2, POLICIES[policy].reduce_dtype or torch.float32)
