"""A happens-before checker: it finds data races between the streams of a GPU, and needs no GPU.

FSDP2 calls the same streams and events on every device. On CPU they do nothing. The checker puts streams and events with vector
clocks in their place (``clocks.py``), watches which memory every operator reads and writes (``dispatch.py``), knows when the
caching allocator would give memory to a new owner (``memory.py``), and reports accesses that nothing orders. The package takes
its ways for GPUs meanwhile (``replaced.py``). Ranks are those of a fake process group (``world.py``).

    with checked_world(128) as checker:
        train()
    assert checker.races == []

The host runs ahead of a GPU, so an access that the host started earlier did not happen earlier unless a stream or the host waited.
The checker looks at every order that the GPU may take, and not at the one that happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from happens_before.clocks import Event, Stream, Timeline
from happens_before.dispatch import Watch
from happens_before.memory import Memory, Race
from happens_before.replaced import has_streams, replaced, steps_of_fsdp2, streams_of_torch
from happens_before.world import answer, fake_world

__all__ = ["Checker", "Event", "Race", "Stream", "checked", "checked_world"]


class Checker:
    """One run under the checker."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.memory = Memory(self.timeline)
        self.steps: list[str] = []
        self.host_groups: set[str] = set()
        step = lambda: self.steps[-1] if self.steps else ""  # noqa: E731
        self.watch = Watch(self.timeline, self.memory, step, answer, self.host_groups)

    @property
    def races(self) -> list[Race]:
        return self.memory.races

    @property
    def num_accesses(self) -> int:
        return self.memory.num_accesses

    def report(self) -> str:
        """Return the races in words."""
        return "\n".join(map(str, self.races))


@contextlib.contextmanager
def checked() -> Iterator[Checker]:
    """Check everything that runs inside."""
    checker = Checker()
    tables = streams_of_torch(checker.timeline, checker.memory, checker.watch)
    with replaced(tables, has_streams(checker.timeline), steps_of_fsdp2(checker.steps)), checker.watch:
        yield checker


@contextlib.contextmanager
def checked_world(num_ranks: int) -> Iterator[Checker]:
    """Check everything that runs inside, on rank 0 of a world of ``num_ranks``."""
    with checked() as checker, fake_world(num_ranks, checker.host_groups):
        yield checker
