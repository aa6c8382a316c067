"""Let gloo's threads drop their last works before the interpreter ends.

A gloo thread completes a work, which ends the caller's wait, and drops it a moment later. With it go Python tensors, for
which the thread takes the GIL. CPython before 3.14 ends a thread that asks for the GIL after finalization began
(``pthread_exit``); that unwinds through gloo's run loop, where C++ permits no unwinding, and the whole process aborts, after
its work: "terminate called without an active exception". Stock torch does it with nothing but a few collectives
(pytorch/pytorch issue 190489). ``destroy_process_group`` joins the threads only where nothing else refers to the groups, and
the units of a sharded model do.

So the GIL is given up for a moment after the script's last line, when threads may still have it.
"""

from __future__ import annotations

import atexit
import functools
import time

GRACE_S = 0.1
"""Time for a thread that was preempted between completing a work and dropping it to run again; it needs microseconds."""


@functools.cache
def give_gloo_time_at_exit() -> None:
    """Install it, once in a process. Handlers run in reverse order, so those of others see it done."""
    atexit.register(time.sleep, GRACE_S)
