"""One hop: a collective of wire buffers over one process group, counted, and the buffers it needs."""

from __future__ import annotations

import bisect
import dataclasses

import torch
import torch.distributed as dist

from hf_zeropp.traffic import Peers, TimedWork, Traffic

# torch 2.13 renamed all_gather_into_tensor; both names move one contiguous buffer.
_all_gather_buffers = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Hop:
    """Collectives of wire buffers over one process group, with their bytes counted under one name.

    Args:
        is_async: return works to wait for, instead of waiting. On accelerators waiting orders streams and holds up no
            host.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, traffic: Traffic, *, is_async: bool = False) -> None:
        self.name = name
        self.group = group
        self.size = group.size()
        self.peers = Peers.of(group, traffic.ranks_per_node)
        self.is_async = is_async
        self._traffic = traffic

    def all_gather(self, output: torch.Tensor, wire: torch.Tensor) -> TimedWork | None:
        """output [size * B] <- every rank's wire [B], in group order."""
        if not wire.numel():
            return None
        self._traffic.record(self.name, self.peers.bytes_of(wire.numel()))
        with self._traffic.timer.measure(wire.device):
            work = _all_gather_buffers(output, wire, group=self.group, async_op=self.is_async)
        return self._traffic.timer.watch(work, wire.device)

    def all_to_all(self, output: torch.Tensor, wire: torch.Tensor) -> TimedWork | None:
        """output [size * B] <- from each rank the part of its wire [size * B] that is addressed to this rank."""
        if not wire.numel():
            return None
        self._traffic.record(self.name, self.peers.bytes_of(wire.numel() // self.size))
        with self._traffic.timer.measure(wire.device):
            work = dist.all_to_all_single(output, wire, group=self.group, async_op=self.is_async)
        return self._traffic.timer.watch(work, wire.device)

    def barrier(self) -> None:
        """Wait until every rank of the group is here (on CPU, between uses of memory that they share)."""
        with self._traffic.timer.measure(torch.device("cpu")):
            dist.barrier(group=self.group)

    def read_peers(self, wire: torch.Tensor) -> torch.Tensor:
        """Shared memory [size * B], which takes the place of an all-gather: as many bytes, read where they lie."""
        self._traffic.record(self.name, self.peers.bytes_of(wire.numel() // self.size))
        return wire


@torch.inference_mode(False)
def new_wire(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A wire buffer that outlives a forward under ``inference_mode``: tensors made in that mode could not be reused
    in training."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class WireBuffers:
    """Reused uint8 buffers on CPU, where a fresh allocation of many megabytes costs more than the kernel that fills it.

    On other devices the caching allocator does this already, and orders the reuse by stream.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # by size

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """A buffer [num_bytes] with arbitrary content; ``give`` it back when its bytes are no longer needed."""
        fit = bisect.bisect_left(self._free, num_bytes, key=torch.Tensor.numel)
        # One twice as large would be missed where it is needed, and a second of its size allocated there.
        if device.type == "cpu" and fit < len(self._free) and self._free[fit].numel() <= 2 * num_bytes:
            return self._free.pop(fit)[:num_bytes]
        return new_wire(num_bytes, device)

    def give(self, *buffers: torch.Tensor) -> None:
        for buffer in buffers:
            if buffer.device.type == "cpu":
                whole = buffer if buffer._base is None else buffer._base
                bisect.insort(self._free, whole, key=torch.Tensor.numel)


@dataclasses.dataclass
class Flight:
    """A hop under way: the buffer where its bytes arrive, the work to wait for, and the buffers it reads from."""

    received: torch.Tensor
    work: TimedWork | None = None
    sent: tuple[torch.Tensor, ...] = ()

    def land(self, buffers: WireBuffers) -> torch.Tensor:
        """Wait, free what was sent, and return what was received."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        buffers.give(*self.sent)
        self.sent = ()
        return self.received
