"""The drivers of reductions: when a reduction that has started a hop goes on.

A reduction (reduce.py) is a generator. It stops where a hop of it is under way, and its driver decides what the host does
meanwhile. All ranks make the same reductions in the same order, and a driver goes by that order alone. A hop that happens to
arrive earlier is not preferred: what follows it starts another collective, and ranks would start them in different orders.

On a CPU a collective of gloo blocks the only thread there is. But gloo moves bytes in threads of its own, so it is enough to
*start* each hop early and to go on with its reduction late. The parts of a unit's reduction come one unit behind each other:

    unit k:    encode, start node hop | (backward of k-1) | sum, encode, start cross hop | (...) | decode, add to .grad

With one rank per node there is no node hop, and the cross hop starts at once. FSDP2 wants an output when its call returns. It
gets zeros, and ``.grad`` is pending until the result is added to it (pending.py), at the end of the backward pass at the latest.

On an accelerator FSDP2 calls reductions on a stream of their own, and the host runs ahead. Two hops on that stream, one behind
the other, would leave the network idle while bytes move within the node and are decoded. So the last part of a reduction runs on
FSDP2's stream for all-reduces:

    stream of reductions     node hop k | node hop k-1     | node hop k-2
    stream of all-reduces               | cross hop of k   | cross hop of k-1

NCCL starts the kernels of all communicators of a device in the order of the host's calls (comm/nccl.py), so a cross hop is called
when its sums are there, and not earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hf_zeropp import devices
from hf_zeropp.comm.hop import Flight

MAX_CROSSING = 3
"""Reductions that may be crossing on a CPU before the oldest is taken a hop further. It bounds wire buffers on slow networks."""

MAX_WAITING = 1
"""Reductions whose cross hop may still run on an accelerator when the next reduction starts. It bounds memory, as above."""


class UnderWay(NamedTuple):
    """A hop of a reduction that has started.

    Attributes:
        flight: the hop.
        crosses: whether it is the cross hop, and not the node hop.
    """

    flight: Flight
    crosses: bool


Reduction = Iterator[UnderWay]
"""One unit's reduction. ``next`` takes it to its next hop under way, or to its end."""


class Driver:
    """It takes reductions from hop to hop. This one takes each to its end while FSDP2 waits.

    Attributes:
        is_late: whether results are there only after FSDP2 has added its output to ``.grad``.
    """

    is_late = False

    def make_room(self) -> None:
        """Called at the beginning of every reduction that FSDP2 asks for, also of one that another driver runs."""

    def run(self, reduction: Reduction) -> None:
        """Begin a reduction, and take it as far as it goes while FSDP2 waits."""
        for _ in reduction:
            pass

    def drain(self) -> None:
        """Finish all reductions, and give back what they hold, also after a backward pass that raised."""

    def __len__(self) -> int:
        """Return the number of reductions that ``drain`` would take through a hop."""
        return 0


BLOCKING = Driver()
"""For all reductions whose output is looked at as soon as FSDP2 has it, and for all where nothing overlaps."""


class GlooDriver(Driver):
    """Keeps reductions under way on a CPU: those in the node hop, and those in the cross hop, each in program order."""

    is_late = True

    def __init__(self) -> None:
        self._in_node: deque[Reduction] = deque()
        self._crossing: deque[Reduction] = deque()

    def __len__(self) -> int:
        return len(self._in_node) + len(self._crossing)

    def run(self, reduction: Reduction) -> None:
        """Begin a reduction, one unit ahead of the one before it."""
        # The unit before this one leaves its node hop first: its wire buffers are then free for this one.
        self._leave_node()
        # Each is taken one hop further. Among replicas that is not yet its end, and it goes to the end of the queue.
        for _ in range(len(self._crossing) - MAX_CROSSING):
            self._take_on(self._crossing.popleft())
        self._take_on(reduction)

    def drain(self) -> None:
        """Finish all reductions, also those that a backward pass left when it raised."""
        # The node hop goes first, because leaving it starts one more cross hop, which the loop then finishes.
        self._leave_node()
        while self._crossing:
            self._take_on(self._crossing.popleft())

    def _leave_node(self) -> None:
        while self._in_node:
            self._take_on(self._in_node.popleft())

    def _take_on(self, reduction: Reduction) -> None:
        """Take a reduction to its next hop. It is in no queue meanwhile, and one that raises comes into none any more."""
        if (hop := next(reduction, None)) is not None:
            (self._crossing if hop.crosses else self._in_node).append(reduction)


