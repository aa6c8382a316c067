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
import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

PROCESSOR, NETWORK, WITHIN = "processor", "network", "within"
"""The resources: the processor of a rank, the network of its node, and the rank's links within the node."""

Shares = tuple[tuple[str, float], ...]
"""Resources by name, and of each a share between 0 and 1."""

_NOTHING: Shares = ()

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

    @functools.cached_property
    def work_s(self) -> float:
        """Seconds of its work where nothing else runs, without the latency."""
        return max((seconds for _, seconds in self.demands), default=0.0)

    @functools.cached_property
    def shares(self) -> Shares:
        """The share of each resource, between 0 and 1, that its work keeps busy while no other task runs."""
        return tuple((resource, seconds / self.work_s) for resource, seconds in self.demands if seconds)


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


class _Stream:
    """A stream: the indices of its tasks, the next one last, and what is left of the task that it runs."""

    __slots__ = ("indices", "later", "left", "shares", "speed")

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.left, self.speed, self.shares = 0.0, 1.0, _NOTHING
        self.later: Stage | None = None

    def start(self, stage: Stage) -> None:
        """Run a stage: first its latency, which uses nothing, then its work, with a share of each resource."""
        if stage.latency:
            self.left, self.shares, self.later = stage.latency, _NOTHING, stage
        else:
            self.start_work(stage)

    def start_work(self, stage: Stage) -> None:
        """Run the work of a stage, whose latency is over."""
        self.left, self.shares, self.later = stage.work_s, stage.shares, None


# A large model has thousands of tasks under each method, so the loops below call no function for a task that goes on.


def simulate(tasks: Sequence[Task]) -> list[float]:
    """Return the seconds from the start at which each task ends. Every task follows those that it waits for."""
    streams: dict[str, _Stream] = defaultdict(_Stream)
    for index in reversed(range(len(tasks))):
        task = tasks[index]
        assert max(task.after, default=-1) < index, f"{task} waits for a later task than number {index}"
        streams[task.stream].indices.append(index)
    ends = [math.inf] * len(tasks)
    now, idle, running = 0.0, list(streams.values()), list[_Stream]()
    while True:
        idle, started = _start(idle, tasks, ends, now)
        running += started
        if not running:
            return ends
        passed = _next_end(running)
        now += passed
        running, ended = _advance(running, passed)
        for stream in ended:
            ends[stream.indices.pop()] = now
        idle += ended


def _start(
    idle: Sequence[_Stream], tasks: Sequence[Task], ends: Sequence[float], now: float
) -> tuple[list[_Stream], list[_Stream]]:
    """Start the next task of each stream, and return the streams whose next task waits, and those that run."""
    waiting, started = list[_Stream](), list[_Stream]()
    for stream in idle:
        if not stream.indices:
            continue
        task = tasks[stream.indices[-1]]
        for other in task.after:
            if ends[other] > now:
                waiting.append(stream)
                break
        else:
            stream.start(task.stage)
            started.append(stream)
    return waiting, started


def _next_end(running: Sequence[_Stream]) -> float:
    """Slow down the streams whose resources are full, and return the seconds until the first of them comes to an end."""
    used: dict[str, float] = {}
    for stream in running:
        for resource, share in stream.shares:
            used[resource] = used.get(resource, 0.0) + share
    first = math.inf
    for stream in running:
        slowdown = 1.0
        for resource, _ in stream.shares:
            if used[resource] > slowdown:
                slowdown = used[resource]
        stream.speed = 1.0 / slowdown
        if stream.left * slowdown < first:
            first = stream.left * slowdown
    return first


def _advance(running: Sequence[_Stream], seconds: float) -> tuple[list[_Stream], list[_Stream]]:
    """Let ``seconds`` pass, and return the streams that run on, and those whose task has ended."""
    left, ended = list[_Stream](), list[_Stream]()
    for stream in running:
        stream.left -= seconds * stream.speed
        if stream.left <= _DONE and stream.later is not None:
            stream.start_work(stream.later)
        # A stage may have a latency and no work.
        (left if stream.left > _DONE else ended).append(stream)
    return left, ended
