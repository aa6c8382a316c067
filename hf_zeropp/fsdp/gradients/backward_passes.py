"""The backward pass of a model that is under way: where it begins, and where it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

# [Note: where a backward pass ends]
# It ends where FSDP2 ends it, in a callback that FSDP2 gives to autograd when the pass enters the first unit. A pass of autograd
# may contain others: reentrant activation checkpointing computes a block anew and runs its backward pass inside of the outer one.
# FSDP2's hooks run in the inner passes then, but they belong to one backward pass of the model, and its gradients are reduced
# across nodes once. So the outer pass alone counts, which is the one that FSDP2 entered first.
#
# Several roots under one loss give one callback each, in the order in which the pass enters them, and each reduces its root's
# unit there. The end of the pass comes behind all of them.


class Backward:
    """The backward passes of one model, one after the other.

    Args:
        at_end: called when a pass in which gradients were reduced has ended, behind all that FSDP2 does in it.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._under_way: weakref.ref[_Pass] | None = None

    def enter(self) -> None:
        """Note that a backward pass has reached the model. Its first call in a pass decides where the pass ends."""
        self._pass()

    def begins_micro_step(self) -> bool:
        """Return whether the micro-step of the pass under way is asked about for the first time."""
        now = self._pass()
        is_first, now.is_known = not now.is_known, True
        return is_first

    def begins_to_reduce(self) -> bool:
        """Return whether the reduction that begins now is the first one of its pass."""
        now = self._pass()
        is_first, now.has_reduced = not now.has_reduced, True
        return is_first

    def _pass(self) -> _Pass:
        now = None if self._under_way is None else self._under_way()
        if now is None or now.has_ended:
            now = _Pass(self._at_end)
            self._under_way = weakref.ref(now)
            queue_after_backward(now)
        return now


class _Pass:
    """One backward pass. Autograd alone holds it, so it is gone as soon as the pass is, also where the pass raised."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.is_known = False
        self.has_reduced = False
        self.has_ended = False
        self._at_end = at_end
        self._is_behind_all = False

    def __call__(self) -> None:
        # FSDP2 gives all its callbacks to autograd while the pass runs. Those of further roots may stand behind this one, and
        # none behind the next call.
        if not self._is_behind_all:
            self._is_behind_all = True
            queue_after_backward(self)
            return
        self.has_ended = True
        if self.has_reduced:
            self._at_end()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass under way ends, behind the callbacks that were queued before."""
    # The engine runs callbacks in the order in which they were queued, also those that callbacks queue.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def current_backward() -> int:
    """A number that identifies autograd's pass under way, which may be one inside of another, -1 outside of one."""
    return torch._C._current_graph_task_id()


def require_backward() -> None:
    """Assert that a backward pass is under way.

    Raises:
        RuntimeError: none is.
    """
    if current_backward() == -1:
        raise RuntimeError(
            "Expected FSDP2 to reduce gradients in a backward pass, but none is under way. ZeRO++ supports neither manual "
            "finalization (model.set_manual_backward_finalization(False) turns it off) nor the schedules of "
            "torch.distributed.pipelining."
        )