class _Held(NamedTuple):
    """Memory of a reduction whose cross hop runs on one stream, while the stream that the memory belongs to goes on.

    Attributes:
        owner: FSDP2's stream of reductions, to which the memory returns.
        stream: FSDP2's stream for all-reduces, on which it is still used.
        tensors: the memory.
    """

    owner: torch.Stream
    stream: torch.Stream
    tensors: Sequence[torch.Tensor]


class StreamDriver(Driver):
    """Runs each reduction in two parts: up to its cross hop on FSDP2's stream of reductions, the rest on that of all-reduces.

    The memory of a cross hop belongs to the stream of reductions, where the next reduction would get it at once. It is held until
    that stream has waited for the cross hop. Roots have streams of their own, so the memory's own stream waits, whichever root
    comes next.
    """

    def __init__(self) -> None:
        self._crossing: tuple[Reduction, Flight] | None = None  # until FSDP2 calls ``run_rest``
        self._held: deque[tuple[torch.Event, _Held]] = deque()
        self._last: _Held | None = None
        self._owner: torch.Stream | None = None

    def make_room(self) -> None:
        """Let cross hops but those that may go on end before the reduction that comes now on the current stream."""
        self._crossing = None  # a pass that raised may have left one
        self._owner = torch.accelerator.current_stream()
        while len(self._held) >= MAX_WAITING:
            event, held = self._held.popleft()
            held.owner.wait_event(event)

    def run(self, reduction: Reduction) -> None:
        """Run the first part of a reduction: up to its cross hop, or all of it where nothing crosses."""
        for hop in reduction:
            if hop.crosses:
                self._crossing = reduction, hop.flight
                return

    def run_rest(self, used: Sequence[torch.Tensor]) -> None:
        """Run the rest of a reduction on FSDP2's stream for all-reduces, where FSDP2 uses the memory ``used``, and drops it."""
        crossing, self._crossing = self._crossing, None
        sent = () if crossing is None else (crossing[1].received, *crossing[1].sent)
        self._hold([*used, *sent])
        if crossing is not None:
            for _ in crossing[0]:
                pass

    def drain(self) -> None:
        """Give all memory back, behind the cross hops that use it."""
        # FSDP2 has called ``run_rest`` in every reduction but one that raised before.
        self._crossing = None
        # FSDP2 need not have waited for them: it does not in a pass that is not the last (``set_is_last_backward(False)``).
        for event, held in self._held:
            held.owner.wait_event(event)
        if self._last is not None:
            self._last.owner.wait_stream(self._last.stream)
        self._held.clear()
        self._last = None

    def _hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of a reduction, whose cross hop is about to be waited for on the current stream."""
        assert self._owner is not None
        # FSDP2 has queued all its work on the output of the reduction before this one. An event that is recorded on that
        # reduction's stream now comes behind this work.
        if self._last is not None:
            self._held.append((self._last.stream.record_event(), self._last))
        self._last = _Held(self._owner, torch.accelerator.current_stream(), tensors)


def new_driver(device_type: str, *, overlaps: bool) -> Driver:
    """Return the driver of one model's reductions on a device: one that overlaps them with compute, or one that blocks."""
    if not overlaps:
        return BLOCKING
    return StreamDriver() if devices.has_streams(device_type) else GlooDriver()
