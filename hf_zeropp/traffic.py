"""Bytes on the wire: counted for every collective, predicted for a step, and shown as a table.

Bytes are what a rank receives from other ranks (in every collective here it sends as much), split by whether the peer
is on the same node. A node's cross-node bytes are the sum over its ranks. Scales and padding count; protocol headers
do not. Flat gathers that are left to FSDP2 count as the ring that carries them. The ZeRO-3 line of the table is the least
a node must receive, whatever the algorithm: it favours ZeRO-3.

Time spent in collectives, measured without ever making the host wait for the device.

On CPU a collective blocks its caller, when it is issued or when its work is waited for: the wall time of both is what
training pays for it. On an accelerator it runs on a stream behind the caller's back: two events mark it, and their
distance is read once both have passed, so a figure may lag by the collectives under way. There it includes the wait
for slower ranks, and what overlaps with compute is not taken off.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

GATHER_CROSS = "gather, across nodes"
GATHER_RESYNC = "gather, whole weights"
GATHER_NODE = "gather, within node"
REDUCE_NODE = "reduce, within node"
REDUCE_CROSS = "reduce, across nodes"
GATHER_FROZEN = "gather, frozen weights"
ENGINE_GATHER = "gather, FSDP2's own"
ENGINE_REDUCE = "reduce, FSDP2's own"


@dataclasses.dataclass
class Bytes:
    """Calls, and bytes one rank received from its own node and from others."""

    calls: int = 0
    intra_node: int = 0
    cross_node: int = 0

    def add(self, other: Bytes) -> None:
        self.calls += other.calls
        self.intra_node += other.intra_node
        self.cross_node += other.cross_node

    def times(self, factor: int) -> Bytes:
        return Bytes(self.calls * factor, self.intra_node * factor, self.cross_node * factor)


@dataclasses.dataclass(frozen=True)
class Peers:
    """How many of a rank's partners in a process group are on its node, and how many elsewhere."""

    intra_node: int
    cross_node: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, ranks_per_node: int) -> Peers:
        ranks = dist.get_process_group_ranks(group)
        own_node = dist.get_rank() // ranks_per_node
        on_node = sum(rank // ranks_per_node == own_node for rank in ranks)
        return cls(on_node - 1, len(ranks) - on_node)

    def bytes_of(self, slice_bytes: int) -> Bytes:
        """One collective in which each peer sends this rank ``slice_bytes``."""
        return Bytes(1, self.intra_node * slice_bytes, self.cross_node * slice_bytes)

    def bytes_in_ring(self, slice_bytes: int) -> Bytes:
        """One flat all-gather, as gloo and NCCL run it: every slice is handed on from rank to rank, and one of a
        node's ranks has its predecessor on another node. This rank's part of its node's bytes."""
        received = (self.intra_node + self.cross_node) * slice_bytes
        from_outside = received // (self.intra_node + 1) if self.cross_node else 0
        return Bytes(1, received - from_outside, from_outside)


class Traffic:
    """Byte counters of one model on this rank.

    Args:
        ranks_per_node: N; a rank's bytes times N are its node's.
        num_nodes: Y.
        model_bytes: M, bytes of the model's parameters in the compute dtype.
        trainable_bytes: bytes of the trainable parameters in the reduce dtype.
    """

    def __init__(self, ranks_per_node: int, num_nodes: int, model_bytes: int = 0, trainable_bytes: int = 0) -> None:
        self.ranks_per_node = ranks_per_node
        self.num_nodes = num_nodes
        self.model_bytes = model_bytes
        self.trainable_bytes = trainable_bytes
        self.reset()

    def reset(self) -> None:
        self.timer = CommTimer()
        self.steps = 0
        self.micro_steps = 0
        self._counts: dict[str, Bytes] = defaultdict(Bytes)

    def record(self, collective: str, received: Bytes) -> None:
        self._counts[collective].add(received)

    @property
    def counts(self) -> dict[str, Bytes]:
        """Per collective, a copy of what this rank received since the last ``reset``."""
        return {name: dataclasses.replace(count) for name, count in self._counts.items()}

    @property
    def cross_node_bytes(self) -> int:
        """Bytes that entered this node from others, all its ranks together (each receives as much)."""
        return self.ranks_per_node * sum(count.cross_node for count in self._counts.values())

    @property
    def intra_node_bytes(self) -> int:
        return self.ranks_per_node * sum(count.intra_node for count in self._counts.values())

    @property
    def cross_node_bytes_per_step(self) -> float:
        return self.cross_node_bytes / max(self.steps, 1)

    @property
    def intra_node_bytes_per_step(self) -> float:
        return self.intra_node_bytes / max(self.steps, 1)

    def zero3_bytes_per_step(self) -> float:
        """Cross-node bytes per node and step of ZeRO-3: (2 M + gradients) (Y-1)/Y for each micro-step."""
        micro_steps = self.micro_steps / max(self.steps, 1)
        return (2 * self.model_bytes + self.trainable_bytes) * micro_steps * (self.num_nodes - 1) / self.num_nodes

    def table(self, predicted: Mapping[str, Bytes] | None = None) -> Table:
        """A rich table per step and node, with the prediction beside the count, and ZeRO-3's figure below."""
        steps, micro = max(self.steps, 1), self.micro_steps / max(self.steps, 1)
        table = Table(
            title=f"MB per node and step: {self.steps} steps of {micro:g} micro-steps, "
            f"{self.num_nodes} nodes x {self.ranks_per_node} ranks"
        )
        table.add_column("collective", no_wrap=True)
        for column in ("calls", "within node", "across nodes", "predicted"):
            table.add_column(column, justify="right", no_wrap=True)
        per_node = self.ranks_per_node / steps
        for name, count in sorted(self._counts.items()):
            table.add_row(
                name,
                f"{count.calls / steps:.1f}",
                _megabytes(count.intra_node * per_node),
                _megabytes(count.cross_node * per_node),
                _predicted(predicted, [name], self.ranks_per_node),
            )
        table.add_section()
        table.add_row(
            "total",
            "",
            _megabytes(self.intra_node_bytes_per_step),
            _megabytes(self.cross_node_bytes_per_step),
            _predicted(predicted, predicted or [], self.ranks_per_node),
        )
        table.add_row("ZeRO-3", "", "", _megabytes(self.zero3_bytes_per_step()), "")
        if self.cross_node_bytes:
            saving = self.zero3_bytes_per_step() / self.cross_node_bytes_per_step
            table.add_row("saving", "", "", f"{saving:.2f}x", "")
        return table

    def print(self, predicted: Mapping[str, Bytes] | None = None) -> None:
        Console().print(self.table(predicted))


def total(counts: Iterable[Bytes]) -> Bytes:
    result = Bytes()
    for count in counts:
        result.add(count)
    return result


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3f}"


