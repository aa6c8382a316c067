"""PyTorch's own tests of FSDP2 on meshes of two dimensions, written anew for a model under ZeRO++.

PyTorch's files are test_fully_shard_training, _init and _state_dict in its directory test/distributed/_composable/fsdp. They
compare FSDP2 with DDP on GPUs. The functions below compare ZeRO++, with nothing quantized, with stock FSDP2 on the same mesh:

    replicas                      test_train_parity_hsdp, test_hsdp_train_parity_cpu_offload_eager
    gradient_accumulation         test_gradient_accumulation
    groups_of_the_users_own       test_2d_process_group_init
    hooks_on_reduced_gradients    test_custom_hsdp_all_reduce_hook
    shards_of_columns             test_init_2d_transformer_shard_diff_dim, test_shard_dtensor_parameters
    state_dicts                   test_dp_state_dict_save_load, test_dp_tp_state_dict_save_load, test_2d_state_dict_correctness
    a_mesh_per_parameter          test_shard_placement_fn_tp_ep (refused)

Meshes of three dimensions are in tests/integrations/test_meshes.py, clipping is in test_replicas.py, extensions are in
test_extensions.py, and models on the meta device in tests/fuzz/regressions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import Scenarios, scenarios_of
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import EXACT, Block, TinyLM, full_weights, loss_of, make_lm, shard, tokens_of, train

from hf_zeropp import apply_zeropp

pytestmark = pytest.mark.thorough

UNQUANTIZED = EXACT | {"hpz_size": "node"}
REPLICAS = {"dp_replicate": 2, "dp_shard": 2}
TENSORS = {"dp": 2, "tp": 2}
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
TOLERANCE = 1e-6  # two hops and one reduction add up in different orders
STEPS, MICRO_STEPS = 2, 3


def mesh_of(sizes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make(mesh: DeviceMesh, width: int = 16, *, depth: int = 2, checkpoints: bool = False, **kwargs) -> TinyLM:
    """Return a model that is cut over "tp", where the mesh has it, and sharded over "dp" or over both dimensions of "dp_".

    Args:
        mesh: of all ranks.
        width: of the layers.
        depth: the number of blocks.
        checkpoints: whether activations are recomputed.
        kwargs: for ``fully_shard``.
    """
    model = make_lm(depth=depth, hidden=width, inner=4 * width)
    for block in model.blocks:
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if checkpoints:
            checkpoint(block)
    over = mesh[tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))]
    return shard(model, mesh=over, **kwargs)


def tensor_parallel_size(mesh: DeviceMesh) -> int:
    return mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1


def data_rank(mesh: DeviceMesh) -> int:
    """Return the number of this rank's tensor-parallel group, whose ranks have their tokens in common."""
    return dist.get_rank() // tensor_parallel_size(mesh)


def both(mesh: DeviceMesh, **kwargs) -> tuple[TinyLM, TinyLM]:
    """Return a model of stock FSDP2, and an equal one under ZeRO++. Tensor parallelism stays on a node."""
    stock, model = make(mesh, **kwargs), make(mesh, **kwargs)
    assert apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": tensor_parallel_size(mesh)}).is_active
    return stock, model


Prepare = Callable[[nn.Module, bool], None]
"""Sets flags of a model before a micro-step, of which it is told whether that is the last one."""


def assert_trains_as_stock(
    mesh: DeviceMesh, stock: nn.Module, model: nn.Module, prepare: Prepare | None = None
) -> None:
    """Train both, of which ``model`` runs under ZeRO++. Compare losses, weights, and where the parameters lie.

    SGD moves weights in proportion to gradients, so wrong gradients show in later losses.
    """
    losses = []
    for one in (stock, model):
        # One operator takes no tensors of two meshes.
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, foreach=False)
        told = prepare and SimpleNamespace(set_last_micro_step=functools.partial(prepare, one))
        losses.append(train(one, optimizer, data_rank(mesh), range(STEPS), told, MICRO_STEPS))
        for unit in one.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
    torch.testing.assert_close(full_weights(model), full_weights(stock), rtol=TOLERANCE, atol=TOLERANCE)
    for param, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert isinstance(param, DTensor) and param.placements == other.placements
        assert param.device_mesh == other.device_mesh and param.stride() == other.stride()


