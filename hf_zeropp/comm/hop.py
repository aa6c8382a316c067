"""One hop: a collective of wire buffers over one process group, and hops under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from hf_zeropp.comm.wire_buffers import WireBuffers
from hf_zeropp.traffic import Bytes, Peers, Traffic

# torch 2.13 renamed all_gather_into_tensor; both names move one contiguous buffer.
_all_gather_buffers = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter_rows(
    output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Start the reduce-scatters of all rows in one call, which NCCL runs as one kernel."""
    # torch 2.13 renamed the method.
    start = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return _start_rows(start, output, rows, dist.ReduceScatterOptions(), async_op)  # ``reduceOp`` is a sum already


def _all_gather_rows(
    output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Start the all-gathers of all rows in one call, as above; one by one, and to the end, over gloo on a GPU."""
    if rows.is_cuda and group._get_backend(rows.device).name() == "gloo":
        _all_gather_row_by_row(output, rows, group)
        return None
    start = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return _start_rows(start, output, rows, AllgatherOptions(), async_op)


def _all_gather_row_by_row(output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    # Gloo's call for all rows ends the process where tensors are a GPU's (pytorch#152645).
    for into, row in zip(output.unbind(), rows.unbind(), strict=True):
        _all_gather_buffers(into, row, group=group)


def _start_rows(
    start: Callable[..., dist.Work | None], output: torch.Tensor, rows: torch.Tensor, options: Any, async_op: bool
) -> dist.Work | None:
    options.asyncOp = async_op
    work = start(output.unbind(), rows.unbind(), options)
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None


def _all_reduce_in_place(
    output: torch.Tensor, wire: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    return dist.all_reduce(output, group=group, async_op=async_op)


class HopError(RuntimeError):
    """A hop failed: another rank ended, hangs, or runs another hop. The backend's own error names a socket.

    Args:
        hop: the name of the hop.
        group: the ranks that take part.
        cause: the backend's error.

    Attributes:
        unit: the name of the unit whose bytes it moves, as soon as an object that knows has passed the error on.
    """

    def __init__(self, hop: str, group: dist.ProcessGroup, cause: RuntimeError) -> None:
        super().__init__(hop)
        self.unit: str | None = None
        self._what = f"the hop {hop!r} of ranks {dist.get_process_group_ranks(group)} failed on rank {dist.get_rank()}"
        self._cause = cause

    def __str__(self) -> str:
        of_unit = "" if self.unit is None else f"Unit {self.unit}: "
        return (
            f"{of_unit}{self._what}. One of them ended, hangs, or runs something else: look for the first error of the others. "
            f"Here it ended with: {self._cause}"
        )


class HopWork:
    """A hop under way. Its ``wait`` names the hop where it fails."""

    def __init__(self, work: dist.Work, hop: Hop) -> None:
        self._work = work
        self._hop = hop

    def wait(self) -> None:
        """Wait for the collective."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise HopError(self._hop.name, self._hop.group, error) from error


class Hop:
    """Collectives of wire buffers over one process group, with their bytes counted.

    Args:
        name: the name under which ``traffic`` counts the bytes.
        group: the ranks that take part.
        traffic: counts what this rank receives.
        is_async: whether a collective returns a work to wait for, instead of waiting itself. On accelerators waiting orders
            streams and does not hold up the host.

    Attributes:
        size: number of ranks in the group.
        peers: how many of the other ranks are on this rank's node, and how many elsewhere.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, traffic: Traffic, *, is_async: bool = False) -> None:
        self.name = name
        self.group = group
        self.size = group.size()
        self.peers = Peers.of(group, traffic.ranks_per_node)
        self.is_async = is_async
        self._traffic = traffic

    def all_gather(self, output: torch.Tensor, wire: torch.Tensor) -> HopWork | None:
        """Start output [size * B] <- every rank's wire [B], in group order."""
        return self._run(_all_gather_buffers, output, wire, self.peers.bytes_of(wire.nbytes))

    def all_gather_rows(self, output: torch.Tensor, rows: torch.Tensor) -> HopWork | None:
        """Start, for each y, output[y] [size * S] <- every rank's rows[y] [S], in group order. Shapes are [Y, ...]."""
        return self._run(_all_gather_rows, output, rows, self.peers.bytes_of(rows.nbytes))

    def all_reduce(self, tensor: torch.Tensor) -> HopWork | None:
        """Start to sum ``tensor`` over the ranks, in place. It counts as a reduce-scatter and an all-gather."""
        return self._run(_all_reduce_in_place, tensor, tensor, self.peers.bytes_in_all_reduce(tensor.nbytes))

    def all_to_all(self, output: torch.Tensor, wire: torch.Tensor) -> HopWork | None:
        """Start output [size * B] <- from each rank, in group order, the part of its wire [size * B] for this rank."""
        return self._run(dist.all_to_all_single, output, wire, self.peers.bytes_of(wire.nbytes // self.size))

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor) -> HopWork | None:
        """Start output [Y, S] <- for each y, this rank's slice of the sum over ranks of rows [Y, size * S], in their dtype.

        What a ring receives is counted. NCCL runs rings; gloo runs an all-reduce, and sends twice as much.
        """
        return self._run(_reduce_scatter_rows, output, rows, self.peers.bytes_of(output.nbytes))

    def _run(
        self,
        collective: Callable[..., dist.Work | None],
        output: torch.Tensor,
        sent: torch.Tensor,
        received: Bytes,
    ) -> HopWork | None:
        # A unit may have nothing to send. Sizes are equal on all ranks, so all of them skip the collective.
        if not output.numel():
            return None
        self._traffic.record(self.name, received)
        try:
            work = collective(output, sent, group=self.group, async_op=self.is_async)
        except RuntimeError as error:
            raise HopError(self.name, self.group, error) from error
        return None if work is None else HopWork(work, self)

    def blocking(self) -> Hop:
        """Return a hop over the same ranks, counted under the same name, whose collectives wait."""
        return Hop(self.name, self.group, self._traffic)

    def barrier(self) -> None:
        """Wait until every rank of the group is here. It stands between uses of memory that the ranks share, on CPU."""
        try:
            dist.barrier(group=self.group)
        except RuntimeError as error:
            raise HopError(self.name, self.group, error) from error

    def read_peers(self, wire: torch.Tensor) -> torch.Tensor:
        """Return shared memory [size * B] in place of an all-gather's output, and count as many bytes.

        They are read from the peers' memory all the same, so counts can be compared with those of a run through sockets.
        """
        self._traffic.record(self.name, self.peers.bytes_of(wire.numel() // self.size))
        return wire


@dataclasses.dataclass
class Flight:
    """A hop under way.

    Attributes:
        received: the buffer where its bytes arrive. Before ``land`` its content is undefined.
        work: the work to wait for; None where the hop has ended or moves nothing.
        sent: wire buffers that the hop reads from. They are referenced here so that they are not used again before it ends.
    """

    received: torch.Tensor
    work: HopWork | None = None
    sent: tuple[torch.Tensor, ...] = ()

    def land(self, buffers: WireBuffers) -> torch.Tensor:
        """Wait for the hop, give the buffers that were sent back to ``buffers``, and return what was received."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        buffers.give(*self.sent)
        self.sent = ()
        return self.received
