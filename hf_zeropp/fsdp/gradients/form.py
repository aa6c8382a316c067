"""How the gradients of a unit lie in the wires of one reduction, and the sums that wait between micro-steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

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

    @functools.cached_property
    def missing(self) -> frozenset[DTensor]:
        """The parameters without a gradient on this rank, which FSDP2 leaves out of the flat gradient and of its output."""
        return frozenset(part.param for part in self.parts if not part.has_gradient)

    def divide(self, reduced: torch.Tensor) -> None:
        """Divide in place as FSDP2 divides its output after the reduction."""
        if self.divisor != 1:
            reduced.div_(self.divisor)

    def widen(self, flat: torch.Tensor, num_ranks: int) -> torch.Tensor:
        """Return the flat gradient [W * S] in the dtype of the wires, with zeros for the parameters that are missing in it.

        They may be others on other ranks, and then ranks would exchange pieces of different sizes.
        """
        layout = self.layouts.node_hop
        if not self.missing:
            return flat.to(layout.raw_dtype)
        full = torch.zeros(num_ranks, layout.numel, dtype=layout.raw_dtype, device=flat.device)
        slices = flat.view(num_ranks, -1)
        for part, place in self._present():
            part.of(full).copy_(slices[:, place])
        return full.view(-1)

    def narrow(self, reduced: torch.Tensor, output: torch.Tensor) -> None:
        """Write a reduced slice [S] into FSDP2's output, which has no place for the parameters that are missing."""
        for part, place in self._present():
            output[place].copy_(part.of(reduced))

    def _present(self) -> Iterator[tuple[ReducedShard, slice]]:
        """Iterate over the parameters with a gradient, and their places in a slice without the others."""
        start = 0
        for part in self.parts:
            if part.has_gradient:
                yield part, slice(start, start + part.shard.padded_numel)
                start += part.shard.padded_numel

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
        others: the parameters that got no gradient on this rank so far. Their sums come from other ranks.
        written: recorded when they were written, on FSDP2's reduce-scatter stream. The next reduction runs on that stream too;
            a delivery for an optimizer's step runs on another one, and waits for it. None on CPU.
    """

    sums: torch.Tensor
    form: Form
    others: frozenset[DTensor]
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
