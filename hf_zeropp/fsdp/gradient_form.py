"""How the gradients of a unit lie in the wires of one reduction, and the sums that wait between micro-steps."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.tensor import DTensor

from hf_zeropp.comm.two_hops import ReduceLayouts
from hf_zeropp.fsdp.shards import ParamShard


@dataclasses.dataclass(frozen=True, eq=False)  # parameters have an equality of their own, element by element
class Column:
    """One parameter's part of every slice of a unit.

    Attributes:
        param: the sharded parameter.
        start: its first element in the slice.
        shard: its sizes.
    """

    param: DTensor
    start: int
    shard: ParamShard

    def of(self, slices: torch.Tensor) -> torch.Tensor:
        """Return the part of ``slices`` [..., S] that belongs to the parameter, with its padding."""
        return slices[..., self.start : self.start + self.shard.padded_numel]


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """How a unit's gradients travel in one reduction.

    Attributes:
        layouts: the wire layouts of both hops.
        columns: the parameters in a slice, in order.
        scale: the factor that the reduction applies to the sum over ranks.
    """

    layouts: ReduceLayouts
    columns: tuple[Column, ...]
    scale: float

    def adds_up_with(self, other: Form) -> bool:
        """Return whether sums of both forms are sums of the same things."""
        if self is other:
            return True
        has_same_params = [id(one.param) for one in self.columns] == [id(one.param) for one in other.columns]
        return has_same_params and (self.layouts, self.scale) == (other.layouts, other.scale)


@dataclasses.dataclass
class Partial:
    """Gradients of earlier micro-steps, summed within the node.

    Attributes:
        sums: fp32 [Y, S]; bf16 with ``qgz_accumulator="bfloat16"``.
        form: how they travel.
        written: recorded when they were written, on FSDP2's reduce-scatter stream. The next reduction runs on that stream too;
            a delivery for an optimizer's step runs on another one, and waits for it. None on CPU.
    """

    sums: torch.Tensor
    form: Form
    written: torch.Event | None
