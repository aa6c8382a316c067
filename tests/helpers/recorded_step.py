"""Optimizer steps as the streams of a GPU would run them, recorded from FSDP2 and this package on a machine without one.

The happens-before checker (``tests/helpers/happens_before``) sees every operator and collective that a rank gives to a stream,
and knows which earlier ones it comes after. Here they become tasks of the simulator of ``hf-zeropp estimate``, with seconds from
bytes, operations and the rates of a cluster. So the order of a step is that of the code that runs, and nobody wrote it down.

The recorded model is small. Its matrices have the true ones' sizes divided by one factor in both dimensions, so bytes and
operations are multiplied by the square of that factor.

NCCL adds two orders to those of the streams:

- A collective waits for the end of the one before it on its communicator, whatever streams they run on.
- With ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` it waits for the *start* of the one before it on any communicator, in the order of calls.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from happens_before import Operation, Stream

from hf_zeropp.estimate.cluster import Cluster
from hf_zeropp.estimate.simulation import PROCESSOR, Stage, Task, simulate
from hf_zeropp.estimate.unit_work import StageMaker
from hf_zeropp.traffic import Peers

MATRIX_PRODUCTS = {"mm": "self", "addmm": "mat1"}
"""Operators that compute, each with the name of its left argument."""

MOVE_NOTHING = ("new_empty", "all_gather_copy_in")
"""Operators of a unit's exchanges that only allocate, and those whose parts are recorded by themselves."""

MOVES_UNITS = ("fsdp", "zeropp")
"""Namespaces of operators that take the time of their bytes, wherever they run."""

CONTRIBUTIONS = {
    "_allgather_base_": "input_tensor",
    "allgather_into_tensor_coalesced_": "inputs",
    "_reduce_scatter_base_": "output_tensor",
    "reduce_scatter_tensor_coalesced_": "outputs",
    "alltoall_base_": "input",
}
"""Collectives of units, each with the argument that has the size of what one rank contributes: a tensor, or the rows of one.
Others carry a few bytes."""

MAIN = "default stream"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much larger the true step is than the recorded one.

    Attributes:
        weights: factor of a matrix's elements, and so of bytes.
        tokens: factor of a rank's tokens.
    """

    weights: float
    tokens: float


@dataclasses.dataclass(frozen=True)
class Work:
    """One operator, with what it moves and computes at the recorded sizes.

    Attributes:
        name: the operator.
        stream: where it runs.
        after: numbers of earlier works on other streams that it waits for.
        operations: of a matrix product.
        num_bytes: that a kernel reads and writes, or that one rank contributes to a collective.
        communicator: the process group of a collective; None for others.
        peers: the ranks of that group.
        is_ring: whether the collective runs in a ring, or every rank sends to every other one.
    """

    name: str
    stream: str
    after: tuple[int, ...]
    operations: int = 0
    num_bytes: int = 0
    communicator: str | None = None
    peers: Peers | None = None
    is_ring: bool = False


class Recording:
    """What a rank gave to its streams. Hand ``observe`` to the checker.

    Args:
        ranks_per_node: N.

    Attributes:
        works: in the order in which the host started them.
        steps: numbers of works at which steps ended.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self.works: list[Work] = []
        self.steps: list[int] = []
        self._ranks_per_node = ranks_per_node
        self._of_tick: dict[tuple[Stream, int], int] = {}

    def end_step(self) -> None:
        """Note that the host has started everything of an optimizer step."""
        self.steps.append(len(self.works))

    def observe(self, operation: Operation) -> None:
        """Note an operator that a stream was given."""
        stream = operation.stream
        after = {self._of_tick.get((other, tick)) for other, tick in operation.clock.items() if other is not stream}
        self._of_tick[stream, operation.clock[stream]] = len(self.works)
        waits = tuple(sorted(index for index in after if index is not None))
        name = operation.func._overloadpacket.__name__
        work = Work(name, str(stream), waits)
        if operation.func.namespace == "c10d":
            work = self._collective(work, operation)
        elif name in MATRIX_PRODUCTS:
            left, right = operation.arguments[MATRIX_PRODUCTS[name]], operation.arguments["mat2"]
            work = dataclasses.replace(work, operations=2 * left.numel() * right.shape[-1])
        elif name not in MOVE_NOTHING and (
            operation.func.namespace in MOVES_UNITS or operation.step or "_fused_" in name
        ):
            work = dataclasses.replace(work, num_bytes=_touched_bytes(operation))
        # Other operators of the model are part of the share of its peak that a GPU attains.
        self.works.append(work)

    def _collective(self, work: Work, operation: Operation) -> Work:
        group = dist.ProcessGroup.unbox(operation.arguments["process_group"])
        peers = Peers.of(group, self._ranks_per_node)
        moved = operation.arguments.get(CONTRIBUTIONS.get(work.name, ""), [])
        num_bytes = sum(tensor.nbytes for tensor in (moved if isinstance(moved, list) else [moved]))
        if work.name == "alltoall_base_":  # one part for each rank
            num_bytes //= peers.group_size
        # Flat collectives of a world run in rings. Groups of one rank per node, or within one, send directly.
        is_ring = work.name != "alltoall_base_" and bool(peers.cross_node and peers.intra_node)
        return dataclasses.replace(
            work, num_bytes=num_bytes, communicator=group.group_name, peers=peers, is_ring=is_ring
        )


