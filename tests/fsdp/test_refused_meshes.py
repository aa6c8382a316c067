"""Meshes and layouts that cannot work are refused on all ranks, by name and with the remedy."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import Scenarios, scenarios_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import EXACT, make_lm, shard

from hf_zeropp import apply_zeropp
from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.muon import Muon

WORLD, WIDTH = 8, 8
UNQUANTIZED = EXACT | {"hpz_size": "node", "ranks_per_node": 1}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH, WIDTH))


def experts_over(shape: list, names: tuple[str, ...], over: tuple[str, ...]) -> Experts:
    """Return experts that are cut over dimension "ep" of a mesh and sharded over others of it."""
    mesh = DeviceMesh("cpu", shape, mesh_dim_names=names)
    experts = Experts()
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], [Shard(0)]))
    return fully_shard(experts, mesh=mesh[over])


class Model(nn.Module):
    def __init__(self, *experts: Experts) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)


def refused(*words: str) -> pytest.RaisesExc:
    """Expect the error in which these words stand one behind the other."""
    return pytest.raises(ValueError, match=r"(?s)" + ".*".join(map(re.escape, words)))


def scenario_experts_of_other_replicas(rank: int) -> None:
    """Ranks 0 and 2 shard experts of both layers, which rank 4 holds once more in one layer alone."""
    some = experts_over([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("replicate", "efsdp", "ep"), ("replicate", "efsdp"))
    others = experts_over([[0, 1, 4, 5], [2, 3, 6, 7]], ("efsdp", "ep"), ("efsdp",))
    with refused("unit experts.1 has replicas on ranks [", "other experts over the same ranks on others", "same mesh"):
        apply_zeropp(fully_shard(Model(some, others)), UNQUANTIZED)


def scenario_experts_on_uneven_nodes(rank: int) -> None:
    """Four ranks shard the same experts: three of them are on one node, and one is on the other."""
    experts = experts_over([[0, 3], [1, 5], [2, 6], [4, 7]], ("efsdp", "ep"), ("efsdp",))
    with refused("as many on every node: got ranks [0, 1, 2, 4] with 4 ranks per node"):
        apply_zeropp(fully_shard(Model(experts)), UNQUANTIZED | {"ranks_per_node": 4})


def scenario_stages_of_other_sizes_or_replicas(rank: int) -> None:
    """One stage is sharded over six ranks, the next over two; or one has two replicas of two ranks, and the next one of four."""
    sizes = [[*range(6)], [6, 7]]
    groups = [dist.new_group(ranks) for ranks in sizes]
    is_second = int(rank >= 6)
    of_size = DeviceMesh.from_group(groups[is_second], "cpu", mesh=sizes[is_second])
    replicas = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    one_replica = DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("shard",))
    for mesh, first_of_next in ((of_size, 6), (replicas if rank < 4 else one_replica, 4)):
        model = shard(make_lm(depth=1 + int(rank >= first_of_next)), mesh=mesh)
        with refused("Ranks must agree on ZeRO++'s sizes: rank 0 has", f"rank {first_of_next} has"):
            apply_zeropp(model, UNQUANTIZED, mesh=mesh)


def scenario_muon_on_what_two_dimensions_cut(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("shard", "tensor"))
    for plan in (ColwiseParallel(), RowwiseParallel()):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        parallelize_module(model, mesh["tensor"], {"0": plan})
        with refused("sharded along one dimension of the mesh, ", " AdamW"):
            Muon(fully_shard(model, mesh=mesh["shard"]).parameters(), lr=0.1)


def scenario_muon_on_whole_experts(rank: int) -> None:
    """Expert parallelism and FSDP2 both cut between experts, so each is whole on a rank: Muon gives PyTorch's bits."""
    torch.manual_seed(0)
    mesh = [[0, 1], [2, 3], [4, 5], [6, 7]]
    sharded, gradient = (experts_over(mesh, ("efsdp", "ep"), ("efsdp",)).weight for _ in range(2))
    matrices = [nn.Parameter(matrix.clone()) for matrix in sharded.full_tensor().detach()]
    sharded.grad = gradient.detach()
    for matrix, own in zip(matrices, gradient.full_tensor().detach(), strict=True):
        matrix.grad = own
    Muon([sharded], lr=0.1).step()
    torch.optim.Muon(matrices, lr=0.1).step()
    assert torch.equal(sharded.full_tensor(), torch.stack(list(matrices)))


# Layouts of gathers, as PyTorch's main branch has them behind 2.15. The classes are known by their names.


class AllGatherLayout:
    """Stands for FSDP2's base class."""


class DefaultAllGatherLayout(AllGatherLayout):
    pass


class RowsOfParameters(AllGatherLayout):
    """A user's own layout."""


def scenario_a_layout_of_gathers_is_refused_by_name(rank: int) -> None:
    """On all ranks where one has it, on the gather or on the group. The default one is let through."""
    for on_the_gather in (True, False):
        for layout in (RowsOfParameters(), DefaultAllGatherLayout()):
            model = shard(make_lm())
            unit = find_units(model)[1]
            owner = unit.all_gather if on_the_gather else unit._group
            owner.any_name = layout if rank == 1 else DefaultAllGatherLayout()
            if isinstance(layout, DefaultAllGatherLayout):
                assert apply_zeropp(model, UNQUANTIZED).is_active
                continue
            words = "unit blocks.0 has an all-gather layout of its own (RowsOfParameters)"
            with refused(words, "Leave out set_all_gather_layout"):
                apply_zeropp(model, UNQUANTIZED)


SCENARIOS = Scenarios(WORLD, scenarios_of(__name__))


@SCENARIOS.parametrize
def test_meshes_that_are_refused(scenario):
    SCENARIOS.check(scenario)
