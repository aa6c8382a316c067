"""Reductions that run while the model computes, on backends without streams (gloo).

On accelerators FSDP2 overlaps by itself: its collectives run on streams of their own, and the CPU runs ahead. On gloo a
collective blocks the only thread there is. But gloo moves bytes in threads of its own, so it is enough to *start* each hop
early and to *finish* it late. No thread of ours is needed: every rank starts the same hops in the same program order.

A unit's reduction is cut into three stages. Each is one unit behind the one before it:

    unit k:    encode, start node hop | (backward of k-1) | sum, requantize, start cross hop | (...) | decode, add to .grad

With one rank per node there is no node hop, and the cross hop starts at once.

FSDP2 must be given an output at once. It gets zeros, and ``.grad`` is marked as pending until the result is added to it, at
the end of the backward pass at the latest (pending.py).

Gathers overlap more simply: their inputs are final once the optimizer has stepped, so the cross hops of all stale units are
started together when a forward pass begins (decisions.py), and each is finished when its unit is needed.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

MAX_CROSSING = 3
"""Reductions whose cross hop may be under way: bounds the wire buffers that a slow network can pile up."""


class Reduction(Protocol):
    """One unit's reduction, of which the node hop was started."""

    @property
    def has_node_hop(self) -> bool:
        """Whether anything moves within the node. All reductions of a model give the same answer."""

    def leave_node(self) -> bool:
        """Finish the node hop. Return whether a cross hop was started, which ``arrive`` must finish."""

    def arrive(self) -> None:
        """Finish the cross hop and add the result to ``.grad``."""


class ReducePipeline:
    """Reductions under way: those in the node hop, and those in the cross hop, each in program order."""

    def __init__(self) -> None:
        self._in_node: deque[Reduction] = deque()
        self._crossing: deque[Reduction] = deque()

    def __len__(self) -> int:
        return len(self._in_node) + len(self._crossing)

    def advance(self) -> None:
        """Move the reduction in the node hop on. Call it before the next one starts, which then finds wire buffers free."""
        # Hops are finished in the order in which they were started, which is the order of FSDP2's reductions and so
        # equal on all ranks. A hop that happens to arrive earlier is not preferred: what is finished here starts
        # another collective, and ranks would start them in different orders.
        self._leave_node()
        while len(self._crossing) > MAX_CROSSING:
            self._crossing.popleft().arrive()

    def submit(self, reduction: Reduction) -> None:
        """Take a reduction whose node hop was started."""
        self._in_node.append(reduction)
        if not reduction.has_node_hop:
            self._leave_node()

    def drain(self) -> None:
        """Finish everything, also what a backward pass that raised has left."""
        # The node hop goes first, because leaving it starts one more cross hop, which the loop then finishes.
        self._leave_node()
        while self._crossing:
            self._crossing.popleft().arrive()

    def _leave_node(self) -> None:
        while self._in_node:
            reduction = self._in_node.popleft()
            if reduction.leave_node():
                self._crossing.append(reduction)
