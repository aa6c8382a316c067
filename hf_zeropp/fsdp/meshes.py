"""The meshes of a model: over which ranks its units are sharded, and which ranks hold the same shards.

Most models have one. It is the world, a part of it beside tensor or pipeline parallelism, or one of several replicas (HSDP).
With expert parallelism experts have a mesh of their own: each rank holds some of the experts, which are sharded over the ranks
that hold the same ones. A model that was sharded over one node by mistake looks the same: nothing keeps its copies on other nodes
equal. Experts are told from it by two signs: their parameters have a second mesh dimension, and experts lie on the same ranks,
taken together, as the rest of the model. Frozen weights may be sharded over one node, since nothing has to keep copies of them
equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zeropp.comm.topology import WorldGroups, count_on_each_node, resolve_hpz_size
from hf_zeropp.fsdp.units import Unit


@dataclasses.dataclass(frozen=True)
class UnitMesh:
    """The ranks over which some units are sharded, as this rank sees them.

    Attributes:
        ranks: its shard group, in order.
        replicas: the ranks that hold the same shard as this one, one in each replica, in order; itself alone without replicas.
        ranks_per_node: how many of ``ranks`` each node has, N.
        hpz_size: how many of them share secondary shards of one copy of the weights; None where none is kept.
        has_units: whether any unit is sharded over them, and not over nodes alone.
    """

    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    ranks_per_node: int
    hpz_size: int | None
    has_units: bool


def ranks_of(unit: Unit) -> tuple[int, ...]:
    """Return the ranks over which the unit is sharded."""
    return tuple(dist.get_process_group_ranks(unit.shard_group))


def has_other_parallelism(unit: Unit) -> bool:
    """Return whether parameters are sharded over a second mesh as well, which is that of tensor parallelism."""
    return any(param.device_mesh.ndim > _num_own_dimensions(unit) for param in unit.params)


def numel_in_group(unit: Unit, param: DTensor) -> int:
    """Return how many elements of a parameter the shard group holds: a part, if tensor or expert parallelism cuts it."""
    num_own = _num_own_dimensions(unit)
    others = zip(param.device_mesh.shape[num_own:], param.placements[num_own:], strict=True)
    return param.numel() // math.prod(size for size, placement in others if placement.is_shard())


def _num_own_dimensions(unit: Unit) -> int:
    """Return the number of dimensions that FSDP2 has put in front of the others in a parameter's mesh."""
    return 1 if unit.replica_group is None else 2


def is_whole_copy(unit: Unit) -> bool:
    """Return whether the unit is frozen, and its shard group holds a whole copy of it that FSDP2 knows no replica of."""
    return not unit.trains and unit.replica_group is None and not has_other_parallelism(unit)


def holders_of(unit: Unit) -> set[int]:
    """Return the ranks that hold a part of the unit's parameters."""
    return {rank for param in unit.params for rank in param.device_mesh.mesh.flatten().tolist()}


def meshes_of(
    units: Sequence[Unit], hpz_size: int | str | None, ranks_per_node: int, given: DeviceMesh | None = None
) -> tuple[UnitMesh, ...]:
    """Return the mesh of the model, and behind it those of experts, in module order.

    Args:
        units: of the model.
        hpz_size: the setting.
        ranks_per_node: of the world.
        given: the mesh over which the model is sharded on purpose, though it is not the world.

    Raises:
        ValueError: a unit is sharded over ranks that are a mistake, or nodes have different numbers of ranks.
    """
    ranks, replicas = _mesh_of_model(units, given)
    found = {(ranks, replicas): None}
    holders = set(ranks).union(*(holders_of(unit) for unit in units if ranks_of(unit) == ranks))
    first = dist.get_rank() // ranks_per_node * ranks_per_node
    node = tuple(range(first, first + ranks_per_node))
    for unit in units:
        own = ranks_of(unit)
        if own == node and is_whole_copy(unit):
            continue
        if own == ranks:
            if _replicas_of(unit) != replicas:
                raise ValueError(
                    f"unit {unit.name} is replicated over ranks {list(_replicas_of(unit))}, and other units over "
                    f"{list(replicas)}. Call fully_shard with the same mesh for all units."
                )
        elif has_other_parallelism(unit) and holders_of(unit) == holders:
            found[own, _replicas_of(unit)] = None  # experts
            if sum(each == own for each, _ in found) > 1:
                raise ValueError(
                    f"unit {unit.name} has replicas on ranks {list(_replicas_of(unit))}, and other experts over the same ranks "
                    "on others. Call fully_shard with the same mesh for all experts."
                )
        # A unit over one node must be frozen, since its gradients would be summed over that node and never across nodes.
        elif own != node or unit.trains:
            raise ValueError(
                f"unit {unit.name} is sharded over ranks {list(own)}, expected {_all_or_named(ranks)} in order"
                f"{'' if unit.trains else f', or, as it is frozen, this node: {ranks_per_node} ranks from {first}'}. "
                "Call fully_shard with a 1-D mesh over them. If other parallelism divides the world, pass that mesh to "
                "apply_zeropp."
            )
    own_units = set(map(ranks_of, units))
    meshes: list[UnitMesh] = []
    for own, own_replicas in found:
        on_each_node = count_on_each_node(own, ranks_per_node)
        # A number of ranks that share copies is meant for the model's mesh. Experts are sharded over fewer, and share them in
        # nodes.
        setting = "node" if meshes and hpz_size is not None else hpz_size
        size = resolve_hpz_size(setting, on_each_node, len(own))
        meshes.append(UnitMesh(own, own_replicas, on_each_node, size, has_units=own in own_units))
    return tuple(meshes)


