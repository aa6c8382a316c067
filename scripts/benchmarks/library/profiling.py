"""The parts of a training step's wall time: kernels, hops, waiting for peers, computation.

A *phase* is a kind of work that has a function of its own, such as encoding or a hop. For the time of a profile a rank
wraps these functions, and notes an event at every call, on the monotonic clock of the machine, which all ranks share.
Phases nest, and the time of an inner phase does not count for the outer one. Time in no phase is computation.

A rank that enters a collective early waits for its peers, and that wait says nothing about the network. So the driver
compares ranks: until the last member of the group has started a collective, the others wait for a peer; only the time
after that is the collective's. A barrier before each collective would separate the two as well, but it would change
the step that is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

KERNELS = {
    "quantize": "encode",
    "dequantize": "decode",
    "dequantize_sum": "sum",
    "dequantize_sum_quantize": "sum and encode",
    "quantize_difference": "encode",
    "dequantize_update": "update",
}
"""The phase of each operator in ``hf_zeropp.ops``."""

EXCHANGE = "exchange of statements"
WAITING = "waiting for peers"
COMPUTE = "computation"


@dataclasses.dataclass
class Event:
    """One call of a phase's function on one rank. Times are in seconds.

    Attributes:
        phase: the phase.
        start: when the call began.
        end: when it returned.
        exclusive: its duration without that of the phases inside it.
        started: for a collective, when this rank started it. Waiting for an asynchronous one is an event of its own,
            which begins later.
        group: for a collective, the ranks of its group.
        index: for a collective, its number among those of its group.
        thread: ``main``, or ``backward`` for a thread of autograd's.
    """

    phase: str
    start: float = 0.0
    end: float = 0.0
    exclusive: float = 0.0
    started: float = 0.0
    group: tuple[int, ...] | None = None
    index: int = 0
    thread: str = "main"


class Profile:
    """A context manager that notes this rank's events while it is entered.

    Attributes:
        events: the events in the order in which they ended.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._undo: list[Callable[[], None]] = []
        self._local = threading.local()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def __enter__(self) -> Profile:
        from hf_zeropp import ops
        from hf_zeropp.comm.agreement import Channel
        from hf_zeropp.comm.hop import Hop

        for name, phase in KERNELS.items():
            self._wrap(ops, name, _plain_event(phase))
        self._wrap(Hop, "all_gather", _hop_event)
        self._wrap(Hop, "all_to_all", _hop_event)
        self._wrap(Hop, "barrier", _barrier_event)
        self._wrap(Channel, "start", lambda channel, *buffers: _group_event(EXCHANGE)(group=channel.group))
        self._wrap_fsdp2()
        self._begin = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end = time.monotonic()
        # In reverse, so that a function that was wrapped twice is itself again.
        for undo in reversed(self._undo):
            undo()

    def summary(self, steps: int) -> dict[str, Any]:
        """Return what ``phase_seconds`` needs of this rank.

        Args:
            steps: the number of steps that ran while the profile was entered.
        """
        return {
            "steps": steps,
            "wall": self._end - self._begin,
            "events": [dataclasses.asdict(event) for event in self.events],
        }

    def _wrap_fsdp2(self) -> None:
        import torch
        import torch.distributed as dist

        from hf_zeropp.fsdp.units import DefaultAllGather, DefaultReduceScatter

        self._wrap(DefaultAllGather, "__call__", _group_event("gather, FSDP2"))
        self._wrap(DefaultReduceScatter, "__call__", _group_event("reduce, FSDP2"))
        self._wrap(dist, "all_reduce", _group_event("all-reduce"))  # HSDP reduces gradients over nodes with it
        self._wrap(torch.optim.AdamW, "step", _plain_event("optimizer"))

    def _wrap(self, owner: Any, name: str, describe: Callable[..., Event]) -> None:
        """Replace a function of a module or class by one that notes an event per call.

        Args:
            owner: the module or class.
            name: the function's name in it.
            describe: makes the event from the arguments of a call.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            event = describe(*args, **kwargs)
            if event.group is not None:
                # All members of a group start its collectives in the same order, so the number names one on all ranks.
                event.index = self._counts[event.group]
                self._counts[event.group] += 1
            result = self._run(event, original, *args, **kwargs)
            event.started = event.start
            return _TimedWork(self, result, event) if hasattr(result, "wait") else result

        # Callers meet the wrapper only if they look the function up at each call, as ``ops.quantize(...)`` does.
        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original))

    def _run(self, event: Event, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, and note it as the event."""
        # One entry for each phase that is open in this thread: the seconds that its inner phases took.
        # Autograd runs hooks of the backward pass in a thread of its own, where other phases are open.
        stack = self._local.__dict__.setdefault("stack", [])
        event.thread = "main" if threading.current_thread() is threading.main_thread() else "backward"
        stack.append(0.0)
        event.start = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            event.end = time.monotonic()
            event.exclusive = event.end - event.start - stack.pop()
            if stack:
                stack[-1] += event.end - event.start
            self.events.append(event)


