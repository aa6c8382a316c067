"""PyTorch's own tests of FSDP2 on meshes of two and three dimensions, written anew for a model under ZeRO++.

PyTorch's files are test_fully_shard_training, _init, _state_dict, _clip_grad_norm_ and _extensions in its directory
test/distributed/_composable/fsdp. They compare FSDP2 with DDP on GPUs. The functions below compare ZeRO++,
with nothing quantized, with stock FSDP2 on the same mesh. The table says which function stands for which test
of PyTorch's. It leaves out tests on meshes of one dimension, and tests that end before ``apply_zeropp`` may be
called.

==================================================================== =========================================================
PyTorch's test                                                       here
==================================================================== =========================================================
test_train_parity_hsdp, test_hsdp_train_parity_cpu_offload_eager     replicas
test_hsdp_train_parity_multi_group and ..._unshard_async_op          delays
test_gradient_accumulation (its mesh of two dimensions)              gradient_accumulation
test_2d_mlp_with_nd_mesh                                             stages_beside_tensor_parallelism
test_3d_mlp_with_nd_mesh                                             replicas_beside_tensor_parallelism
test_shard_placement_fn_tp_ep                                        a_mesh_per_parameter (refused)
test_shard_dtensor_parameters, test_2d_state_dict_correctness        shards_of_columns, state_dicts
test_init_2d_transformer_shard_diff_dim                              shards_of_columns
test_meta_device_2d_init                                             materialized_later
test_2d_process_group_init                                           groups_of_the_users_own
test_hsdp_broadcast_across_replicas                                  weights_sent_to_other_replicas
test_custom_hsdp_all_reduce_hook                                     hooks_on_reduced_gradients
test_dp_state_dict_save_load, test_dp_tp_state_dict_save_load        state_dicts
test_hsdp_tp_state_dict_save_load                                    replicas_beside_tensor_parallelism
test_clip_grad_norm_2d                                               tests/fsdp/test_replicas.py, clipping; tests/fuzz/regressions
test_all_gather_extension_hsdp_mesh                                  tests/fsdp/test_extensions.py, replicas
==================================================================== =========================================================
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from harness import Scenarios, scenarios_of
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import full_weights

from hf_zeropp import ZeroPPHandle, apply_zeropp

pytestmark = pytest.mark.thorough

UNQUANTIZED = {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None}
REPLICAS = {"dp_replicate": 2, "dp_shard": 2}
TENSORS = {"dp": 2, "tp": 2}
TOLERANCE = 1e-6  # two hops and one reduction add up in different orders
STEPS, MICRO_STEPS = 2, 3


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def mesh_of(sizes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make(
    mesh: DeviceMesh, width: int = 16, *, depth: int = 3, checkpoints: bool = False, offloads: bool = False, **kwargs
) -> nn.Sequential:
    """Return a model that is cut over "tp", where the mesh has it, and sharded over "dp" or over both dimensions of "dp_".

    Args:
        mesh: of all ranks.
        width: of the layers.
        depth: how many of them. The root's unit has the last, and each of the others is a unit.
        checkpoints: whether activations are recomputed.
        offloads: whether parameters are offloaded.
        kwargs: for ``fully_shard``.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[MLP(width) for _ in range(depth)])
    if offloads:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    over = mesh[tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))]
    for layer in model:
        if "tp" in mesh.mesh_dim_names:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if checkpoints:
            checkpoint(layer)
    for layer in model[:-1]:
        fully_shard(layer, mesh=over, **kwargs)
    return fully_shard(model, mesh=over, **kwargs)


def zeropp(model: nn.Module, mesh: DeviceMesh) -> ZeroPPHandle:
    """Apply ZeRO++ with nodes on which tensor parallelism stays, and each of which has one shard. Stages name their mesh."""
    names = mesh.mesh_dim_names
    ranks_per_node = mesh["tp"].size() if "tp" in names else 1
    of_stage = mesh["dp"] if "pp" in names else None
    handle = apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": ranks_per_node}, mesh=of_stage)
    assert handle.is_active
    return handle


def loss_of(model: nn.Module, mesh: DeviceMesh, step: int = 0) -> torch.Tensor:
    """Return a loss of inputs that the ranks of one tensor-parallel group have in common."""
    seed = dist.get_rank() // (mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1)
    x = torch.randn(8, model[0].up.in_features, generator=torch.Generator().manual_seed(1000 * step + seed))
    return (model(x) - 1).square().mean()


Prepare = Callable[[nn.Module, bool], None]
"""Sets flags of a model before a micro-step, of which it is told whether that is the last one."""


