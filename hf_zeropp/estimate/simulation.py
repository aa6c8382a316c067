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
from collections.abc import Sequence
from typing import NamedTuple

PROCESSOR, NETWORK, WITHIN = "processor", "network", "within"
"""The resources: the processor of a rank, the network of its node, and the rank's links within the node."""

_DONE = 1e-12
"""Seconds of work left that count as none: what rounding leaves over."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One piece of work: a part of the model, or one hop or kernel of a gather or a reduction.

    Attributes:
        name: for people.
        demands: resources by name, each with the seconds of it that the stage needs at full rate.
        latency: seconds before the work begins, in which it uses no resource.
        computes: whether it is a part of the model, or the optimizer, and no part of an exchange.
    """

    name: str
    demands: tuple[tuple[str, float], ...]
    latency: float = 0.0
    computes: bool = False

    @property
    def work_s(self) -> float:
        """Seconds of its work where nothing else runs, without the latency."""
        return max((seconds for _, seconds in self.demands), default=0.0)


class Task(NamedTuple):
    """A stage on a stream.

    Attributes:
        stage: what runs.
        stream: the name of its stream.
        after: indices of earlier tasks that it waits for.
    """

    stage: Stage
    stream: str
    after: tuple[int, ...] = ()


class _Running:
    """A task that runs: first its latency, which uses nothing, then its work, with a share of each resource."""

    def __init__(self, index: int, stage: Stage) -> None:
        self.index, self.speed = index, 1.0
        work_s = stage.work_s
        shares = [(resource, seconds / work_s) for resource, seconds in stage.demands if seconds]
        # The seconds and shares of what is left, the last part first.
        self._parts = [(work_s, shares), *([(stage.latency, [])] if stage.latency else [])]
        self.left, self.shares = self._parts.pop()

    def advance(self, seconds: float) -> bool:
        """Let ``seconds`` pass, and return whether the task has ended."""
        self.left -= seconds * self.speed
        if self.left <= _DONE and self._parts:
            self.left, self.shares = self._parts.pop()
        return self.left <= _DONE


def simulate(tasks: Sequence[Task]) -> list[float]:
    """Return the seconds from the start at which each task ends. Every task follows those that it waits for."""
    queues: dict[str, deque[int]] = {}
    for index, task in enumerate(tasks):
        assert all(other < index for other in task.after), f"{task} waits for a later task than number {index}"
        queues.setdefault(task.stream, deque()).append(index)
    ends: dict[int, float] = {}
    running: dict[str, _Running] = {}  # by stream
    now = 0.0
    while True:
        for stream, queue in queues.items():
            if queue and stream not in running and all(other in ends for other in tasks[queue[0]].after):
                index = queue.popleft()
                running[stream] = _Running(index, tasks[index].stage)
        if not running:
            return [ends[index] for index in range(len(tasks))]
        used: dict[str, float] = {}
        for one in running.values():
            for resource, share in one.shares:
                used[resource] = used.get(resource, 0.0) + share
        for one in running.values():
            one.speed = 1.0 / max(1.0, max((used[resource] for resource, _ in one.shares), default=1.0))
        passed = min(one.left / one.speed for one in running.values())
        now += passed
        for stream in [stream for stream, one in running.items() if one.advance(passed)]:
            ends[running.pop(stream).index] = now
