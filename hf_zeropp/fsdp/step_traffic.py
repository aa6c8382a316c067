"""Bytes that others send in a step: expert and tensor parallelism, clipping, trackers. They are counted in two steps.

From the end of an optimizer's first step to the end of its third, a mode sees all operators. Collectives that this package counts
itself are left out: those over its own groups, those inside of its comm objects, and those of optimizers (optimizer_traffic.py).
Evaluation and generation are left out too. Later steps are taken to send what the smaller of the two sent, and are not looked at.
With a compiled optimizer step nothing is counted.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_zeropp.comm.topology import is_own_group
from hf_zeropp.fsdp.collective_watch import CollectiveWatch
from hf_zeropp.fsdp.comm_objects import is_in_comm_object
from hf_zeropp.fsdp.gradients.backward_passes import current_backward
from hf_zeropp.traffic import Bytes, Traffic, total

WATCHED_STEPS = 2


class StepTraffic:
    """Counts what others send in the steps of one model.

    Args:
        traffic: of the model. The bytes are added to its ``others``.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._watch: _Watch | None = None  # from the end of the first step on, until two were watched
        self._watched: list[dict[str, Bytes]] = []
        self._is_compiled = False

    def enter_pass(self, *, trains: bool) -> None:
        """A forward pass begins. One without gradients is none of a step's, nor is what follows, up to one with them."""
        if self._watch is not None:
            self._watch.is_in_pass, self._watch.is_paused = trains, not trains

    def leave_pass(self) -> None:
        """A forward pass has ended."""
        if self._watch is not None:
            self._watch.is_in_pass = False

    def begin_step(self, *, is_compiled: bool) -> None:
        """An optimizer steps. Its own collectives are counted elsewhere."""
        # A compiled function leaves the modes of the thread as it found them, and breaks if they changed inside.
        self._is_compiled |= is_compiled
        if self._watch is not None:
            self._watch.is_paused = True

    def end_step(self, *, is_first: bool) -> None:
        """An optimizer has stepped, as the first one with these gradients or as another."""
        if self._is_compiled:
            return
        if is_first:
            self._end_period()
        if self._watch is not None:
            self._watch.begin()

    def _end_period(self) -> None:
        repeats = 1
        if self._watch is not None and not self._watch.is_on:
            return  # a mode of the user's was on. The next step is watched in its place
        if self._watch is not None:
            self._watched.append(dict(self._watch.received))
            self._watch.received.clear()
            # The first step counts as the second, unless the counters were reset behind it.
            repeats += len(self._watched) == 1 and self._traffic.steps > 1
            if len(self._watched) == WATCHED_STEPS:
                self._watch.end()
                self._watch = None
            received = self._watched[-1]
        elif self._watched:
            received = min(self._watched, key=lambda counts: _size(total(counts.values())))
        else:
            self._watch = _Watch(self._traffic.ranks_per_node)
            # A script that ends before its third step leaves no mode behind.
            weakref.finalize(self, self._watch.end)
            return
        for name, count in received.items():
            self._traffic.record_other(name, count.times(repeats))


class _Watch(CollectiveWatch):
    """Counts by name what this rank receives.

    Attributes:
        received: by the kind of the collective, and whether it ran in a forward or backward pass, or between them.
        is_in_pass: whether a forward pass is under way.
        is_paused: whether collectives are left out.
        is_on: whether it sees operators.
    """

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__(ranks_per_node)
        self.received: dict[str, Bytes] = defaultdict(Bytes)
        self.is_in_pass = False
        self.is_paused = False
        self.is_on = False

    def count(self, kind: str, group: dist.ProcessGroup, received: Bytes) -> None:
        """Add a collective that is neither this package's nor an optimizer's."""
        if not (self.is_paused or is_own_group(group) or is_in_comm_object()) and _size(received):
            is_in_pass = self.is_in_pass or current_backward() != -1
            self.received[f"{kind}, {'in' if is_in_pass else 'between'} passes"].add(received)

    def begin(self) -> None:
        """Count from here on, unless a mode of the user's is on: it would end before this one."""
        self.is_paused = False
        if not self.is_on and not _get_current_dispatch_mode_stack():
            self.is_on = True
            self.__enter__()

    def end(self) -> None:
        """Count no more. A mode that was begun since and is still on has to end first, and this one is paused until then."""
        stack = _get_current_dispatch_mode_stack()
        if self.is_on and stack and stack[-1] is self:
            self.is_on = False
            self.__exit__(None, None, None)
        self.is_paused = self.is_on


def _size(count: Bytes) -> int:
    return count.intra_node + count.cross_node
