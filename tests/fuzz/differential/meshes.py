"""The meshes of programs: which rank stands where, over which ranks a model is sharded, and which rows of a weight each holds.

All ranks of a case are ``groups`` times ``world``. A rank has a *place* among the ``world`` ranks of its group:

    replicas  each group holds the models whole (HSDP), on nodes of its own
    pp        each group is a pipeline stage with models of its own, on nodes of its own
    tp        each group holds a part of the blocks of kind "cut", and all else whole; ranks of one place are neighbours
    ep        each group holds a part of the blocks of kind "experts", which it shards over its ranks; all else is sharded over
              all ranks; ranks of one place are neighbours
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from differential.cases import Case

# Tensor parallelism cuts these parameters of a block of kind "cut", each along the dimension behind its name.
_CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def place_of(case: Case, rank: int) -> tuple[int, int]:
    """Return a rank's place in its group, and the number of the group."""
    if case.has_neighbours:
        return rank // case.groups, rank % case.groups
    return rank % case.world, rank // case.world


def rank_of(case: Case, place: int, group: int) -> int:
    return place * case.groups + group if case.has_neighbours else group * case.world + place


def make_mesh(case: Case) -> DeviceMesh:
    """Make the mesh of all ranks; its dimension "shard" holds the ranks of one group. Collective."""
    if not case.mesh:
        return init_device_mesh("cpu", (case.world,), mesh_dim_names=("shard",))
    if case.has_neighbours:
        return init_device_mesh("cpu", (case.world, case.groups), mesh_dim_names=("shard", case.mesh))
    return init_device_mesh("cpu", (case.groups, case.world), mesh_dim_names=(case.mesh, "shard"))


def mesh_of_model(case: Case, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``fully_shard`` gets, but for experts."""
    if case.mesh == "ep":
        return init_device_mesh("cpu", (case.num_ranks,))
    return mesh["shard"] if case.mesh in ("tp", "pp") else mesh


def cut_dim(case: Case, name: str) -> int | None:
    """Return the dimension by which groups divide a parameter, such as ``0.blocks.1.up.weight``; None where none does."""
    model, *path = name.split(".")
    if path[0] != "blocks" or not case.has_neighbours:
        return None
    kind = case.models[int(model)].blocks[int(path[1])].kind
    return 0 if kind == "experts" else _CUT.get(".".join(path[2:])) if kind == "cut" else None


def rows_by_group(case: Case, name: str, tensor: torch.Tensor, place: int, own: int) -> dict[int, torch.Tensor]:
    """Return views of the rows of a whole tensor that the ranks of one place hold, by group.

    Args:
        own: the group that is returned where all hold the same.
    """
    dim = cut_dim(case, name)
    if dim is not None:
        parts = enumerate(torch.chunk(tensor, case.groups, dim))
        return {group: rows_of(part, place, case.world) for group, part in parts}
    if case.mesh == "ep":
        ranks = [(group, rank_of(case, place, group)) for group in range(case.groups)]
        return {group: rows_of(tensor, rank, case.num_ranks) for group, rank in ranks}
    return {own: rows_of(tensor, place, case.world)}


def rows_of(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The rows of a full tensor that FSDP2 gives to ``rank``: none where there are too few."""
    chunks = torch.chunk(tensor, world)
    return chunks[rank] if rank < len(chunks) else tensor[:0]