def _mesh_of_model(units: Sequence[Unit], given: DeviceMesh | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks over which the model has to be sharded, and those that have to hold the same shard as this rank.

    They are the world and this rank, unless there are replicas or other parallelism.
    """
    world: tuple[tuple[int, ...], tuple[int, ...]] = tuple(range(dist.get_world_size())), (dist.get_rank(),)
    found = [(ranks_of(unit), _replicas_of(unit)) for unit in units]
    if world not in found:
        beside = [
            mesh
            for mesh, unit in zip(found, units, strict=True)
            if has_other_parallelism(unit) or unit.replica_group is not None
        ]
        # Experts are sharded over fewer ranks than the rest.
        world = max(beside, key=lambda mesh: len(mesh[0]) * len(mesh[1]), default=world)
    if given is None:
        return world
    # It may be that of the replicas too. Its last dimension is the one over which FSDP2 shards.
    ranks = given.mesh.flatten().tolist() if given.ndim == 1 else dist.get_process_group_ranks(given.get_group(-1))
    return tuple(ranks), world[1]


def _replicas_of(unit: Unit) -> tuple[int, ...]:
    group = unit.replica_group
    return (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))


def _all_or_named(ranks: tuple[int, ...]) -> str:
    return f"all {len(ranks)} ranks" if len(ranks) == dist.get_world_size() else f"ranks {list(ranks)}"


def world_groups(meshes: Sequence[UnitMesh]) -> WorldGroups:
    """Return how a mesh divides the world. ``meshes`` are those of all ranks, in rank order.

    Raises:
        ValueError: shard groups or replicas overlap in part.
    """
    shards = [mesh.ranks for mesh in meshes]
    _check_apart(shards, "the ranks over which the model is sharded", "mesh")
    data_parallel = [tuple(sorted(rank for replica in mesh.replicas for rank in shards[replica])) for mesh in meshes]
    _check_apart(data_parallel, "the model's replicas", "(replicate, shard) mesh")
    replicas = [mesh.replicas for mesh in meshes]
    _check_apart(replicas, "the ranks that hold one shard", "(replicate, shard) mesh")
    return WorldGroups(*(tuple(dict.fromkeys(groups)) for groups in (shards, data_parallel, replicas)))


def _check_apart(groups: Sequence[tuple[int, ...]], what: str, mesh: str) -> None:
    for rank, ranks in enumerate(groups):
        if strangers := [other for other in ranks if groups[other] != ranks]:
            raise ValueError(
                f"Ranks must agree on {what}: rank {rank} has {list(ranks)}, rank {strangers[0]} has "
                f"{list(groups[strangers[0]])}. Call fully_shard with the same {mesh} on all of them."
            )


def check_no_unknown_replicas(groups: Sequence[tuple[tuple[int, ...], tuple[int, ...], object]]) -> None:
    """Check that no two shard groups hold the same parameters, each for itself.

    Args:
        groups: of each shard group its ranks, the ranks that hold a part of its parameters, and its units in words.

    Raises:
        ValueError: two of them do.
    """
    # Stages of a pipeline differ in their parameters. Groups beside tensor parallelism hold parts of the same ones.
    seen: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for ranks, holders, units in groups:
        first, known = seen.setdefault(units, (ranks, holders))
        if not set(ranks) <= set(known):
            raise ValueError(
                f"The model is sharded over ranks {list(first)}, and the same parameters once more over ranks {list(ranks)}: "
                "these are replicas whose gradients are not averaged, so they would drift apart. Call fully_shard with the "
                "whole mesh (replicate, shard) on all of them, or with a 1-D mesh over all ranks, and apply_zeropp without a "
                "mesh. If they are stages of a pipeline, give their modules different names."
            )
