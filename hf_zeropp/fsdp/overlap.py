"""Communication that runs while the model computes, on backends without streams (gloo).

On accelerators FSDP2 already overlaps: its collectives run on their own streams, and the CPU runs ahead. On gloo a
collective blocks the only thread there is. But gloo moves bytes in threads of its own, so it is enough to *start* each
hop early and to *finish* it late. No thread of ours: every rank starts the same hops in the same program order.

Gathers (`GatherAhead`). The hop-1 results of all units are kept anyway (secondary shards), and all their inputs are
final once the optimizer has stepped. So the first gather that finds its secondary stale starts hop 1 of every unit
that followed it last time; each is finished when its unit is needed.

Reductions (`ReducePipeline`). A unit's reduction is cut into three stages, one behind another by one unit:

    unit k:    encode, start hop 1 | (backward of k-1) | sum, requantize, start hop 2 | (...) | decode, add to .grad

FSDP2 must be given an output at once: it gets zeros, and the result is added to ``.grad`` at the end of the backward
pass, before anybody may look at it. The same flush serves gradient accumulation: see
[Note: gradient accumulation] in reduce_comm.py.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import ReduceLayouts

if TYPE_CHECKING:
    from hf_zeropp.fsdp.all_gather import ZeroPPAllGather
    from hf_zeropp.fsdp.reduce_scatter import ZeroPPReduceScatter

MAX_CROSSING = 3
"""Reductions whose hop 2 may be under way: bounds the wire buffers a slow network can pile up."""


class GatherAhead:
    """Starts hop 1 of the units that will be gathered next, in the order of the last forward pass."""

    def __init__(self) -> None:
        self._order: list[ZeroPPAllGather] = []

    def start_from(self, gather: ZeroPPAllGather) -> None:
        """``gather`` is about to need its hop 1: start it for the units behind it as well."""
        if gather not in self._order:
            self._order.append(gather)
            return
        for follower in self._order[self._order.index(gather) + 1 :]:
            follower.start_ahead()


@dataclasses.dataclass
class ReduceJob:
    """One unit's reduction between its first and its last stage."""

    comm: ZeroPPReduceScatter
    layouts: ReduceLayouts
    scale: float
    is_last_micro_step: bool
    flights: list[Flight]


class ReducePipeline:
    """Reductions under way: those in hop 1 within the node, and those in hop 2 across nodes, each in program order."""

    def __init__(self) -> None:
        self._in_node: deque[ReduceJob] = deque()
        self._crossing: deque[ReduceJob] = deque()

    def __len__(self) -> int:
        return len(self._in_node) + len(self._crossing)

    def advance(self) -> None:
        """Move the job in hop 1 on to hop 2. Before the next one starts, which then finds its wire buffers free."""
        self._leave_node()
        while len(self._crossing) > MAX_CROSSING:
            self._arrive(self._crossing.popleft())

    def submit(self, job: ReduceJob) -> None:
        """Take a job whose hop 1 was started."""
        self._in_node.append(job)

    def drain(self) -> None:
        """Finish everything."""
        self._leave_node()
        while self._crossing:
            self._arrive(self._crossing.popleft())

    def discard(self) -> None:
        """Forget the jobs of a backward pass that raised."""
        for job in (*self._in_node, *self._crossing):
            job.comm.reduce.abandon(job.flights)
        self._in_node.clear()
        self._crossing.clear()

    def _leave_node(self) -> None:
        while self._in_node:
            job = self._in_node.popleft()
            if job.is_last_micro_step:
                job.flights = job.comm.cross_over(job.flights, job.layouts)
                self._crossing.append(job)
            else:
                job.comm.accumulate(job.flights, job.layouts, job.scale)

    def _arrive(self, job: ReduceJob) -> None:
        job.comm.add_to_grads(job.flights, job.layouts, job.scale)
