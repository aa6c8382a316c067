"""Memory that the ranks of a node share. All ranks see it, all or none refuse it, and none reads it while it is written."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import expect_errors, run_ranks
from toy import full_weights, make_lm, shard, train
from two_hops import cross

from hf_zeropp import apply_zeropp
from hf_zeropp.comm import node_memory
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.node_memory import allocate, can_share
from hf_zeropp.comm.topology import get_topology
from hf_zeropp.comm.two_hops import Delta, GatherLayouts, TwoHopGather, WholeWeights
from hf_zeropp.comm.wire_buffers import WireBuffers
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.traffic import GATHER_CROSS, GATHER_NODE, Traffic

WORLD_SIZE, RANKS_PER_NODE = 4, 2


def node_group() -> dist.ProcessGroup:
    group = get_topology(RANKS_PER_NODE, "cpu").node_group
    assert can_share(group)
    return group


def write_and_read(rank: int) -> None:
    group = node_group()
    num_files = len(os.listdir("/proc/self/fd"))
    kept = []
    for num_bytes in (0, 1, 4097):
        shared = allocate(group, num_bytes)
        assert shared.shape == (RANKS_PER_NODE, num_bytes) and not shared.any()
        dist.barrier()
        shared[group.rank()] = rank + 1
        dist.barrier()
        first = rank - rank % RANKS_PER_NODE + 1
        assert shared.view(-1).tolist() == [first] * num_bytes + [first + 1] * num_bytes
        kept.append(shared)
    # The mapping holds one file. The descriptors that were opened to make and map it are closed.
    assert len(os.listdir("/proc/self/fd")) <= num_files + len(kept)


def test_every_rank_of_a_node_sees_what_the_others_wrote_for_one_file_at_most():
    run_ranks(write_and_read, WORLD_SIZE)


def fail(*args):
    raise OSError("no such memory")


def one_rank_cannot_map(rank: int) -> None:
    group = node_group()
    is_second_of_its_node = rank % RANKS_PER_NODE == 1
    with mock.patch.object(node_memory, "_map", fail) if is_second_of_its_node else contextlib.nullcontext():
        allocate(group, 10)


def test_one_rank_that_cannot_map_is_an_error_on_its_whole_node():
    errors = expect_errors(one_rank_cannot_map, WORLD_SIZE)
    assert all("rank 1: no such memory" in error for error in errors[:2])
    assert all("rank 3: no such memory" in error for error in errors[2:])
    assert all("shared_memory=False" in error for error in errors)


@pytest.fixture
def descriptor() -> Iterator[int]:
    if not hasattr(os, "memfd_create"):
        pytest.skip("needs memfd (Linux)")
    descriptor = node_memory._create(4096)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("size", [2048, 8192])
def test_nobody_resizes_it(descriptor, size):
    """A rank that reads a page behind the end would be killed with a SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)
    assert node_memory._map(os.getpid(), descriptor, 4096)[:] == bytes(4096)


def test_its_owner_alone_opens_it(descriptor):
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    command = ["/bin/sh", "-c", f": < /proc/self/fd/{descriptor}"]
    assert subprocess.run(command, pass_fds=[descriptor]).returncode == 0
    other = subprocess.run(
        command, pass_fds=[descriptor], user=65534, group=65534, extra_groups=[], capture_output=True, text=True
    )
    assert other.returncode != 0 and "denied" in other.stderr.lower()


def test_nothing_else_is_mapped_in_its_place(descriptor, tmp_path):
    """The first rank may have died, and another process have its number."""
    unsealed = os.memfd_create("other")
    os.ftruncate(unsealed, 4096)
    (tmp_path / "file").write_bytes(bytes(4096))
    file = os.open(tmp_path / "file", os.O_RDWR)
    for opened, size in ((unsealed, 4096), (file, 4096), (descriptor, 8192)):
        os.fchmod(opened, 0o600)
        with pytest.raises(OSError):
            node_memory._map(os.getpid(), opened, size)
    os.close(unsealed)
    os.close(file)


def trained_weights(rank: int, shared_memory: bool = True) -> list[torch.Tensor]:
    model = shard(make_lm())
    apply_zeropp(model, {"ranks_per_node": RANKS_PER_NODE, "shared_memory": shared_memory})
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    return list(full_weights(model).values())


def train_without_shared_memory(rank: int) -> None:
    expected = trained_weights(rank)
    assert all(map(torch.equal, trained_weights(rank, shared_memory=False), expected))
    for name, replacement in (("_place", lambda: (f"host {rank}", 0)), ("_create", fail)):
        with mock.patch.object(node_memory, name, replacement):
            assert all(map(torch.equal, trained_weights(rank), expected)), name


@pytest.mark.thorough
def test_without_shared_memory_training_is_the_same_bit_for_bit():
    """Sockets serve ranks on several hosts, systems without room for the memory, and runs that switched it off."""
    run_ranks(train_without_shared_memory, WORLD_SIZE)


def steps_with_a_late_rank(rank: int, late: str, deltas: bool, has_barriers: bool) -> bool:
    """Gather other weights at each of three steps, with one rank late to send or to read. Return whether all arrived right."""
    topology = get_topology(RANKS_PER_NODE, "cpu")
    traffic = Traffic(RANKS_PER_NODE, topology.num_nodes)
    hops = Hop(GATHER_CROSS, topology.cross_group, traffic), Hop(GATHER_NODE, topology.node_group, traffic)
    gather = TwoHopGather(*hops, WireBuffers(), shares_memory=can_share(topology.node_group))
    layout = WireLayout([Segment(64, None)], 32, torch.float32)
    layouts = GatherLayouts(layout, WireLayout([Segment(64, 8)], 32, torch.float32) if deltas else None)
    secondary = gather.new_secondary(layout, torch.device("cpu"))
    right = []
    with mock.patch.object(Hop, "barrier", Hop.barrier if has_barriers else lambda self: None):
        for step in range(3):
            is_late = topology.node_group.rank() == 1  # in both nodes, so the cross hop itself delays no rank
            time.sleep(0.3 * (is_late and late == "sender"))
            shard = torch.full((64,), float(10 * step + rank))
            cross((Delta if deltas and step > 0 else WholeWeights)(gather, layouts, secondary), shard)
            time.sleep(0.3 * (is_late and late == "reader"))
            output = torch.empty(WORLD_SIZE * 64)
            gather.decode(secondary, layouts, output)
            expected = 10.0 * step + torch.arange(WORLD_SIZE)
            first_of_slices = output.view(WORLD_SIZE, 64)[:, 0]
            right.append(torch.allclose(first_of_slices, expected, rtol=0, atol=0.2))  # INT8 of 10: 0.04
    return all(right)


@pytest.mark.thorough("sender-values", "reader-deltas", "reader-values")
@pytest.mark.parametrize("deltas", [False, True], ids=["values", "deltas"])
@pytest.mark.parametrize("late", ["sender", "reader"])
def test_no_rank_reads_what_a_peer_has_yet_to_write_or_has_written_since(late, deltas):
    """Without barriers the test fails, since a late rank then sends or reads wrong bytes."""
    assert all(run_ranks(steps_with_a_late_rank, WORLD_SIZE, late, deltas, True))
    assert not all(run_ranks(steps_with_a_late_rank, WORLD_SIZE, late, deltas, False))