def _predicted(predicted: Mapping[str, Bytes] | None, names: Iterable[str], ranks_per_node: int) -> str:
    if predicted is None:
        return ""
    return _megabytes(ranks_per_node * sum(predicted[name].cross_node for name in names if name in predicted))


class CommTimer:
    """Adds up the time of collectives on one rank."""

    def __init__(self) -> None:
        self._finished_s = 0.0
        self._running: deque[tuple[torch.Event, torch.Event]] = deque()
        self._spare: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Count what is issued inside."""
        if device.type == "cpu":
            start_s = time.perf_counter()
            yield
            self._finished_s += time.perf_counter() - start_s
            return
        self._collect()
        start, end = self._spare.pop() if self._spare else _timing_events(device)
        start.record()
        yield
        end.record()
        self._running.append((start, end))

    def watch(self, work: dist.Work | None, device: torch.device) -> TimedWork | None:
        """The same work, whose ``wait`` is counted."""
        return None if work is None else TimedWork(work, self, device)

    @property
    def seconds(self) -> float:
        """Of all collectives that have finished."""
        self._collect()
        return self._finished_s

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            start, end = self._running.popleft()
            self._finished_s += start.elapsed_time(end) / 1e3
            self._spare.append((start, end))


class TimedWork:
    """A work whose ``wait`` (of the caller, or on an accelerator of its stream) counts as time in collectives."""

    def __init__(self, work: dist.Work, timer: CommTimer, device: torch.device) -> None:
        self._work = work
        self._timer = timer
        self._device = device

    def wait(self) -> None:
        with self._timer.measure(self._device):
            self._work.wait()


def _timing_events(device: torch.device) -> tuple[torch.Event, torch.Event]:
    return torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
