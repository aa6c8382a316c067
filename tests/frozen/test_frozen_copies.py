"""Frozen weights that differ between nodes before training begins, or are made trainable after it, on 4 ranks (2 nodes)."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from frozen_runs import UNQUANTIZED, prepare, reset_accelerate, tiny_llama, tokens, with_adapter
from harness import Scenarios, expect_errors, run_ranks, scenarios_of
from rollout_runs import train_step
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_zeropp import ZeroPPPlugin, apply_zeropp
from hf_zeropp.comm.disagreement import DisagreementError
from hf_zeropp.frozen.units import frozen_parameters, shard_frozen

EMBEDDING = "base_model.model.model.embed_tokens.weight"


def with_new_rows(seed: int) -> nn.Module:
    model = tiny_llama()
    torch.manual_seed(seed)
    model.resize_token_embeddings(103, mean_resizing=False)
    return with_adapter(model)


def scenario_new_rows_from_a_seed_per_rank_are_refused(rank: int) -> None:
    for name, settings in ((EMBEDDING, {}), (f"{EMBEDDING}_codes", {"frozen_bits": 4, "pack_embeddings": True})):
        reset_accelerate()
        *_, model, _ = prepare(with_new_rows(rank), **settings, **UNQUANTIZED)
        # The first node's ranks hold the first rows, and its second rank (1) holds the new ones, as rank 3 does.
        with pytest.raises(ValueError, match=f"{name} differs between rank 1 and rank 3.*cpu_ram_efficient_loading"):
            model(tokens())


def scenario_new_rows_of_rank_0_are_those_of_all(rank: int) -> None:
    reset_accelerate()
    *_, model, _ = prepare(with_new_rows(rank), ram_efficient=True, **UNQUANTIZED)
    model(tokens())


def scenario_a_weight_that_differs_on_one_rank_is_refused_by_all(rank: int) -> None:
    reset_accelerate()
    model = with_adapter(tiny_llama())
    if rank == 2:
        model.get_parameter("base_model.model.model.norm.weight").data[0] = 7
    *_, model, _ = prepare(model, **UNQUANTIZED)
    with pytest.raises(ValueError, match=r"model\.norm\.weight differs between rank 0 and rank 2"):
        model(tokens())


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x))


def scenario_weights_on_meta_are_compared_when_they_are_there(rank: int) -> None:
    node_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cross", "node"))["node"]
    for differ in (False, True):
        with torch.device("meta"):
            model = Pair()
        model.frozen.requires_grad_(False)
        shard_frozen(model, [], node_mesh)
        model = fully_shard(model, ignored_params=set(frozen_parameters(model)))
        apply_zeropp(model, {"ranks_per_node": 2, **UNQUANTIZED})
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.detach().to_local().fill_(rank if differ else 0.5)
        expects = (
            pytest.raises(ValueError, match="frozen.weight differs between") if differ else contextlib.nullcontext()
        )
        with expects:
            model(torch.ones(1, 8))


def scenario_replicas_of_one_node_each(rank: int) -> None:
    """FSDP2 trains such a model. Its frozen weights are sharded over the ranks of a node as well, and have no replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for differ in (False, True):
        torch.manual_seed(0)
        model, reference = Pair(), Pair()
        reference.load_state_dict(model.state_dict())
        model.frozen.requires_grad_(False)
        if differ and rank >= 2:
            model.frozen.bias.data[7] = 7
        shard_frozen(model, [], mesh["shard"])
        model = fully_shard(model, mesh=mesh, ignored_params=set(frozen_parameters(model)))
        if differ:
            with pytest.raises(ValueError, match="frozen.bias differs between rank 1 and rank 3"):
                apply_zeropp(model, {"ranks_per_node": 2, **UNQUANTIZED})
            continue
        handle = apply_zeropp(model, {"ranks_per_node": 2, **UNQUANTIZED})
        assert not handle.is_active
        model(torch.full((1, 8), float(rank))).sum().backward()
        for each in range(4):
            (reference(torch.full((1, 8), float(each))).sum() / 4).backward()
        torch.testing.assert_close(model.trained.weight.grad.full_tensor(), reference.trained.weight.grad)
        model.frozen.weight.requires_grad_(True)
        with pytest.raises(ValueError, match=r"frozen\.weight was made trainable"):
            model(torch.ones(1, 8))


