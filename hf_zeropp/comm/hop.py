"""One hop: a collective of wire buffers over one process group, and hops under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hf_zeropp.comm import collectives
from hf_zeropp.comm.wire_buffers import WireBuffers
from hf_zeropp.traffic import Bytes, Peers, Traffic

Buffers = tuple[torch.Tensor, ...]


class HopError(RuntimeError):
    """A hop failed: another rank ended, hangs, or runs another hop. The backend's own error names a socket.

    Args:
        hop: the name of the hop.
        group: the ranks that take part.
        cause: the backend's error.

    Attributes:
        unit: the name of the unit whose bytes it moves, as soon as an object that knows has passed the error on.
    """

    def __init__(self, hop: str, group: dist.ProcessGroup, cause: RuntimeError, unit: str | None = None) -> None:
        super().__init__(hop)
        self.unit = unit
        self._what = f"the hop {hop!r} of ranks {dist.get_process_group_ranks(group)} failed on rank {dist.get_rank()}"
        self._cause = cause

    def __str__(self) -> str:
        of_unit = "" if self.unit is None else f"Unit {self.unit}: "
        return (
            f"{of_unit}{self._what}. One of them ended, hangs, or runs something else: look for the first error of the others. "
            f"Here it ended with: {self._cause}"
        )


class Hop:
    """Collectives of wire buffers over one process group, with their bytes counted.

    Each method starts a collective and returns it as a `Flight`, which ``land`` finishes. ``sent`` are the wire buffers that are
    free again then.

    Args:
        name: the name under which ``traffic`` counts the bytes.
        group: the ranks that take part.
        traffic: counts what this rank receives.
        is_async: whether a collective goes on while the caller does other things. On accelerators waiting for it orders streams
            and does not hold up the host.

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

    def all_gather(self, output: torch.Tensor, wire: torch.Tensor, sent: Buffers = ()) -> Flight:
        """Start output [size * B] <- every rank's wire [B], in group order."""
        received = self.peers.bytes_of(wire.nbytes)
        return self._start(collectives.all_gather_buffers, output, wire, received, sent)

    def all_gather_rows(self, output: torch.Tensor, rows: torch.Tensor, sent: Buffers = ()) -> Flight:
        """Start, for each y, output[y] [size * S] <- every rank's rows[y] [S], in group order. Shapes are [Y, ...]."""
        return self._start(collectives.all_gather_rows, output, rows, self.peers.bytes_of(rows.nbytes), sent)

    def all_reduce(self, tensor: torch.Tensor) -> Flight:
        """Start to sum ``tensor`` over the ranks, in place. It counts as a reduce-scatter and an all-gather."""
        received = self.peers.bytes_in_all_reduce(tensor.nbytes)
        return self._start(collectives.all_reduce_in_place, tensor, tensor, received)

    def all_to_all(self, output: torch.Tensor, wire: torch.Tensor, sent: Buffers = ()) -> Flight:
        """Start output [size * B] <- from each rank, in group order, the part of its wire [size * B] for this rank."""
        received = self.peers.bytes_of(wire.nbytes // self.size)
        return self._start(dist.all_to_all_single, output, wire, received, sent)

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor) -> Flight:
        """Start output [Y, S] <- for each y, this rank's slice of the sum over ranks of rows [Y, size * S], in their dtype.

        What a ring receives is counted. NCCL runs rings; gloo runs an all-reduce, and sends twice as much.
        """
        return self._start(collectives.reduce_scatter_rows, output, rows, self.peers.bytes_of(output.nbytes))

    def _start(
        self,
        collective: Callable[..., dist.Work | None],
        output: torch.Tensor,
        wire: torch.Tensor,
        received: Bytes,
        sent: Buffers = (),
    ) -> Flight:
        # A unit may have nothing to send. Sizes are equal on all ranks, so all of them skip the collective.
        if not output.numel():
            return Flight(output, sent)
        self._traffic.record(self.name, received)
        with self.naming_errors():
            work = collective(output, wire, group=self.group, async_op=self.is_async)
        return Flight(output, sent, self, work)

    def barrier(self) -> None:
        """Wait until every rank of the group is here. It stands between uses of memory that the ranks share, on CPU."""
        with self.naming_errors():
            dist.barrier(group=self.group)

    def read_peers(self, wire: torch.Tensor) -> torch.Tensor:
        """Return shared memory [size * B] in place of an all-gather's output, and count as many bytes.

        They are read from the peers' memory all the same, so counts can be compared with those of a run through sockets.
        """
        self._traffic.record(self.name, self.peers.bytes_of(wire.numel() // self.size))
        return wire

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Let an error of the backend name the hop."""
        try:
            yield
        except RuntimeError as error:
            raise HopError(self.name, self.group, error) from error


@dataclasses.dataclass
class Flight:
    """A hop under way.

    Attributes:
        received: the buffer where its bytes arrive. Before ``land`` its content is undefined.
        sent: wire buffers that the hop reads from. They are referenced here so that they are not used again before it ends.
        hop: the hop; None where nothing moves.
        work: the work to wait for; None where the hop has ended or moves nothing.
    """

    received: torch.Tensor
    sent: Buffers = ()
    hop: Hop | None = None
    work: dist.Work | None = None

    def land(self, buffers: WireBuffers) -> torch.Tensor:
        """Wait for the hop, give the buffers that were sent back to ``buffers``, and return what was received."""
        if self.hop is not None and self.work is not None:
            with self.hop.naming_errors():
                self.work.wait()
            self.work = None
        buffers.give(*self.sent)
        self.sent = ()
        return self.received
