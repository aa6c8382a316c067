"""Which ranks share a node, and the two process groups every two-hop collective needs.

The world's W ranks are cut into Y = W / N nodes of N consecutive ranks; rank r = y * N + x.

    node group   the N ranks of node y        {y * N + x' : x' < N}      fast links
    cross group  the Y ranks with the same x  {y' * N + x : y' < Y}      the slow network

Two groups in all per rank, however many units a model has.
"""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class Topology:
    """One rank's place in a world of ``num_nodes`` x ``ranks_per_node`` ranks, and its two groups."""

    rank: int
    world_size: int
    ranks_per_node: int
    mesh: DeviceMesh = dataclasses.field(compare=False, repr=False)

    @property
    def num_nodes(self) -> int:
        """Y, the number of nodes."""
        return self.world_size // self.ranks_per_node

    @property
    def node_group(self) -> dist.ProcessGroup:
        """The N ranks of this rank's node."""
        return self.mesh.get_group("node")

    @property
    def cross_group(self) -> dist.ProcessGroup:
        """The Y ranks, one per node, that have this rank's place in their nodes."""
        return self.mesh.get_group("cross")


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
    """Return how many ranks share one secondary copy, or None if none is kept.

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


# Process groups cost memory and connections, so all models of a process share them: a reward model beside a policy
# makes none. The world's group is in the key, since a process may destroy it and make another, whose ranks know none
# of these.
_topologies: dict[tuple[dist.ProcessGroup | None, str, int], Topology] = {}


def get_topology(ranks_per_node: int, device_type: str) -> Topology:
    """Return the topology with nodes of ``ranks_per_node`` ranks. It makes its groups once: every rank must call it."""
    key = (dist.group.WORLD, device_type, ranks_per_node)
    if key not in _topologies:
        _topologies[key] = _build_topology(ranks_per_node, device_type)
    return _topologies[key]


def world_timeout() -> timedelta:
    """Return how long collectives of the world wait for a rank.

    Groups that PyTorch makes take the default of their backend instead (10 to 30 minutes), so every group of this package is
    made with this value. A rank that stops is then noticed as soon as stock FSDP2 would notice it.
    """
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout


def new_cpu_group() -> dist.ProcessGroup:
    """Make a group of all ranks that moves CPU tensors, whatever the backend of the world. Every rank must call it."""
    _meet()
    return dist.new_group(backend="gloo", timeout=world_timeout())


def _meet() -> None:
    """Wait for all ranks, right before they make a group together.

    While gloo makes a group, it waits for a rank that has died for five times the timeout. A collective of a group that
    exists ends as soon as the connection does.
    """
    dist.all_gather_object([None] * dist.get_world_size(), None)


def _build_topology(ranks_per_node: int, device_type: str) -> Topology:
    _meet()
    world_size = dist.get_world_size()
    ranks = torch.arange(world_size).view(-1, ranks_per_node)
    # Making a group is collective over the world: every rank makes the groups of all nodes, in the same order, and
    # keeps its own. ``init_device_mesh`` would make the same groups with the backend's default timeout.
    cross_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=world_timeout())
    node_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=world_timeout())
    mesh = DeviceMesh.from_group([cross_group, node_group], device_type, ranks, mesh_dim_names=("cross", "node"))
    return Topology(dist.get_rank(), world_size, ranks_per_node, mesh)
