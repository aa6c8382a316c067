"""Streams, events and the host, with vector clocks: which operation happens before which.

A stream runs its operations one after the other, each at a *tick*. A clock says for every stream up to which tick its operations
have happened: an operation that another stream ran at tick 7 happened before an operation whose clock holds 7 or more for that
stream. Streams learn of each other's ticks where one waits for an event of the other, and nowhere else. The host starts
operations in program order and orders nothing by that. It learns ticks where it synchronizes, and every operation that it starts
afterwards knows them too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

Clock = dict["Stream", int]


def join(clock: Clock, other: Clock) -> None:
    """Let ``clock`` know what ``other`` knows."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


class Stream:
    """A stream of a device, with the methods of ``torch.Stream`` that FSDP2 and the package call.

    Attributes:
        name: for people.
        clock: what the next operation on the stream knows. Its entry for the stream itself is the last tick.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}
        self._timeline = timeline

    def __repr__(self) -> str:
        return self.name

    def launch(self) -> int:
        """Start an operation, and return its tick."""
        join(self.clock, self._timeline.host)
        self.clock[self] += 1
        return self.clock[self]

    def wait_stream(self, stream: Stream) -> None:
        join(self.clock, stream.clock)

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def record_event(self) -> Event:
        event = Event(self._timeline)
        event.record(self)
        return event

    def synchronize(self) -> None:
        join(self._timeline.host, self.clock)


class Event:
    """An event, with the methods of ``torch.Event``. One that was never recorded orders nothing."""

    def __init__(self, timeline: Timeline) -> None:
        self.clock: Clock = {}
        self._timeline = timeline

    def query(self) -> bool:
        """Return that it has happened: operations run where they are launched. The host knows of it from now on."""
        join(self._timeline.host, self.clock)
        return True

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self._timeline.current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._timeline.current).wait_event(self)

    def synchronize(self) -> None:
        join(self._timeline.host, self.clock)


class Timeline:
    """All streams of one device, the current one, and the host's clock."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.default = Stream(self, "default stream")
        self.current = self.default
        self._streams = [self.default]
        self._of_groups: dict[str, Stream] = {}

    def new_stream(self, *args: Any, name: str = "", **kwargs: Any) -> Stream:
        """Make a stream, as ``torch.Stream`` does. Device and priority order nothing."""
        self._streams.append(Stream(self, name or f"stream {len(self._streams)}"))
        return self._streams[-1]

    def new_event(self, *args: Any, **kwargs: Any) -> Event:
        """Make an event, as ``torch.Event`` does."""
        return Event(self)

    def stream_of_group(self, name: str) -> Stream:
        """Return the stream on which a process group runs its asynchronous collectives, as NCCL does."""
        if name not in self._of_groups:
            self._of_groups[name] = self.new_stream(name=f"stream of group {name}")
        return self._of_groups[name]

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, *device: Any) -> None:
        """Let the host wait for all streams."""
        for stream in self._streams:
            stream.synchronize()
