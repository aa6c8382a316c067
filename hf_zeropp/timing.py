"""Time spent in collectives, measured without ever making the host wait for the device.

On CPU a collective blocks its caller, when it is issued or when its work is waited for: the wall time of both is what
training pays for it. On an accelerator it runs on a stream behind the caller's back: two events mark it, and their
distance is read once both have passed, so a figure may lag by the collectives under way. There it includes the wait
for slower ranks, and what overlaps with compute is not taken off.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


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
