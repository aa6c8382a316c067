"""The timeline of recorded steps: what a stream, an event, a communicator and the order of calls make others wait for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from happens_before import checked_world
from recorded_step import Recording, Scale, tasks_of

from hf_zeropp.estimate.cluster import Cluster, Device, Link
from hf_zeropp.estimate.simulation import simulate

pytestmark = pytest.mark.thorough

WORLD, PER_NODE, N = 4, 2, 2**10
NETWORK_S, PRODUCT_S = 2.0, 1.0
"""Seconds of an exchange with the other node, and of a matrix product, under ``CLUSTER``."""

CLUSTER = Cluster(
    WORLD,
    PER_NODE,
    Link(PER_NODE * 4 * N / NETWORK_S),
    Link(4 * N / NETWORK_S),
    Device("test", 0.0, 2 * N / PRODUCT_S, kernel_rate=4 * N),
)


def compute() -> None:
    torch.mm(torch.empty(1, N), torch.empty(N, 1))


def exchange(group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty(2 * N), torch.empty(2 * N), group=group)


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's node and cross group."""
    node = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return node[0], [dist.new_group([0, 2]), dist.new_group([1, 3])][0]


def end_of(program, **options) -> float:
    """Return when a program ends that is recorded on rank 0 of two nodes of two."""
    recording = Recording(PER_NODE)
    with checked_world(WORLD, recording.observe):
        program(*groups())
    return max(simulate(tasks_of(recording, CLUSTER, Scale(1, 1), **options)))


def one_stream(node, cross):
    compute()
    exchange(cross)


def two_streams(node, cross):
    compute()
    with torch.cpu.stream(torch.cpu.Stream()):
        exchange(cross)


def two_streams_in_order(node, cross):
    compute()
    side = torch.cpu.Stream()
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        exchange(cross)


def one_communicator(node, cross):
    for stream in (torch.cpu.Stream(), torch.cpu.Stream()):
        with torch.cpu.stream(stream):
            exchange(cross)


def two_communicators(node, cross):
    for group in (node, cross):
        with torch.cpu.stream(torch.cpu.Stream()):
            exchange(group)


def a_call_that_waits_first(node, cross):
    """The first call waits for a computation. In the order of calls the second one cannot start before it."""
    side = torch.cpu.Stream()
    compute()
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        exchange(cross)
    with torch.cpu.stream(torch.cpu.Stream()):
        exchange(node)
        exchange(node)


@pytest.mark.parametrize(
    ("program", "seconds", "free_seconds"),
    [
        (one_stream, 3, 3),
        (two_streams, 2, 2),
        (two_streams_in_order, 3, 3),
        (one_communicator, 4, 4),
        (two_communicators, 2, 2),
        (a_call_that_waits_first, 5, 4),
    ],
)
def test_a_program_takes_as_long_as_its_longest_chain(program, seconds, free_seconds):
    assert end_of(program) == pytest.approx(seconds)
    assert end_of(program, orders_launches=False) == pytest.approx(free_seconds)
