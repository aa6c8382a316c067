"""How the gradients of a unit lie in the wires of one reduction, and the sums that wait between micro-steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from hf_zeropp.comm.two_hops import ReduceLayouts
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.layouts import reduce_layouts
from hf_zeropp.fsdp.param_shard import ParamShard, ReducedShard


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
        divisor: by what FSDP2 divides its output after the reduction.
    """

    layouts: ReduceLayouts
    columns: tuple[Column, ...]
    scale: float
    divisor: float

    def divide(self, reduced: torch.Tensor) -> torch.Tensor:
        """Divide in place as FSDP2 divides its output after the reduction."""
        return reduced if self.divisor == 1 else reduced.div_(self.divisor)

    def widen(self, flat: torch.Tensor, missing: frozenset[DTensor], num_ranks: int) -> torch.Tensor:
        """Return the flat gradient [W * S] in the dtype of the wires, with zeros for the parameters that are missing in it.

        FSDP2 leaves those out. They may be others on other ranks, and then ranks would exchange pieces of different sizes.
        """
        layout = self.layouts.node_hop
        if flat.numel() == num_ranks * layout.numel:
            return flat.to(layout.raw_dtype)
        full = torch.zeros(num_ranks, layout.numel, dtype=layout.raw_dtype, device=flat.device)
        start, slices = 0, flat.view(num_ranks, -1)
        for column in self.columns:
            if column.param not in missing:
                end = start + column.shard.padded_numel
                column.of(full).copy_(slices[:, start:end])
                start = end
        return full.view(-1)

    def narrow(self, reduced: torch.Tensor, missing: frozenset[DTensor], output: torch.Tensor) -> None:
        """Write a reduced slice [S] into FSDP2's output, which has no place for the parameters that are missing."""
        start = 0
        for column in self.columns:
            if column.param not in missing:
                end = start + column.shard.padded_numel
                output[start:end].copy_(column.of(reduced))
                start = end

    def adds_up_with(self, other: Form) -> bool:
        """Return whether sums of both forms are sums of the same things."""
        if self is other:
            return True
        has_same_params = [id(one.param) for one in self.columns] == [id(one.param) for one in other.columns]
        own, others = (self.layouts, self.scale, self.divisor), (other.layouts, other.scale, other.divisor)
        return has_same_params and own == others


class Forms:
    """The forms of one unit's reductions. The last one is kept as long as nothing of it changes.

    Args:
        config: the settings of the run.
    """

    def __init__(self, config: ZeroPPConfig) -> None:
        self._config = config
        self._layouts: dict[object, ReduceLayouts] = {}
        self._last: Form | None = None
        self._last_key: tuple[object, ...] = ()

    def of(
        self, parts: Sequence[ReducedShard], dtype: torch.dtype, scale: float, divisor: float, *, quantizes: bool
    ) -> Form:
        """Return the form of a reduction in ``dtype`` of ``parts``: the sum over ranks, times ``scale``, over ``divisor``."""
        key = (parts, dtype, scale, divisor, quantizes)
        # ``parts`` is compared by identity, because parameters have an equality of their own, element by element.
        if self._last is None or self._last_key[0] is not parts or self._last_key[1:] != key[1:]:
            columns, start = [], 0
            for reduced in parts:
                columns.append(Column(reduced.param, start, reduced.shard))
                start += reduced.shard.padded_numel
            layouts = self.layouts(tuple(column.shard for column in columns), dtype, quantizes=quantizes)
            self._last_key, self._last = key, Form(layouts, tuple(columns), scale, divisor)
        return self._last

    def layouts(self, shards: tuple[ParamShard, ...], dtype: torch.dtype, *, quantizes: bool) -> ReduceLayouts:
        """Return the wire layouts for reducing ``shards`` in ``dtype``."""
        key = (dtype, quantizes, shards)
        if key not in self._layouts:
            self._layouts[key] = reduce_layouts(self._config, shards, dtype, quantizes=quantizes)
        return self._layouts[key]


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