class _TimedWork:
    """An asynchronous collective under way. Waiting for it counts as its phase; work done before the wait does not."""

    def __init__(self, profile: Profile, work: Any, launch: Event) -> None:
        self._profile = profile
        self._work = work
        self._launch = launch

    def wait(self, *args: Any) -> Any:
        # The collective runs from its launch on, so that is when this rank is counted as present. While the wait lasts, the
        # rank has either not been joined by its peers yet, or bytes are under way: ``phase_seconds`` tells which.
        event = dataclasses.replace(self._launch)
        result = self._profile._run(event, self._work.wait, *args)
        event.started = self._launch.start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _plain_event(phase: str) -> Callable[..., Event]:
    return lambda *args, **kwargs: Event(phase)


def _hop_event(hop: Any, *args: Any, **kwargs: Any) -> Event:
    return _group_event(hop.name)(group=hop.group)


def _barrier_event(hop: Any) -> Event:
    return _group_event("barrier within node")(group=hop.group)


def _group_event(phase: str) -> Callable[..., Event]:
    """Return a function that describes a collective whose callers name its group, as FSDP2 does."""

    def describe(*args: Any, group: Any, **kwargs: Any) -> Event:
        import torch.distributed as dist

        return Event(phase, group=tuple(dist.get_process_group_ranks(group)))

    return describe


def phase_seconds(summaries: list[dict[str, Any]]) -> dict[str, float]:
    """Combine the profiles of all ranks.

    Args:
        summaries: what ``Profile.summary`` returned on every rank, in rank order.

    Returns:
        Seconds per step by phase, the mean over ranks. Their sum is the wall time of a step under the profile.
    """
    events = [[Event(**event) for event in summary["events"]] for summary in summaries]
    last_start = _last_starts(events)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(summaries))
    for rank, (summary, rank_events) in enumerate(zip(summaries, events, strict=True)):
        for event in rank_events:
            waited = 0.0
            if event.group is not None:
                # The rank cannot have waited for peers longer than it was in the collective, nor before it was there.
                ready = last_start[tuple(event.group), event.index]
                waited = min(event.exclusive, max(0.0, ready - event.start))
                totals[WAITING][rank] += waited
            totals[event.phase][rank] += event.exclusive - waited
        totals[COMPUTE][rank] = summary["wall"] - sum(event.exclusive for event in rank_events)
    steps = summaries[0]["steps"]
    return {phase: statistics.mean(seconds) / steps for phase, seconds in totals.items()}


def _last_starts(events: list[list[Event]]) -> dict[tuple[tuple[int, ...], int], float]:
    """Return, by group and index, when the last member of the group started a collective."""
    last: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)
    for event in (event for rank_events in events for event in rank_events):
        if event.group is not None:
            key = tuple(event.group), event.index
            last[key] = max(last[key], event.started)
    return last
