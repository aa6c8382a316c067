"""Which ranks share a node, and the process groups of two-hop collectives.

The world's W ranks are cut into Y = W / N nodes of N consecutive ranks; rank r = y * N + x.

    node group   the N ranks of node y        {y * N + x' : x' < N}      fast links
    cross group  the Y ranks with the same x  {y' * N + x : y' < Y}      the slow network

All units of a mesh share them. Each group is a communicator of NCCL, made by its first collective.

[Note: sharding beside other parallelism]
Beside tensor or pipeline parallelism a model is sharded over a part of the world, and the world consists of several such
*shard groups*. With 2 nodes of 4 ranks and tensor parallelism of 2, they are {0, 2, 4, 6} and {1, 3, 5, 7}. Within a shard group
everything above holds, with its own ranks in the place of the world's: here N is 2, and rank 4 is in the node group {4, 6}
and in the cross group {0, 4}. Without other parallelism the only shard group is the world.

[Note: replicas]
FSDP2 can shard a model over each of several shard groups, and average gradients over these *replicas* (HSDP). Ranks with the same
place in their shard groups hold the same shard. They are a *replica group*. All ranks of the replicas of one model are a
*data-parallel group*: they train the same weights, and take all decisions together. Without replicas it is the shard group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_zeropp.comm.exchange import exchange
from hf_zeropp.comm.nccl import warn_of_any_order

_P = ParamSpec("_P")
_T = TypeVar("_T")

ShardGroups = tuple[tuple[int, ...], ...]
"""The ranks of all shard groups: disjoint, of one size, each in rank order. See [Note: sharding beside other parallelism]."""


class WorldGroups(NamedTuple):
    """How a model divides the world.

    Attributes:
        shards: the ranks of each shard group.
        data_parallel: the ranks of each data-parallel group. See [Note: replicas].
        replicas: the ranks of each replica group; one rank each without replicas.
    """

    shards: ShardGroups
    data_parallel: ShardGroups
    replicas: ShardGroups


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """One rank's place in a shard group of ``num_nodes`` x ``ranks_per_node`` ranks, and its two groups.

    Attributes:
        rank: this rank's number in the world.
        ranks: the ranks of its shard group: the world, unless there is other parallelism.
        ranks_per_node: how many of them are on each node, N.
        mesh: the shard group as nodes by ranks of a node.
        cross_group: the Y ranks, one per node, that have this rank's place in their nodes.
        node_group: the N ranks of this rank's node.
    """

    rank: int
    ranks: tuple[int, ...]
    ranks_per_node: int
    mesh: DeviceMesh
    cross_group: dist.ProcessGroup
    node_group: dist.ProcessGroup

    @property
    def num_ranks(self) -> int:
        """W, the number of ranks over which a model is sharded."""
        return len(self.ranks)

    @property
    def num_nodes(self) -> int:
        """Y, the number of nodes."""
        return self.num_ranks // self.ranks_per_node


@dataclasses.dataclass(frozen=True, eq=False)
class ShardMesh:
    """The ranks over which units of a model are sharded, with their groups.

    Attributes:
        topology: the nodes, with the groups of reductions.
        groups: how the mesh divides the world.
        hpz_size: how many ranks share the secondary shards of one copy; None where none is kept, and every gather crosses nodes.
        replicas: the ranks that hold the same shards as this one; None without replicas (HSDP).
    """

    topology: Topology
    groups: WorldGroups
    hpz_size: int | None
    replicas: dist.ProcessGroup | None

    @property
    def device_type(self) -> str:
        """The type of the device that computes with the units."""
        return self.topology.mesh.device_type

    def topology_of(self, ranks_per_node: int) -> Topology:
        """Return the groups of nodes of another size. Collective over the world where they are not made yet."""
        return get_topology(ranks_per_node, self.device_type, self.groups.shards)


def detect_ranks_per_node(setting: int | str, world_size: int) -> int:
    """Return N, the ranks of one node, from the setting and the launcher's ``LOCAL_WORLD_SIZE``.

    Raises:
        ValueError: N is unknown, or does not divide the world.
    """
    if setting != "auto":
        ranks_per_node, source = int(setting), f"ranks_per_node={setting}"
    elif "LOCAL_WORLD_SIZE" in os.environ:
        text = os.environ["LOCAL_WORLD_SIZE"]
        # Text that is no number becomes 0, which ``check_divides`` refuses with the name of the variable.
        ranks_per_node, source = int(text) if text.isdigit() else 0, f"LOCAL_WORLD_SIZE={text}"
    elif world_size == 1:
        return 1
    else:
        raise ValueError(
            'ranks_per_node="auto" reads LOCAL_WORLD_SIZE, which is not set. Start with `accelerate launch`, '
            "`hf-zeropp launch` or `torchrun`, or set ranks_per_node to the number of ranks of one node."
        )
    check_divides(source, ranks_per_node, world_size)
    return ranks_per_node


def resolve_hpz_size(setting: int | str | None, ranks_per_node: int, world_size: int) -> int | None:
    """Return how many ranks share the secondary shards of one copy of the weights, or None if none is kept.

    Raises:
        ValueError: the size does not divide the world, or cuts nodes unevenly.
    """
    if setting is None:
        return None
    if setting == "node":
        return ranks_per_node
    hpz_size = int(setting)
    check_divides(f"hpz_size={setting}", hpz_size, world_size)
    # With nodes of 4 ranks and copies over 3, ranks 3, 4 and 5 would share a copy: the node hop of some ranks would
    # cross nodes at every gather, and that of others never.
    if ranks_per_node % hpz_size and hpz_size % ranks_per_node:
        raise ValueError(
            f"hpz_size={hpz_size} must divide the {ranks_per_node} ranks of a node or be a multiple of them, so "
            'that no node is cut unevenly. Use hpz_size="node".'
        )
    return hpz_size


def check_divides(source: str, size: int, world_size: int) -> None:
    """Raise unless ``size``, which comes from ``source``, cuts the world in equal parts.

    Raises:
        ValueError: it does not. The message lists the sizes that do.
    """
    if not 1 <= size <= world_size or world_size % size:
        raise ValueError(
            f"{source} must divide the world of {world_size} ranks: nodes must have equal numbers of ranks. "
            f"Divisors: {[d for d in range(1, world_size + 1) if world_size % d == 0]}."
        )


def count_on_each_node(ranks: Sequence[int], ranks_per_node: int) -> int:
    """Return how many ranks of a shard group are on each node that holds any of them.

    Args:
        ranks: of the shard group.
        ranks_per_node: of the world.

    Raises:
        ValueError: nodes have different numbers of them, or the ranks are not in order.
    """
    counts = Counter(rank // ranks_per_node for rank in ranks)
    if list(ranks) != sorted(ranks) or len(set(counts.values())) != 1:
        raise ValueError(
            f"The ranks over which a model is sharded must be in order, and as many on every node: got ranks {list(ranks)} with "
            f"{ranks_per_node} ranks per node. Let tensor parallelism take neighbouring ranks."
        )
    return next(iter(counts.values()))


_made: dict[tuple[Any, ...], Any] = {}


def _once_in_a_world(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function make its groups once, and keep them for later calls: all ranks of the world must call it alike.

    Process groups cost memory and connections, so all models of a process share them: a reward model beside a policy makes none.
    """

    @functools.wraps(make)
    def get(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # The world's group is in the key, since a process may destroy it and make another, whose ranks know none of these.
        key = (dist.group.WORLD, make, args, *kwargs.items())
        if key not in _made:
            _made[key] = make(*args, **kwargs)
        return _made[key]

    return get


def whole_world() -> ShardGroups:
    """Return the shard groups of a world without other parallelism: one."""
    return (tuple(range(dist.get_world_size())),)


def get_topology(ranks_per_node: int, device_type: str, shard_groups: ShardGroups | None = None) -> Topology:
    """Return the topology with nodes of ``ranks_per_node`` ranks of a shard group; by default the world is the only one.

    It makes its groups once: every rank of the world must call it, with the same arguments.
    """
    return _topology(ranks_per_node, device_type, shard_groups or whole_world())


def own_group(groups: ShardGroups) -> tuple[int, ...]:
    """Return the ranks among which this rank is."""
    return next(ranks for ranks in groups if dist.get_rank() in ranks)


@_once_in_a_world
def get_replica_rounds(replica_groups: ShardGroups) -> list[dist.ProcessGroup]:
    """Return the groups in which this rank adds up replicas, one for each round. There is none without replicas.

    A round is an all-gather among as many ranks as a prime factor of the number of replicas says. After it, these have the same
    sum. R replicas in one round would receive R - 1 slices, and four in two rounds of two receive two.
    """
    num_replicas, stride = len(replica_groups[0]), 1
    rounds = []
    for factor in prime_factors(num_replicas):
        # The ranks that meet in a round differ in one digit of their places, where each factor is a digit's base.
        firsts = [place for place in range(num_replicas) if place // stride % factor == 0]
        meeting = [
            [ranks[first + digit * stride] for digit in range(factor)] for ranks in replica_groups for first in firsts
        ]
        rounds.append(_new_group(meeting))
        stride *= factor
    return rounds


@_once_in_a_world
def get_replica_group(replica_groups: ShardGroups) -> dist.ProcessGroup | None:
    """Return the group of all ranks that hold this rank's shard, which no one else uses; None without replicas."""
    rounds = get_replica_rounds(replica_groups)
    return next(iter(rounds), None) if len(rounds) < 2 else _new_group(replica_groups)


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number of replicas, each as often as it divides it: the ranks that meet in each round."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def world_timeout() -> timedelta:
    """Return how long collectives of the world wait for a rank.

    Groups that PyTorch makes take the default of their backend instead (10 to 30 minutes), so every group of this package is
    made with this value. A rank that stops is then noticed as soon as stock FSDP2 would notice it.
    """
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout


def broadcast_from_rank_0(tensor: torch.Tensor) -> None:
    """Send rank 0's values of ``tensor`` to all ranks, in place, whatever device it is on."""
    # The device types whose tensors the world's backends move. The text is such as "cpu:gloo,cuda:nccl".
    device_types = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
    if tensor.device.type in device_types:
        dist.broadcast(tensor, src=0)
        return
    # NCCL alone moves no CPU tensors, and gloo alone may meet a tensor of an accelerator that it does not know.
    device = torch.device(device_types[0])
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    staged = tensor.to(device)
    dist.broadcast(staged, src=0)
    tensor.copy_(staged)


def new_cpu_group(groups: ShardGroups) -> dist.ProcessGroup:
    """Make a group of those ranks of ``groups`` that this rank is among. It moves CPU tensors, whatever the world's backend.

    Every rank of the world must call it.
    """
    return _new_group(groups, backend="gloo")


def _new_group(groups: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Make the groups of these ranks, and return that of this rank. Collective over the world."""
    # While gloo makes a group, it waits for a rank that has died for five times the timeout. A collective of a group that
    # exists ends as soon as the connection does. So all ranks meet in one right before they make a group.
    exchange(None)
    ranks_of_all = [list(ranks) for ranks in groups]
    try:
        # Since torch 2.15 its type includes what ranks of no group get. Each rank is in one of these.
        made: Any = dist.new_subgroups_by_enumeration(ranks_of_all, timeout=world_timeout(), backend=backend)
    except RuntimeError as error:
        if "Cannot resolve" not in str(error):
            raise
        raise RuntimeError(
            f"Rank {dist.get_rank()} could not make a process group: {error}. Gloo says so of any address if a process has too "
            "many open files to open a socket: see ulimit -n."
        ) from error
    group: dist.ProcessGroup = made[0]
    return group


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group, unless that has happened with the world. No other rank has to do so at the same time."""
    with contextlib.suppress(ValueError):  # it was destroyed
        dist.destroy_process_group(group)


@_once_in_a_world
def _topology(ranks_per_node: int, device_type: str, shard_groups: ShardGroups) -> Topology:
    if not any(isinstance(made, Topology) for made in _made.values()):  # once per process
        warn_of_any_order(device_type)
    of_nodes = [torch.tensor(ranks).view(-1, ranks_per_node) for ranks in shard_groups]
    # Every rank makes the groups of all nodes, in the same order, and keeps its own. ``init_device_mesh`` would make the same
    # groups with the backend's default timeout.
    cross_group = _new_group([ranks for nodes in of_nodes for ranks in nodes.T.tolist()])
    node_group = _new_group([ranks for nodes in of_nodes for ranks in nodes.tolist()])
    own = shard_groups.index(own_group(shard_groups))
    mesh = DeviceMesh.from_group(
        [cross_group, node_group], device_type, of_nodes[own], mesh_dim_names=("cross", "node")
    )
    return Topology(dist.get_rank(), shard_groups[own], ranks_per_node, mesh, cross_group, node_group)
