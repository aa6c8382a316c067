"""Let gloo's threads drop their last works before the interpreter ends.

A gloo thread completes a work, which ends the caller's wait, and drops the work a moment later. Python tensors go with it, and
for these the thread takes the GIL. If the interpreter is already being finalized, CPython before 3.14 ends such a thread
(``pthread_exit``). That unwinds through gloo's run loop, where C++ permits no unwinding, and the process aborts after its
work is done: "terminate called without an active exception". Stock torch does so after nothing but a few collectives
(https://github.com/pytorch/pytorch/issues/190489). ``destroy_process_group`` would join the threads, but only if nothing else
refers to the groups, and the units of a sharded model do.

The remedy is to give up the GIL for a moment after the last line of the script, when the threads may still take it.
"""

from __future__ import annotations

import atexit
import functools
import time

GRACE_S = 0.5
"""Seconds for a thread that was preempted between completing a work and dropping it. It needs microseconds once it runs. With 16
busy processes on 2 cores one turn in a hundred came 0.06 s late, and the latest 0.8 s."""


@functools.cache
def give_gloo_time_at_exit() -> None:
    """Install the pause, once in a process. Handlers that were registered before run after it."""
    atexit.register(time.sleep, GRACE_S)  # sleeping gives up the GIL
