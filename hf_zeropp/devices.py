"""The one question about a device that changes what the package does: whether its work is queued in streams.

An accelerator runs what the host queues in its streams, later than the host goes on, and its allocator reuses memory in the
order of a stream. So FSDP2 overlaps communication with compute there, events order one stream after another, and the host
must not read a value, since it would wait for it. A CPU has no streams: a collective blocks the only thread unless it is started
asynchronously, memory that is freed goes back to the operating system, and reading a value costs nothing but the reading.

Every place that takes another way for this reason asks here, as ``devices.has_streams(...)``. A test that gives the answer of an
accelerator (tests/helpers/happens_before) then sees all of these ways on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def has_streams(device: torch.device | str) -> bool:
    """Return whether work on ``device``, or on a device of this type, is queued in streams."""
    # This is asked some twenty times for each unit, nearly always of a device: making another one would double the time.
    return (device if isinstance(device, torch.device) else torch.device(device)).type != "cpu"


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream in which work on ``device`` is queued now; None on a device without streams."""
    return torch.accelerator.current_stream(device) if has_streams(device) else None


def new_stream(device_type: str) -> torch.Stream:
    """Return a new stream of the current device, ahead of the others where streams have priorities, as those of FSDP2 are."""
    return torch.get_device_module(device_type).Stream(priority=-1)


@contextmanager
def in_turn_with(owner: torch.Stream | None) -> Iterator[None]:
    """Let the current stream use memory of ``owner`` inside: behind what is queued there, and ahead of what comes there next."""
    if owner is None:  # a device without streams
        yield
        return
    current = torch.accelerator.current_stream()
    current.wait_stream(owner)
    yield
    owner.wait_stream(current)


def on_stream(stream: torch.Stream, device_type: str) -> AbstractContextManager[None]:
    """Return a context in which work is queued in ``stream``."""
    return torch.get_device_module(device_type).stream(stream)
