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
from typing import NamedTuple

from hf_zeropp.traffic import Bytes

PROCESSOR, NETWORK, WITHIN = "processor", "network", "within"
"""The resources: the processor of a rank, the network of its node, and the rank's links within the node."""

COMPUTE, KERNEL, WIRE = "compute", "kernel", "wire"
"""Kinds of tasks: the model and the optimizer; encoding, decoding and copies for communication; collectives."""

_DONE = 1e-12
"""Seconds of work left that count as none: what rounding leaves over."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One piece of work: a part of the model, or one hop or kernel of a gather or a reduction.

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

    @property
    def work_s(self) -> float:
        """Seconds of its work where nothing else runs, without the latency."""
        return max((seconds for _, seconds in self.demands), default=0.0)


class Task(NamedTuple):
    """A stage of a unit on a stream.

    Attributes:
        stage: what runs.
        stream: the name of its stream.
        after: indices of earlier tasks that it waits for.
        unit: the unit's name, for people.
    """

    stage: Stage
    stream: str
    after: tuple[int, ...] = ()
    unit: str = ""


class Span(NamedTuple):
    """When a task ran, in seconds from the start."""

    start: float
    end: float


class _Running:
    """A task that runs: what is left of it, and its share of each resource."""

    def __init__(self, index: int, task: Task) -> None:
        self.index, self.stream, self.latency, self.speed = index, task.stream, task.stage.latency, 1.0
        self.left = task.stage.work_s
        self.shares = [(resource, seconds / self.left) for resource, seconds in task.stage.demands if seconds]

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
    """Return when each task runs. Every task follows those that it waits for."""
    num_waits = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    queues: dict[str, deque[int]] = {}
    for index, task in enumerate(tasks):
        assert all(other < index for other in task.after), f"{task} waits for a later task than number {index}"
        for other in task.after:
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
            return [Span(*times) for times in zip(starts, ends, strict=True)]
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
    working = [task for task in running if task.uses_resources]
    used: dict[str, float] = {}
    for task in working:
        for resource, share in task.shares:
            used[resource] = used.get(resource, 0.0) + share
    for task in working:
        task.speed = 1.0 / max(1.0, max((used[resource] for resource, _ in task.shares), default=1.0))
