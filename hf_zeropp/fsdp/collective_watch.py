"""See the collectives that begin while a mode is on, whoever runs them, and tell what this rank receives in each.

Nothing is exchanged for it. Bytes follow from the sizes of tensors and from the ranks of the group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zeropp.traffic import Bytes, Peers

_COLLECTIVES = ("c10d::", "_c10d_functional::", "_dtensor::")
_KINDS = {
    "all-to-all": ("alltoall", "all_to_all", "shard_dim_alltoall"),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("all_reduce", "allreduce"),
    "broadcast": ("broadcast",),
    "send": ("send", "isend"),
}
"""The beginnings of operators' names, by the kind of the collective. All others are all-gathers."""


class CollectiveWatch(TorchDispatchMode):
    """Sees all operators while it is on, and counts collectives among them.

    Args:
        ranks_per_node: of the cluster.
    """

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node

    @abstractmethod
    def count(self, kind: str, group: dist.ProcessGroup, received: Bytes) -> None:
        """Take note of a collective, such as an "all-reduce", over ``group``."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled, where this mode sees their collectives as well."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A subclass such as DTensor runs first. This mode sees the operators that it is made of. A fake tensor is no such
        # subclass: its own mode, by which DTensor finds out how results are sharded, has left the operator to this one.
        # Nor is a class that leaves operators as they are, such as Parameter, which ``param.data`` shows here.
        if any(
            issubclass(kind, torch.Tensor)
            and kind is not FakeTensor
            and kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__
            for kind in types
        ):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and func.name().startswith(_COLLECTIVES):
            if (group := _group_of(args)) is not None and group.size() > 1:
                kind, is_in_place = _kind_of(func.name()), func.name().startswith("c10d::")
                self.count(kind, group, self._received_in(kind, group, args, result, is_in_place=is_in_place))
        return result

    def _received_in(
        self, kind: str, group: dist.ProcessGroup, args: Sequence[Any], result: Any, *, is_in_place: bool
    ) -> Bytes:
        """Return what a rank receives in a collective, by rings where a backend uses them, and equally where ranks differ."""
        if kind == "send":
            return Bytes()
        peers, ranks = Peers.of(group, self._ranks_per_node), group.size()
        # What is written and what is read: in place, the first two arguments, or the first one where it is both.
        read = _bytes_in(args[1] if is_in_place and _bytes_in(args[1]) else args[0])
        written = _bytes_in(args[0] if is_in_place else result)
        if kind == "all-to-all" and (splits := _output_splits(args, ranks)):
            return self._received_by_splits(group, splits, written // max(1, sum(splits)))
        if kind in ("all-to-all", "gather", "scatter"):
            return peers.bytes_of(written // ranks)
        if kind == "reduce-scatter":
            return peers.bytes_in_ring(read // ranks)
        if kind == "all-reduce":
            return peers.bytes_in_ring(2 * read // ranks)
        # All-gathers, whose output is the larger one; and what passes every rank once, as a broadcast does.
        return peers.bytes_in_ring(max(read, written) // ranks)

    def _received_by_splits(self, group: dist.ProcessGroup, splits: Sequence[int], row_bytes: int) -> Bytes:
        """Return what comes in rows from each rank: expert parallelism sends as many tokens as were routed."""
        received, own = Bytes(calls=1), dist.get_rank()
        for rank, rows in zip(dist.get_process_group_ranks(group), splits, strict=True):
            if rank // self._ranks_per_node != own // self._ranks_per_node:
                received.cross_node += rows * row_bytes
            elif rank != own:
                received.intra_node += rows * row_bytes
        return received


def _kind_of(name: str) -> str:
    operator = name.partition("::")[2].removeprefix("_")
    return next((kind for kind, beginnings in _KINDS.items() if operator.startswith(beginnings)), "all-gather")


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the group of a collective: operators take the object itself, boxed, or its name, as their last text."""
    for argument in reversed(args):
        if isinstance(argument, dist.ProcessGroup):
            return argument
        if isinstance(argument, str):
            return _resolve_process_group(argument)  # type: ignore[arg-type]
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    return None


def _output_splits(args: Sequence[Any], num_ranks: int) -> Sequence[int]:
    """Return how many rows come from each rank: the first list of numbers. There is none where all send equally."""
    lists = (each for each in args if isinstance(each, list | tuple) and len(each) == num_ranks)
    return next((each for each in lists if all(isinstance(size, int) for size in each)), ())


def _bytes_in(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))