def train(model: nn.Module, mesh: DeviceMesh, prepare: Prepare | None = None) -> list[float]:
    """Train and return the losses. SGD moves weights in proportion to gradients, so wrong gradients show in later losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            if prepare is not None:
                prepare(model, micro_step == MICRO_STEPS - 1)
            loss = loss_of(model, mesh, step * MICRO_STEPS + micro_step)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def assert_close(ours: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_trains_as_stock(
    mesh: DeviceMesh, stock: nn.Module, model: nn.Module, prepare: Prepare | None = None
) -> None:
    """Train both, of which ``model`` runs under ZeRO++. Compare losses, weights, and where the parameters lie."""
    expected, ours = train(stock, mesh, prepare), train(model, mesh, prepare)
    assert ours == pytest.approx(expected, rel=TOLERANCE), (ours, expected)
    for one in (stock, model):
        for unit in one.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
    assert_close(full_weights(model), full_weights(stock))
    for param, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert isinstance(param, DTensor) and param.placements == other.placements
        assert param.device_mesh == other.device_mesh and param.stride() == other.stride()


def both(mesh: DeviceMesh, **kwargs) -> tuple[nn.Module, nn.Module]:
    """Return a model of stock FSDP2, and an equal one under ZeRO++."""
    stock, model = make(mesh, **kwargs), make(mesh, **kwargs)
    zeropp(model, mesh)
    return stock, model


def sync_at_last(model: nn.Module, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def scenario_replicas(rank: int) -> None:
    """Widths give even shards, uneven ones and empty ones. The ways are combined in pairs."""
    mesh = mesh_of(REPLICAS)
    for width, reshards, checkpoints, offloads, prepare in [
        (3, True, False, False, sync_at_last),
        (16, False, True, False, None),
        (17, True, True, True, sync_at_last),
        (17, False, False, True, None),
    ]:
        ways = {"reshard_after_forward": reshards, "checkpoints": checkpoints, "offloads": offloads}
        assert_trains_as_stock(mesh, *both(mesh, width=width, **ways), prepare)


def scenario_delays(rank: int) -> None:
    """Ranks are late one after the other, and gathers are asynchronous."""
    mesh = mesh_of(REPLICAS)

    def wait(model: nn.Module, is_last: bool) -> None:
        time.sleep(0.05 * (rank if is_last else 3 - rank))

    for reshards in (True, False):
        stock, model = both(mesh, reshard_after_forward=reshards)
        model._set_unshard_async_op(True)
        assert_trains_as_stock(mesh, stock, model, wait)


def holding_back(mode: str, only_replicas: bool, reshards_after_backward: bool) -> Prepare:
    """Return what holds gradients back up to the last micro-step.

    Args:
        mode: of "all" units, of the "root" alone, or of "some" others.
        only_replicas: shards are reduced in each micro-step, and replicas in the last alone.
        reshards_after_backward: False keeps weights unsharded up to the last micro-step.
    """

    def prepare(model: nn.Module, is_last: bool) -> None:
        module = model[0] if mode == "some" else model
        hold_back = module.set_requires_all_reduce if only_replicas else module.set_requires_gradient_sync
        hold_back(is_last, recurse=mode != "root")
        if not reshards_after_backward:
            module.set_reshard_after_backward(is_last, recurse=mode != "root")

    return prepare


def scenario_gradient_accumulation(rank: int) -> None:
    mesh = mesh_of(REPLICAS)
    for mode, only_replicas, reshards in itertools.product(("all", "root", "some"), (True, False), (True, False)):
        for kwargs in ({}, {"reshard_after_forward": False}, {"offloads": True}):
            assert_trains_as_stock(mesh, *both(mesh, **kwargs), holding_back(mode, only_replicas, reshards))


def scenario_groups_of_the_users_own(rank: int) -> None:
    """The mesh of one model is made of process groups."""
    mesh = mesh_of(REPLICAS)
    groups = [dist.new_subgroups_by_enumeration(each)[0] for each in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])]
    own = DeviceMesh.from_group(groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=tuple(REPLICAS))
    stock, model = make(mesh), make(own)
    zeropp(model, own)
    assert_trains_as_stock(mesh, stock, model)


def scenario_weights_sent_to_other_replicas(rank: int) -> None:
    """Copies of the weights are made before, and are followed by what the first replica sends, of which no counter tells."""
    mesh = mesh_of(REPLICAS)
    stock, model = make(mesh), make(mesh)
    handle = zeropp(model, mesh)
    group = mesh.get_group("dp_replicate")
    for one in (stock, model):
        with torch.no_grad():
            for param in one.parameters():
                param.to_local().fill_(0.1 * mesh.get_local_rank("dp_replicate"))
            own = loss_of(one, mesh)
            one.reshard()
            for param in one.parameters():
                dist.broadcast(param.to_local(), src=dist.get_process_group_ranks(group)[0], group=group)
            handle.invalidate()
            assert (loss_of(one, mesh) == own) == (mesh.get_local_rank("dp_replicate") == 0)
    assert_trains_as_stock(mesh, stock, model)


def scenario_hooks_on_reduced_gradients(rank: int) -> None:
    """A hook gets gradients that are averaged over replicas."""
    mesh = mesh_of(REPLICAS)
    stock, model = both(mesh)
    for one in (stock, model):
        for module in (one, *one[:-1]):
            module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    assert_trains_as_stock(mesh, stock, model)


def a_mesh_per_parameter(rank: int) -> None:
    """PyTorch's way of experts on a mesh of their own in one call of ``fully_shard`` is refused, with the other way."""
    torch.manual_seed(0)
    model, world = MLP(8), mesh_of({"dp": 4})
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


