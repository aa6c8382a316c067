"""How the gradients of a unit lie in the wires of one reduction, and the sums that wait between micro-steps."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hf_zeropp.comm.two_hops import ReduceLayouts
from hf_zeropp.fsdp.param_shard import ReducedShard


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """How a unit's gradients travel in one reduction.

    Attributes:
        layouts: the wire layouts of both hops.
        parts: the parameters in a slice, in order.
        scale: the factor that the reduction applies to the sum over ranks.
        divisor: by what FSDP2 divides its output after the reduction.
    """

    layouts: ReduceLayouts
    parts: tuple[ReducedShard, ...]
    scale: float
    divisor: float

    def divide(self, reduced: torch.Tensor) -> None:
        """Divide in place as FSDP2 divides its output after the reduction."""
        if self.divisor != 1:
            reduced.div_(self.divisor)

    def adds_up_with(self, other: Form) -> bool:
        """Return whether sums of both forms are sums of the same things."""
        if self is other:
            return True
        has_same_params = [id(one.param) for one in self.parts] == [id(one.param) for one in other.parts]
        own, others = (self.layouts, self.scale, self.divisor), (other.layouts, other.scale, other.divisor)
        return has_same_params and own == others


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


def scale_of(op: ReduceOp | ReduceOp.RedOpType, world_size: int) -> float:
    """Return the factor that a reduce op applies to the sum over ranks.

    Raises:
        ValueError: the op is neither a sum, nor a mean, nor a pre-multiplied sum.
    """
    # A ReduceOp carries the factor of a pre-multiplied sum where only its pickled state shows it.
    # (`type`, not `isinstance`: ReduceOp claims its own enum members as instances.)
    state: Any = cast(Any, op).__getstate__() if type(op) is ReduceOp else (op, None)
    kind, factor = state
    if kind == ReduceOp.SUM:
        return 1.0
    if kind == ReduceOp.AVG:
        return 1.0 / world_size
    if kind == ReduceOp.PREMUL_SUM:
        return float(factor)
    raise ValueError(
        f"Gradients can be reduced by SUM, AVG or a pre-multiplied sum, got {kind} on rank {dist.get_rank()}."
    )
