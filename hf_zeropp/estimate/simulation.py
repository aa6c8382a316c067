"""Simulate one optimizer step: tasks on streams that share resources, who runs when, and how fast.

A *stream* runs its tasks one after the other, in the order in which they were added. A task also waits for those that it names.
A *resource* (the processor, the network, the links within a node) is shared by the tasks that run at one time.

A task needs so many seconds of each resource at its full rate, and alone it takes as long as the resource that it needs most.
So it uses each resource to a share between 0 and 1. Where the shares of the running tasks add up to more than 1, each of those
tasks slows down by that sum: the resource is full, and no task gets more of it than it would alone. A task's speed is that of
the slowest of its resources.

The simulation jumps from the end of one task to the next, and takes no time steps.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from hf_zeropp.traffic import Bytes

PROCESSOR, NETWORK, WITHIN = "processor", "network", "within"
"""The resources: the processor of a rank, the network of its node, and the rank's links within the node."""

COMPUTE, KERNEL, WIRE = "compute", "kernel", "wire"
"""Kinds of tasks: the model and the optimizer; encoding, decoding and copies for communication; collectives."""

_DONE = 1e-12
"""Seconds of work left that count as none: what rounding leaves over."""

Waits = Iterable["int | None"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One hop or one kernel of a gather or a reduction. Its stages run one after the other.

    Attributes:
        name: for people.
        kind: ``COMPUTE``, ``KERNEL`` or ``WIRE``.
        demands: resources by name, each with the seconds of it that the stage needs at full rate.
        latency: seconds before the work begins, in which it uses no resource.
        traffic: bytes that one rank receives.
    """

    name: str
    kind: str
    demands: tuple[tuple[str, float], ...]
    latency: float = 0.0
    traffic: Bytes = dataclasses.field(default_factory=Bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One piece of work: a stage of a unit, on a stream.

    Attributes:
        name: for people, such as "forward block 3".
        stream: the name of its stream.
        after: indices of earlier tasks that it waits for.
    """

    name: str
    kind: str
    stream: str
    demands: tuple[tuple[str, float], ...]
    latency: float = 0.0
    after: tuple[int, ...] = ()

    @property
    def seconds_alone(self) -> float:
        """Seconds that the task takes where nothing else runs."""
        return self.latency + max((seconds for _, seconds in self.demands), default=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """When a task ran, in seconds from the start."""

    start: float
    end: float


class Program:
    """Tasks in the order in which a rank issues them.

    Attributes:
        tasks: for ``simulate``.
        traffic: bytes that one rank receives in all of them.
        micro_step_ends: for each micro-step, the index of the last computation of its backward pass.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.traffic = Bytes()
        self.micro_step_ends: list[int] = []

    def add(self, stream: str, stage: Stage, unit: str, after: Waits = ()) -> int:
        """Add a stage of a unit to a stream, and return its index.

        Args:
            stream: where it runs, behind everything that the stream holds already.
            stage: what runs.
            unit: the unit's name.
            after: indices of tasks that it waits for; None stands for none.
        """
        waits = tuple({index for index in after if index is not None})
        self.tasks.append(Task(f"{stage.name} {unit}".strip(), stage.kind, stream, stage.demands, stage.latency, waits))
        self.traffic.add(stage.traffic)
        return len(self.tasks) - 1

    def add_all(self, stream: str, stages: Iterable[Stage], unit: str, after: Waits = ()) -> int | None:
        """Add the stages of one gather or reduction, and return the index of the last; None where there is none."""
        # The first waits; the others follow it in the stream.
        last = None
        for stage in stages:
            last = self.add(stream, stage, unit, after if last is None else ())
        return last

    def compute(self, stream: str, name: str, seconds: float, unit: str, after: Waits = ()) -> int:
        """Add a part of the model to a stream, and return its index."""
        return self.add(stream, Stage(name, COMPUTE, ((PROCESSOR, seconds),)), unit, after)


class _Running:
    """A task that runs: what is left of it, and its share of each resource."""

    def __init__(self, index: int, task: Task) -> None:
        self.index, self.stream, self.latency, self.speed = index, task.stream, task.latency, 1.0
        self.left = max((seconds for _, seconds in task.demands), default=0.0)
        self.shares = [(resource, seconds / self.left) for resource, seconds in task.demands if seconds]

    @property
    def uses_resources(self) -> bool:
        """Whether its latency is over."""
        return self.latency <= _DONE

    @property
    def until_event(self) -> float:
        """Seconds until the task begins its work, or ends."""
        return self.left / self.speed if self.uses_resources else self.latency

    def advance(self, seconds: float) -> bool:
        """Let ``seconds`` pass, and return whether the task has ended."""
        if self.uses_resources:
            self.left -= seconds * self.speed
        else:
            self.latency -= seconds
        return self.uses_resources and self.left <= _DONE


def simulate(tasks: Sequence[Task]) -> list[Span]:
    """Return when each task runs.

    Args:
        tasks: in an order in which every task follows those that it waits for.

    Raises:
        ValueError: a task waits for one that comes after it.
    """
    num_waits = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    queues: dict[str, deque[int]] = {}
    for index, task in enumerate(tasks):
        for other in task.after:
            if other >= index:
                raise ValueError(f"expected {task.name} to wait for an earlier task, got number {other} of {index}")
            followers[other].append(index)
        queues.setdefault(task.stream, deque()).append(index)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    running: list[_Running] = []
    busy: set[str] = set()
    now = 0.0
    # The streams whose next task may have become ready.
    candidates: Iterable[str] = queues
    while True:
        for stream in candidates:
            queue = queues[stream]
            if queue and stream not in busy and not num_waits[queue[0]]:
                index = queue.popleft()
                busy.add(stream)
                starts[index] = now
                running.append(_Running(index, tasks[index]))
        if not running:
            return [Span(start, end) for start, end in zip(starts, ends, strict=True)]
        _share_resources(running)
        passed = min(task.until_event for task in running)
        now += passed
        candidates = set()
        for ended in [task for task in running if task.advance(passed)]:
            running.remove(ended)
            ends[ended.index] = now
            busy.discard(ended.stream)
            candidates.add(ended.stream)
            for follower in followers[ended.index]:
                num_waits[follower] -= 1
                candidates.add(tasks[follower].stream)


def _share_resources(running: Sequence[_Running]) -> None:
    """Set the speed of each running task from the shares of all."""
    used: dict[str, float] = {}
    for task in running:
        if task.uses_resources:
            for resource, share in task.shares:
                used[resource] = used.get(resource, 0.0) + share
    for task in running:
        if task.uses_resources:
            task.speed = 1.0 / max(1.0, max((used[resource] for resource, _ in task.shares), default=1.0))