def sync_at_last(model: nn.Module, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def scenario_replicas(rank: int) -> None:
    """Widths give even shards, uneven ones and empty ones. The ways are combined in pairs."""
    mesh = mesh_of(REPLICAS)
    for width, reshards, checkpoints, offload, prepare in [
        (3, True, False, {}, sync_at_last),
        (16, False, True, {}, None),
        (17, True, True, OFFLOADED, sync_at_last),
        (17, False, False, OFFLOADED, None),
    ]:
        ways = {"reshard_after_forward": reshards, "checkpoints": checkpoints} | offload
        assert_trains_as_stock(mesh, *both(mesh, width=width, **ways), prepare)


def holding_back(mode: str, only_replicas: bool, reshards_after_backward: bool) -> Prepare:
    """Return what holds gradients back up to the last micro-step.

    Args:
        mode: of "all" units, of the "root" alone, or of "some" others.
        only_replicas: shards are reduced in each micro-step, and replicas in the last alone.
        reshards_after_backward: False keeps weights unsharded up to the last micro-step.
    """

    def prepare(model: nn.Module, is_last: bool) -> None:
        module = model.blocks[0] if mode == "some" else model
        hold_back = module.set_requires_all_reduce if only_replicas else module.set_requires_gradient_sync
        hold_back(is_last, recurse=mode != "root")
        if not reshards_after_backward:
            module.set_reshard_after_backward(is_last, recurse=mode != "root")

    return prepare


def scenario_gradient_accumulation(rank: int) -> None:
    mesh = mesh_of(REPLICAS)
    for mode, only_replicas, reshards in itertools.product(("all", "root", "some"), (True, False), (True, False)):
        for kwargs in ({}, {"reshard_after_forward": False}, OFFLOADED):
            assert_trains_as_stock(mesh, *both(mesh, **kwargs), holding_back(mode, only_replicas, reshards))


def scenario_groups_of_the_users_own(rank: int) -> None:
    """The mesh is made of process groups."""
    groups = [dist.new_subgroups_by_enumeration(each)[0] for each in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=tuple(REPLICAS))
    assert_trains_as_stock(mesh, *both(mesh))


def scenario_hooks_on_reduced_gradients(rank: int) -> None:
    """A hook gets gradients that are averaged over replicas."""
    mesh = mesh_of(REPLICAS)
    stock, model = both(mesh)
    for one in (stock, model):
        for module in (one, *one.blocks):
            module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    assert_trains_as_stock(mesh, stock, model)


def a_mesh_per_parameter(rank: int) -> None:
    """PyTorch's way of experts on a mesh of their own in one call of ``fully_shard`` is refused, with the other way."""
    model, world = Block(), mesh_of({"dp": 4})
    of_all, of_experts = FSDPMeshInfo(world, 0), FSDPMeshInfo(mesh_of({"dp": 2, "ep": 2})["dp"], 0)

    def place(param: nn.Parameter) -> object:
        return _fsdp_common.ShardPlacementResult(Shard(0), of_experts if param is model.up.weight else of_all)

    fully_shard(model, mesh=world, shard_placement_fn=place)
    with pytest.raises(ValueError, match="2 communication groups .* Call fully_shard on the submodules instead"):
        apply_zeropp(model, {"ranks_per_node": 1})


def scenario_shards_of_columns(rank: int) -> None:
    """FSDP2 shards a weight along the dimension that tensor parallelism leaves, and in replicas along the longest."""

    def other_dimension(param: nn.Parameter) -> Shard:
        return Shard(1 - param.placements[0].dim) if isinstance(param, DTensor) and param.ndim == 2 else Shard(0)

    def longest(param: nn.Parameter) -> Shard:
        return Shard(param.shape.index(max(param.shape)))

    for sizes, place in ((TENSORS, other_dimension), (REPLICAS, longest)):
        mesh = mesh_of(sizes)
        stock, model = both(mesh, shard_placement_fn=place)
        assert any(placement == Shard(1) for param in model.parameters() for placement in param.placements)
        assert_trains_as_stock(mesh, stock, model)


def scenario_state_dicts(rank: int) -> None:
    """States share memory with the parameters, and loaded weights are those of the next forward pass."""
    for sizes, width, reshards in (
        (REPLICAS, 2, True),
        (REPLICAS, 3, False),
        (REPLICAS, 5, True),
        (TENSORS, 4, True),
        (TENSORS, 6, False),
    ):
        mesh = mesh_of(sizes)
        tokens = tokens_of(data_rank(mesh))
        stock, model = both(mesh, width=width, reshard_after_forward=reshards)
        assert torch.equal(loss_of(model, tokens), loss_of(stock, tokens))
        state, expected = model.state_dict(), stock.state_dict()  # also of units that stay unsharded
        for (name, param), other in zip(model.named_parameters(), expected.values(), strict=True):
            assert isinstance(state[name], DTensor)
            assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
            assert torch.equal(state[name].to_local(), other.to_local())
        for one, values in ((model, state), (stock, expected)):
            one.load_state_dict({name: (0.5 + index) * each for index, (name, each) in enumerate(values.items())})
        for param, other in zip(model.parameters(), stock.parameters(), strict=True):
            assert torch.equal(param.to_local(), other.to_local())
        assert torch.equal(loss_of(model, tokens), loss_of(stock, tokens))


HAS_MESHES_OF_PARAMETERS = hasattr(_fsdp_common, "ShardPlacementResult")
FUNCTIONS = [*scenarios_of(__name__), *([a_mesh_per_parameter] if HAS_MESHES_OF_PARAMETERS else [])]
SCENARIOS = Scenarios(4, FUNCTIONS, limit_s=300)


@SCENARIOS.parametrize
def test_as_pytorch_tests(scenario):
    SCENARIOS.check(scenario)
