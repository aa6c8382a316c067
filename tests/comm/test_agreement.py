"""Channels end with their model, and never make a rank wait for one that does not come."""

import gc
import os
import time

import pytest
import torch.distributed as dist
from harness import run_ranks

from hf_zeropp.comm.agreement import Agreement, Channel
from hf_zeropp.comm.disagreement import Statement
from hf_zeropp.comm.topology import new_cpu_group, whole_world

pytestmark = pytest.mark.thorough

open_ends: list[Channel] = []


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def closed_channel(rank: int, asks_alone: bool) -> tuple[bool, float]:
    """Ask, on all ranks or on one alone, and close. Return whether threads went, and the seconds it took."""
    dist.barrier()
    before = num_threads()
    channel = Channel(new_cpu_group(whole_world()))
    agreement = Agreement(channel)
    if not asks_alone:
        assert agreement.ask(b"facts", bytes([rank]), lambda: Statement("ask", {})).largest() == bytes([1])
    elif rank == 0:
        agreement.ask(b"facts", bytes([rank]), lambda: Statement("ask alone", {}))
    if asks_alone and rank == 1:
        open_ends.append(channel)  # this rank is elsewhere
        return True, 0.0
    began = time.monotonic()
    channel.close()
    del agreement, channel  # gloo ends with the last reference to its group
    gc.collect()
    seconds = time.monotonic() - began
    return asks_alone or num_threads() <= before, seconds


@pytest.mark.parametrize("asks_alone", [False, True])
def test_closing_takes_threads_along_and_waits_for_nobody(asks_alone):
    assert all(went and seconds < 4 for went, seconds in run_ranks(closed_channel, 2, asks_alone, timeout_s=8.0))