def scenario_materialized_later(rank: int) -> None:
    """The model is made and sharded on the meta device, and ZeRO++ applied before or after it gets memory."""
    for sizes, width, is_early in (
        (TENSORS, 16, True),
        (TENSORS, 3, False),
        (REPLICAS, 3, True),
        (REPLICAS, 16, False),
    ):
        mesh = mesh_of(sizes)
        stock = make(mesh, width)
        with torch.device("meta"):
            model = make(mesh, width)
        if is_early:
            zeropp(model, mesh)
        model.to_empty(device="cpu")
        if not is_early:
            zeropp(model, mesh)
        with torch.no_grad():
            for param, other in zip(model.parameters(), stock.parameters(), strict=True):
                param.to_local().copy_(other.to_local())
        assert_trains_as_stock(mesh, stock, model)


def assert_loads_as_stock(mesh: DeviceMesh, stock: nn.Module, model: nn.Module) -> None:
    """Check that states share memory with the parameters, and that loaded weights are those of the next forward pass."""
    assert torch.equal(loss_of(model, mesh), loss_of(stock, mesh))
    state, expected = model.state_dict(), stock.state_dict()  # also of units that stay unsharded
    for (name, param), other in zip(model.named_parameters(), expected.values(), strict=True):
        assert isinstance(state[name], DTensor) and state[name].to_local().data_ptr() == param.to_local().data_ptr()
        assert torch.equal(state[name].to_local(), other.to_local())
    for one, values in ((model, state), (stock, expected)):
        one.load_state_dict(
            {name: 0.1 * index * torch.ones_like(each) for index, (name, each) in enumerate(values.items())}
        )
    for param, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(param.to_local(), other.to_local())
    assert torch.equal(loss_of(model, mesh), loss_of(stock, mesh))


def scenario_state_dicts(rank: int) -> None:
    for sizes, widths in ((REPLICAS, (2, 3, 5)), (TENSORS, (4, 6))):
        mesh = mesh_of(sizes)
        for width, reshards in zip(widths, (True, False, True), strict=False):
            assert_loads_as_stock(mesh, *both(mesh, width=width, reshard_after_forward=reshards))


ON_FOUR = [*scenarios_of(__name__), *([a_mesh_per_parameter] if hasattr(_fsdp_common, "ShardPlacementResult") else [])]


def stages_beside_tensor_parallelism(rank: int) -> None:
    """Stages of a pipeline have layers of their own. Each is sharded over two ranks and cut over two."""
    mesh = mesh_of({"pp": 2, "dp": 2, "tp": 2})
    depth = 2 + mesh.get_local_rank("pp")
    for width, reshards, checkpoints in ((3, True, False), (5, False, True), (16, True, True), (17, False, False)):
        kwargs = {"width": width, "depth": depth, "reshard_after_forward": reshards, "checkpoints": checkpoints}
        stock, model = both(mesh, **kwargs)
        assert_trains_as_stock(mesh, stock, model)
        assert all(param.device_mesh.mesh_dim_names == ("dp", "tp") for param in model.parameters())


def replicas_beside_tensor_parallelism(rank: int) -> None:
    mesh = mesh_of(REPLICAS | {"tp": 2})
    for width, reshards, checkpoints in ((3, True, False), (5, False, True), (16, True, True), (17, False, False)):
        kwargs = {"reshard_after_forward": reshards, "checkpoints": checkpoints}
        stock, model = both(mesh, width=width, **kwargs)
        assert_trains_as_stock(mesh, stock, model)
        assert all(param.device_mesh.ndim == len(param.placements) == 3 for param in model.parameters())
        assert_loads_as_stock(mesh, *both(mesh, width=width, **kwargs))


RUNS = {
    "4 ranks": Scenarios(4, ON_FOUR, limit_s=300),
    "8 ranks": Scenarios(8, [stages_beside_tensor_parallelism, replicas_beside_tensor_parallelism], limit_s=300),
}


@Scenarios.parametrize_ways(RUNS)
def test_as_pytorch_tests(scenario, way):
    RUNS[way].check(scenario)
