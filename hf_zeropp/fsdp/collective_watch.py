"""See the collectives that begin while a watch is on, whoever runs them, and tell what this rank receives in each.

Every collective, of Python, of DTensor or of a compiled function, comes down to an operator of the library ``c10d``. While a
watch is on, these operators have a kernel that looks at their arguments and passes them on. A dispatch mode would meet all
operators, also those that admit no mode, and would get among the modes that a user turns on and off around it.

Nothing is exchanged for it. Bytes follow from the sizes of tensors and from the ranks of the group.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from hf_zeropp.comm.topology import is_own_group
from hf_zeropp.fsdp.comm_objects import is_of_this_package
from hf_zeropp.traffic import Bytes, Peers

logger = logging.getLogger(__name__)

_KINDS = {
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_coalesced_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "recv_": "receive",
    "recv_any_source_": "receive",
}
"""The operators in which a rank receives, and what they are called."""

_watches: weakref.WeakSet[CollectiveWatch] = weakref.WeakSet()
_library: torch.library.Library | None = None  # as long as it lives, the operators have our kernels
_kept: list[object] = []


class CollectiveWatch(ABC):
    """Is told of the collectives that begin while it is on, but for those that this package counts itself.

    Args:
        ranks_per_node: of the cluster.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node

    @abstractmethod
    def count(self, kind: str, received: Bytes) -> None:
        """Take note of a collective, such as an "all-reduce", in which this rank receives something."""

    def turn_on(self) -> None:
        """Count from here on. A watch that is on stays on."""
        _watches.add(self)
        with _harmless(self):
            _install()

    def turn_off(self) -> None:
        """Count no more. The last watch to go takes the kernels off."""
        _watches.discard(self)
        _remove_if_unused()

    def see(self, name: str, args: Sequence[Any]) -> None:
        """Count the operator ``name``, which is about to run with these arguments."""
        group = next(filter(None, map(_group_of, args)))
        if group.size() > 1 and not is_own_group(group):
            received = self._received_in(name, group, args)
            if received.intra_node or received.cross_node:
                self.count(_KINDS[name], received)

    def _received_in(self, name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> Bytes:
        """Return what this rank receives: from each rank, or by a ring where backends use one."""
        peers, num_ranks, num_bytes = Peers.of(group, self._ranks_per_node), group.size(), _bytes_in(args[0])
        sizes = _sizes_by_rank(name, args, num_ranks, num_bytes)
        if sizes is not None:
            return self._received_from(dist.get_process_group_ranks(group), sizes)
        if _KINDS[name] == "reduce-scatter":
            return peers.bytes_in_ring(num_bytes)
        if _KINDS[name] == "all-reduce":
            return peers.bytes_in_ring(2 * num_bytes // num_ranks)
        # The output of an all-gather, and what passes every rank once, as a broadcast does.
        return peers.bytes_in_ring(num_bytes // num_ranks)

    def _received_from(self, ranks: Sequence[int], sizes: Sequence[int]) -> Bytes:
        """Return what comes from each rank: expert parallelism sends as many tokens as were routed."""
        received, own = Bytes(calls=1), dist.get_rank()
        for rank, size in zip(ranks, sizes, strict=True):
            if rank // self._ranks_per_node != own // self._ranks_per_node:
                received.cross_node += size
            elif rank != own:
                received.intra_node += size
        return received


def _install() -> None:
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for name in (name for name in _KINDS if hasattr(torch.ops.c10d, name)):
            _library.impl(name, _kernel_of(name), "BackendSelect", with_keyset=True)
            # Another thread may have found a kernel, and wait for the interpreter to call it. So none is ever freed.
            _kept.append(torch.library.get_kernel(f"c10d::{name}", "BackendSelect"))


def _remove_if_unused() -> None:
    global _library
    if not _watches:
        _library = None


def _kernel_of(name: str) -> Callable[..., Any]:
    """Return a kernel that tells all watches of the operator ``name``, and then runs it."""
    operator = getattr(torch.ops.c10d, name).default
    # Below modes, subclasses and autograd, which see what they would see without it, and above the backends' kernels.
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not is_of_this_package():
            _tell(name, args)
        return operator.redispatch(keys & below, *args, **kwargs)

    return kernel


def _tell(name: str, args: Sequence[Any]) -> None:
    for watch in list(_watches):
        with _harmless(watch):
            watch.see(name, args)
    _remove_if_unused()  # a model that is gone has turned nothing off


@contextmanager
def _harmless(watch: CollectiveWatch) -> Iterator[None]:
    """Let no error inside end a run, which is worth more than a count."""
    try:
        yield
    except Exception:
        logger.warning("What others send is counted no more.", exc_info=True)
        watch.turn_off()


def _group_of(argument: Any) -> dist.ProcessGroup | None:
    is_group = isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())
    return dist.ProcessGroup.unbox(argument) if is_group else None


def _sizes_by_rank(name: str, args: Sequence[Any], num_ranks: int, num_bytes: int) -> Sequence[int] | None:
    """Return how many bytes come from each rank of the group, this one included; None where a ring carries them."""
    if name == "alltoall_base_":
        rows = args[3] or [1] * num_ranks  # no sizes: all ranks send equally
        return [num_bytes * part // max(1, sum(rows)) for part in rows]
    if name in ("alltoall_", "gather_"):
        return [_bytes_in(part) for part in tree_leaves(args[0])] or [0] * num_ranks  # a gather has one receiver
    if name in ("recv_", "scatter_"):
        sender = args[2 if name == "recv_" else 3]
        return [num_bytes * (rank == sender) for rank in range(num_ranks)]
    if name == "recv_any_source_":  # it is not known yet who will send
        return [num_bytes // (num_ranks - 1)] * num_ranks
    return None


def _bytes_in(argument: Any) -> int:
    # Tensors without memory are those of a compiler that tries an operator out.
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