def scenario_frozen_copies_differ_with_zeropp_off(rank: int) -> None:
    node_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cross", "node"))["node"]
    torch.manual_seed(rank // 2)
    model = Pair()
    model.frozen.requires_grad_(False)
    shard_frozen(model, [], node_mesh)
    model = fully_shard(model, ignored_params=set(frozen_parameters(model)))
    with mock.patch.dict(os.environ, {"ZEROPP_ENABLED": "0"}), pytest.raises(ValueError, match="frozen.weight differs"):
        apply_zeropp(model, {"ranks_per_node": 2, **UNQUANTIZED})


def replicas_on_one_node_and_on_others(rank: int, differ: bool) -> None:
    """Four replicas on four nodes of two ranks: each node has a rank of two replicas, which hold one frozen copy between them."""
    node_mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("cross", "node"))["node"]
    shape = torch.tensor([[0, 2], [1, 3], [4, 6], [5, 7]])
    mesh = DeviceMesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Pair()
    model.frozen.requires_grad_(False)
    if differ and rank >= 4:  # equal within each replica
        model.frozen.bias.data[7] = 7  # in the shard of a node's second rank
    shard_frozen(model, [], node_mesh)
    model = fully_shard(model, mesh=mesh, ignored_params=set(frozen_parameters(model)))
    apply_zeropp(model, {"ranks_per_node": 2, **UNQUANTIZED})
    model(torch.ones(1, 8))


@pytest.mark.thorough
def test_replicas_that_share_nodes_in_part():
    run_ranks(replicas_on_one_node_and_on_others, 8, False)
    for error in expect_errors(replicas_on_one_node_and_on_others, 8, True):
        assert "frozen.bias differs between rank 1 and rank 5" in error


# ---- Thawing.

THAWED = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"


def prepared():
    reset_accelerate()
    return prepare(with_adapter(tiny_llama()), **UNQUANTIZED)


def scenario_a_layer_that_thaws_is_refused_by_name(rank: int) -> None:
    accelerator, _, model, optimizer = prepared()
    train_step(accelerator, model, optimizer, rank)
    weight = model.get_parameter(THAWED).requires_grad_(True)
    optimizer.add_param_group({"params": [weight]})
    with pytest.raises(
        ValueError, match=f"{THAWED} was made trainable .*rank {rank}.*Set requires_grad before `prepare`"
    ):
        train_step(accelerator, model, optimizer, rank)
    weight.requires_grad_(False)
    train_step(accelerator, model, optimizer, rank)


def scenario_a_layer_that_thaws_on_one_rank_is_a_disagreement_of_all(rank: int) -> None:
    accelerator, _, model, optimizer = prepared()
    train_step(accelerator, model, optimizer, rank)
    if rank == 3:
        model.get_parameter(THAWED).requires_grad_(True)
    with pytest.raises(DisagreementError, match=rf"ranks \[0, 1, 2\]: nothing; rank 3: {THAWED}"):
        train_step(accelerator, model, optimizer, rank)


def scenario_a_model_that_was_all_frozen(rank: int) -> None:
    reset_accelerate()
    plugin = ZeroPPPlugin(zeropp={"ranks_per_node": 2})
    model = fsdp2_prepare_model(Accelerator(fsdp_plugin=plugin), tiny_llama().requires_grad_(False))
    model(tokens())
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="was made trainable after the model was prepared"):
        model(tokens())


SCENARIOS = Scenarios(4, scenarios_of(__name__))


@SCENARIOS.parametrize
def test_frozen_copies(scenario):
    SCENARIOS.check(scenario)