def tasks_of(recording: Recording, cluster: Cluster, scale: Scale) -> list[Task]:
    """Return a recording as tasks, two for each work: its start takes no time, and others can wait for it.

    Args:
        recording: of a rank.
        cluster: whose rates the tasks take.
        scale: from the recorded sizes to the true ones.
    """
    stages = StageMaker(cluster)
    tasks: list[Task] = []
    last_of: dict[str, int] = {}
    last_start: int | None = None
    for index, work in enumerate(recording.works):
        after = {2 * other + 1 for other in work.after}
        if work.communicator is not None:
            after |= {last_of[work.communicator]} if work.communicator in last_of else set()
            after |= {last_start} if last_start is not None else set()
            last_of[work.communicator], last_start = 2 * index + 1, 2 * index
        stage = _stage_of(work, stages, scale)
        tasks.append(Task(Stage(f"start of {stage.name}", ()), work.stream, tuple(sorted(after))))
        tasks.append(Task(stage, work.stream))
    return tasks


def last_step_s(recording: Recording, tasks: list[Task]) -> float:
    """Simulate a recording of several steps, and return the seconds of the last, from the end of one optimizer to the next."""
    ends = simulate(tasks)
    start, end = (
        max(end_s for task, end_s in zip(tasks[: 2 * number], ends, strict=False) if task.stream == MAIN)
        for number in recording.steps[-2:]
    )
    return end - start


def _stage_of(work: Work, stages: StageMaker, scale: Scale) -> Stage:
    if work.operations:
        seconds = work.operations * scale.weights * scale.tokens / stages.cluster.device.flops
        return Stage(work.name, ((PROCESSOR, seconds),))
    num_bytes = round(work.num_bytes * scale.weights)
    if work.peers is None:
        return stages.kernel(work.name, num_bytes) if num_bytes else Stage(work.name, ())
    if work.is_ring:
        (ring,) = stages.ring(work.name, num_bytes, work.peers)
        return ring
    return stages.exchange(work.name, work.peers.bytes_of(num_bytes), work.peers)


def _touched_bytes(operation: Operation) -> int:
    """Return the bytes that an operator reads and writes. What it updates in place counts twice."""
    func = operation.func._overloadpacket.__name__
    updates = func.endswith("_") and not func.startswith(("copy", "_foreach_copy", "zero", "fill"))
    touched: dict[tuple[int, int], int] = {}
    for tensor, is_written in operation.tensors:
        touched[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes * (2 if is_written and updates else 1)
    return sum(touched.values())
