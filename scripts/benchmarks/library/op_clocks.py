"""Clocks for operators: seconds of a call beside a copy of as many bytes, on the CPU and on a GPU.

Copy and operator take turns within one loop, so that both meet the same machine, and medians are compared: their ratio holds
where seconds do not. None of a call's data is in a cache.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import NamedTuple, Protocol

import torch

from library.op_cases import Action, Case


class Timing(NamedTuple):
    """Median seconds of an operator and of the copy beside it."""

    seconds: float
    copy_seconds: float


class Clock(Protocol):
    """Times operators on one device."""

    def beside_copy(self, case: Case, repeats: int) -> Timing:
        """Time an operator and a copy in turns."""

    def seconds(self, run: Action) -> float:
        """Return the duration of one call."""


def median_seconds(clock: Clock, run: Action, repeats: int) -> float:
    """Return the median over ``repeats`` calls, after one that does not count."""
    return statistics.median([clock.seconds(run) for _ in range(repeats + 1)][1:])


def _medians(pairs: list[tuple[float, float]]) -> Timing:
    copies, runs = zip(*pairs, strict=True)
    return Timing(statistics.median(runs), statistics.median(copies))


class CpuClock:
    """Before each call the caches are filled with other data.

    Args:
        threads: a copy is C's ``memmove`` on one thread, and PyTorch's on several.
    """

    OTHER_BYTES = 128 << 20
    """More than the part of the last-level cache that one thread can use."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._other = torch.ones(self.OTHER_BYTES, dtype=torch.uint8)

    def beside_copy(self, case: Case, repeats: int) -> Timing:
        """Time an operator and a copy in turns."""
        run, copy = case.make(), self._copier(case.nbytes // 2)
        return _medians([(self._cold(copy), self._cold(run)) for _ in range(repeats + 1)][1:])

    def seconds(self, run: Action) -> float:
        """Return the duration of one call."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _cold(self, run: Action) -> float:
        self._other.add_(1)  # takes the place of all other data in the caches
        return self.seconds(run)

    def _copier(self, nbytes: int) -> Action:
        source = torch.ones(nbytes, dtype=torch.uint8)
        target = torch.zeros_like(source)
        if self._threads == 1:
            # ``memmove`` gets addresses only; the default arguments keep the tensors.
            return lambda source=source, target=target: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
        return lambda: target.copy_(source)


class CudaClock:
    """Calls go through so many buffers that none of a call's data is in the second-level cache.

    The calls on all buffers are one CUDA graph. A replay of it takes the time of the kernels, without that of Python. PyTorch
    code cannot be captured in a graph, so it is called one call at a time, and at small sizes the time of a call is part of it.
    """

    CACHE_BYTES = 256 << 20
    """Several times any second-level cache."""

    def beside_copy(self, case: Case, repeats: int) -> Timing:
        """Time an operator and a copy in turns."""
        count = max(1, min(64, self.CACHE_BYTES // case.nbytes))
        run = self._graph([case.make() for _ in range(count)])
        copy = self._graph([self._copier(case.nbytes // 2) for _ in range(count)])
        timing = _medians([(self.seconds(copy), self.seconds(run)) for _ in range(repeats + 2)][2:])
        return Timing(timing.seconds / count, timing.copy_seconds / count)

    def seconds(self, run: Action) -> float:
        """Return the time on the device from the start of a call to its end."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _graph(self, calls: list[Action]) -> Action:
        for call in calls:
            call()  # a first call may allocate or load code, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        # The graph holds the addresses of the buffers; the default argument keeps the buffers themselves.
        return lambda calls=calls: graph.replay()

    def _copier(self, nbytes: int) -> Action:
        source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        return lambda: target.copy_(source)
