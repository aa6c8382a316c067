"""The backward pass under way: which one it is, and what runs at its end."""

from __future__ import annotations

from collections.abc import Callable

import torch


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass under way ends, after FSDP2's own final callback."""
    # The engine runs callbacks in the order in which they were queued, also those that callbacks queue. FSDP2 queues
    # its own when the backward pass enters the first unit, ahead of every reduction, and so of this one.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def current_backward() -> int:
    """A number that identifies the backward pass under way, -1 outside of one."""
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
