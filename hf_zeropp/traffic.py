"""Count the bytes that one rank receives in collectives.

They are counted for every collective (``Traffic.record``), predicted for a step, and shown side by side
(``Traffic.table``). A count holds what this rank receives from other ranks; in every collective of this package a rank sends
as much as it receives. Counts are split by whether the sender is on the same node. The cross-node bytes of a node are the sum
over its ranks. Scales and padding count, protocol headers do not. A flat gather that stays FSDP2's own counts as the ring
that carries it. The ZeRO-3 line of the table is the least that a node must receive under any algorithm, so the comparison
favours ZeRO-3.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

# Names of collectives, as tables show them. Tables sort by name, so gathers stand together and reductions do.
GATHER_CROSS = "gather, across nodes"
GATHER_RESYNC = "gather, whole weights"
GATHER_NODE = "gather, within node"
REDUCE_NODE = "reduce, within node"
REDUCE_CROSS = "reduce, across nodes"
REDUCE_REPLICAS = "reduce, replicas"
GATHER_FROZEN = "gather, frozen weights"
FSDP2_GATHER = "gather, FSDP2's own"
FSDP2_REDUCE = "reduce, FSDP2's own"
OPTIMIZER = "optimizer, its own"


@dataclasses.dataclass
class Bytes:
    """Calls of a collective, and the bytes one rank received in them from its own node and from other nodes.

    In a prediction ``is_measured`` says that the bytes depend on the weights, and are the mean of those that the run has sent.
    """

    calls: int = 0
    intra_node: int = 0
    cross_node: int = 0
    is_measured: bool = False

    def add(self, other: Bytes) -> None:
        """Add ``other`` to this count in place."""
        self.is_measured |= other.is_measured
        self.calls += other.calls
        self.intra_node += other.intra_node
        self.cross_node += other.cross_node

    def times(self, factor: int) -> Bytes:
        """Return the count of ``factor`` repetitions."""
        return Bytes(self.calls * factor, self.intra_node * factor, self.cross_node * factor, self.is_measured)


@dataclasses.dataclass(frozen=True)
class Peers:
    """The other ranks of a process group, seen from one rank: how many are on its node, and how many elsewhere."""

    intra_node: int
    cross_node: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, ranks_per_node: int) -> Peers:
        """Return this rank's peers in ``group``."""
        return cls.among(dist.get_process_group_ranks(group), dist.get_rank(), ranks_per_node)

    @classmethod
    def among(cls, ranks: Collection[int], rank: int, ranks_per_node: int) -> Peers:
        """Return the peers of ``rank`` among ``ranks``, a set of ranks of the world that contains it."""
        # Nodes are always the true nodes, also for groups that ``hpz_size`` shapes: bytes are slow or fast by the link
        # they take, whatever group they belong to.
        own_node = rank // ranks_per_node
        on_node = sum(other // ranks_per_node == own_node for other in ranks)
        return cls(on_node - 1, len(ranks) - on_node)

    @property
    def group_size(self) -> int:
        """Number of ranks in the group, this one included."""
        return 1 + self.intra_node + self.cross_node

    def bytes_of(self, slice_bytes: int) -> Bytes:
        """Return the bytes of one collective in which each peer sends this rank ``slice_bytes``."""
        # This holds for an all-gather, where a peer sends its one slice to all, and for an all-to-all, where it sends
        # each rank another one. In both a rank receives one slice per peer.
        return Bytes(1, self.intra_node * slice_bytes, self.cross_node * slice_bytes)

    def bytes_in_all_reduce(self, num_bytes: int) -> Bytes:
        """Return the bytes of one all-reduce of so many: those of a reduce-scatter and an all-gather."""
        return self.bytes_of(2 * num_bytes // self.group_size)

    def bytes_in_ring(self, slice_bytes: int) -> Bytes:
        """Return the bytes of one flat all-gather of ``slice_bytes`` per rank, as gloo and NCCL run it.

        A ring hands every slice on from rank to rank. Only one rank of a node has its predecessor on another node, and the
        whole of what each rank receives enters the node through that one. Its cross-node bytes are shared out evenly here:
        each of the node's N ranks counts 1/N of them.
        """
        # With Y nodes of N ranks and slices of B bytes, each rank receives (Y * N - 1) * B. One rank of the node has
        # its predecessor on another node and receives all of that from there; the others receive it from each other.
        received = (self.intra_node + self.cross_node) * slice_bytes
        from_outside = received // (self.intra_node + 1) if self.cross_node else 0
        return Bytes(1, received - from_outside, from_outside)


@dataclasses.dataclass(frozen=True)
class MeshBytes:
    """Sizes of the units that are sharded over one mesh, from which follows what ZeRO-3 would send for them.

    Attributes:
        weights: bytes of the parameters in the compute dtype. Where other parallelism cuts them, the parts that the node's ranks
            gather: all parts of dense weights beside tensor parallelism, and of experts those that the node's ranks hold.
        gradients: bytes of the trainable ones in the reduce dtype.
        num_nodes: Y, the nodes over which one replica of them is sharded.
        num_replicas: how many replicas are on different nodes (HSDP).
    """

    weights: int
    gradients: int
    num_nodes: int
    num_replicas: int = 1

    def zero3_bytes(self, micro_steps: float) -> float:
        """Return what a node receives from others in ``micro_steps`` under ZeRO-3, at least."""
        # ZeRO-3 gathers for the forward and for the backward pass of each micro-step, and reduces in each. Its rings
        # send more than (Y-1)/Y; the least that any algorithm needs is counted, so that the saving is never
        # overstated.
        share_elsewhere = (self.num_nodes - 1) / self.num_nodes
        within_replica = (2 * self.weights + self.gradients) * micro_steps * share_elsewhere
        # Replicas need an all-reduce of what a node holds, once per step.
        share_of_node = self.gradients / self.num_nodes
        return within_replica + 2 * share_of_node * (self.num_replicas - 1) / self.num_replicas


class Traffic:
    """Byte counters of one model on this rank.

    Args:
        ranks_per_node: N. The bytes of one rank times N are those of its node, since all ranks of a node receive equally.
        num_nodes: Y, or with replicas the nodes of all of them.
        model_bytes: M, bytes of the model's parameters in the compute dtype.
        trainable_bytes: bytes of the trainable parameters in the reduce dtype.
        meshes: the same bytes by mesh, where there are several, or replicas; by default one that spans all nodes.

    Attributes:
        steps: optimizer steps since the last ``reset``. Several optimizers that step after one backward pass, or within it,
            make one step.
        micro_steps: backward passes since the last ``reset``.
        rollouts: what this rank received since the last ``reset`` while it generated, or fed an inference engine. The counts
            by collective include it.
    """

    def __init__(
        self,
        ranks_per_node: int,
        num_nodes: int,
        model_bytes: int = 0,
        trainable_bytes: int = 0,
        meshes: Sequence[MeshBytes] | None = None,
    ) -> None:
        self.ranks_per_node = ranks_per_node
        self.num_nodes = num_nodes
        self.model_bytes = model_bytes
        self.trainable_bytes = trainable_bytes
        self._meshes = (MeshBytes(model_bytes, trainable_bytes, num_nodes),) if meshes is None else tuple(meshes)
        self._is_in_rollout = False
        self.reset()

    def reset(self) -> None:
        """Start counting again from zero: bytes, steps and micro-steps."""
        self.steps = 0
        self.micro_steps = 0
        self._has_stepped = False  # since the last backward pass began
        self._counts: dict[str, Bytes] = defaultdict(Bytes)
        self.rollouts = Bytes()

    def begin_backward(self) -> None:
        """Note that a backward pass begins, whose gradients make another step."""
        self._has_stepped = False

    def end_optimizer_step(self) -> None:
        """Count a step, unless another optimizer's was counted for the same gradients."""
        self.steps += not self._has_stepped
        self._has_stepped = True

    def record(self, collective: str, received: Bytes) -> None:
        """Add what this rank received in a collective of that name."""
        self._counts[collective].add(received)
        if self._is_in_rollout:
            self.rollouts.add(received)

    def record_senders(self, collective: str, received: Mapping[int, int]) -> None:
        """Add the bytes that this rank received in a collective, by the rank of the world that sent them."""
        rank, num_ranks = dist.get_rank(), self.ranks_per_node
        from_node = {other: count for other, count in received.items() if other // num_ranks == rank // num_ranks}
        intra_node = sum(from_node.values()) - from_node.get(rank, 0)
        self.record(collective, Bytes(1, intra_node, sum(received.values()) - sum(from_node.values())))

    @contextmanager
    def in_rollout(self) -> Iterator[None]:
        """Count what this rank receives inside among the bytes of ``rollouts`` as well."""
        self._is_in_rollout = True
        try:
            yield
        finally:
            self._is_in_rollout = False

    @property
    def counts(self) -> dict[str, Bytes]:
        """A copy of what this rank received since the last ``reset``, by collective."""
        # The counters go on counting in place. A caller that compares counts before and after a step needs copies.
        return {name: dataclasses.replace(count) for name, count in self._counts.items()}

    @property
    def cross_node_bytes(self) -> int:
        """Bytes that entered this node from other nodes, all its ranks together."""
        # One rank's counter stands for its node without a collective: all ranks of a node receive equally, by
        # construction. Only with changed words they differ, by some per cent.
        return self.ranks_per_node * sum(count.cross_node for count in self._counts.values())

    @property
    def intra_node_bytes(self) -> int:
        """Bytes that moved between the ranks of this node, all its ranks together."""
        return self.ranks_per_node * sum(count.intra_node for count in self._counts.values())

    @property
    def cross_node_bytes_per_step(self) -> float:
        """``cross_node_bytes`` per optimizer step."""
        # Without a step (generation, evaluation) the bytes are shown as those of one.
        return self.cross_node_bytes / max(self.steps, 1)

    @property
    def intra_node_bytes_per_step(self) -> float:
        """``intra_node_bytes`` per optimizer step."""
        return self.intra_node_bytes / max(self.steps, 1)

    def zero3_bytes_per_step(self) -> float:
        """Return the cross-node bytes per node and step of ZeRO-3, in steps of as many micro-steps as were counted."""
        return self.zero3_bytes(self.micro_steps / max(self.steps, 1))

    def zero3_bytes(self, micro_steps: float) -> float:
        """Return the cross-node bytes per node of ``micro_steps`` under ZeRO-3: (2 M + gradients) (Y-1)/Y for each and mesh."""
        return sum(mesh.zero3_bytes(micro_steps) for mesh in self._meshes)

    def table(self, predicted: Mapping[str, Bytes] | None = None) -> Table:
        """Return a rich table of the bytes per node and step, by collective, with the bytes of ZeRO-3 below.

        Args:
            predicted: bytes of one step by collective (``handle.predict``), shown beside the counts; None for no prediction.
        """
        micro_steps = self.micro_steps / max(self.steps, 1)
        table = Table(
            title=f"MB per node and step: {with_noun(self.steps, 'step')} of {with_noun(micro_steps, 'micro-step')}, "
            f"{self.num_nodes} nodes x {with_noun(self.ranks_per_node, 'rank')}"
        )
        table.add_column("collective", no_wrap=True)
        for column in ("calls", "within node", "across nodes", "predicted"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, count in sorted(self._counts.items()):
            self._add_row(table, name, count, _predicted(predicted, [name], self.ranks_per_node))
        table.add_section()
        in_all = _predicted(predicted, predicted or [], self.ranks_per_node)
        self._add_row(table, "total", total(self._counts.values()), in_all, shows_calls=False)
        if self.rollouts.calls:
            self._add_row(table, "of it in rollouts", self.rollouts, shows_calls=False)
        table.add_row("ZeRO-3", "", "", _megabytes(self.zero3_bytes_per_step()), "")
        # With one node nothing crosses, and a ratio of zero bytes to zero bytes says nothing.
        if self.cross_node_bytes:
            saving = self.zero3_bytes_per_step() / self.cross_node_bytes_per_step
            table.add_row("saving", "", "", f"{saving:.2f}x", "")
        return table

    def _add_row(self, table: Table, name: str, count: Bytes, predicted: str = "", *, shows_calls: bool = True) -> None:
        steps = max(self.steps, 1)
        calls = f"{count.calls / steps:.1f}" if shows_calls else ""
        of_node = (self.ranks_per_node * num_bytes / steps for num_bytes in (count.intra_node, count.cross_node))
        table.add_row(name, calls, *map(_megabytes, of_node), predicted)

    def print(self, predicted: Mapping[str, Bytes] | None = None) -> None:
        """Print the table to standard output. ``predicted`` is as in ``table``."""
        Console().print(self.table(predicted))


def total(counts: Iterable[Bytes]) -> Bytes:
    """Return the sum of counts."""
    result = Bytes()
    for count in counts:
        result.add(count)
    return result


def with_noun(number: float, noun: str) -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number:.9g} {noun}{'' if number == 1 else 's'}"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3f}"


def _predicted(predicted: Mapping[str, Bytes] | None, names: Iterable[str], ranks_per_node: int) -> str:
    if predicted is None:
        return ""
    count = total(predicted[name] for name in names if name in predicted)
    return _megabytes(ranks_per_node * count.cross_node) + (" (measured)" if count.is_measured else "")
