"""One parameter of a unit in a flat shard, and in a flat gradient."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True)
class ParamShard:
    """One parameter of a unit as every rank's flat shard holds it.

    Attributes:
        name: its name in its module.
        padded_numel: elements in a flat shard, which are equally many on all ranks.
        numel: elements of them that exist on this rank.
        ndim: dimensions of the parameter.
    """

    name: str
    padded_numel: int
    numel: int
    ndim: int


class ReducedShard(NamedTuple):
    """One parameter's place in a reduction.

    Attributes:
        shard: its part of the flat shard.
        param: the sharded parameter.
        has_gradient: whether the micro-step gave it one; otherwise FSDP2 leaves it out of the flat gradient.
    """

    shard: ParamShard
    param: DTensor
    has_gradient: bool
