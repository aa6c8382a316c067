"""A happens-before checker: it finds data races between the streams of a GPU, and needs no GPU.

FSDP2 calls the same streams and events on every device. On CPU they do nothing. The checker puts streams and events with vector
clocks in their place (``clocks.py``), watches which memory every operator reads and writes (``dispatch.py``), knows when the
caching allocator would give memory to a new owner (``memory.py``), and reports accesses that nothing orders. The package takes
its ways for GPUs meanwhile (``replaced.py``). Ranks are those of a fake process group (``world.py``).

    with checked_world(128) as checker:
        train()
    assert checker.races == []

The host runs ahead of a GPU, so an access that the host started earlier happened earlier only where a stream or the host waited.
The checker looks at every order that the GPU may take, and not at the one that happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from happens_before.clocks import Event, Stream, Timeline
from happens_before.dispatch import Operation, Watch
from happens_before.memory import Memory, Race
from happens_before.replaced import has_streams, replaced, steps_of_fsdp2, streams_of_torch
from happens_before.world import answer, fake_world

__all__ = ["Checker", "Event", "Operation", "Race", "Stream", "checked", "checked_world", "fake_world"]

Observer = Callable[[Operation], None]


class Checker:
    """One run under the checker.

    Args:
        host_groups: names of the process groups that move the host's memory.
        observe: called with each operator that a stream was given.

    Attributes:
        races: the races so far.
    """

    def __init__(self, host_groups: Collection[str] = (), observe: Observer | None = None) -> None:
        self.timeline = Timeline()
        self.memory = Memory(self.timeline)
        self.races: list[Race] = self.memory.races
        self.steps = [""]
        self.watch = Watch(self.timeline, self.memory, lambda: self.steps[-1], answer, host_groups, observe)

    @property
    def num_accesses(self) -> int:
        """How many reads and writes of memory were checked."""
        return self.memory.num_accesses


@contextlib.contextmanager
def checked(host_groups: Collection[str] = (), observe: Observer | None = None) -> Iterator[Checker]:
    """Check everything that runs inside."""
    checker = Checker(host_groups, observe)
    tables = (
        streams_of_torch(checker.timeline, checker.memory, checker.watch),
        has_streams(checker.timeline),
        steps_of_fsdp2(checker.steps),
    )
    with replaced(*tables), checker.watch:
        yield checker


@contextlib.contextmanager
def checked_world(num_ranks: int, observe: Observer | None = None) -> Iterator[Checker]:
    """Check everything that runs inside, on rank 0 of a world of ``num_ranks``."""
    with fake_world(num_ranks) as host_groups, checked(host_groups, observe) as checker:
        yield checker
