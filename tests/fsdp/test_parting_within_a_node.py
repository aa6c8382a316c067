"""A rank that leaves out what the others of its node run: all ranks raise within seconds, and the error names the module.

The everyday case is a batch without images on one rank, which skips the vision tower. Whole nodes may skip what is frozen.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import expect_errors, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import backward, make_lm, shard, tokens_of

from hf_zeropp import apply_zeropp
from hf_zeropp.frozen.units import frozen_parameters, shard_frozen

WAYS = {
    "shared memory": {},
    "wires": {"shared_memory": False},
    "native": {"qwz_intra_bits": None},
    "exact": {"preset": "exact"},
}


def trained_once(rank: int, settings: dict, is_frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of four blocks behind its first step. Blocks 0 and 1 may be frozen: units of their node alone."""
    model = make_lm(depth=4)
    if is_frozen:
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        node_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cross", "node"))["node"]
        shard_frozen(model, model.blocks[:2], node_mesh)
        for module in (*model.blocks[2:], model):
            fully_shard(module, ignored_params=set(frozen_parameters(model)))
    else:
        shard(model)
    apply_zeropp(model, {"ranks_per_node": 2} | settings)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    take_step(model, optimizer, rank, 0)
    return model, optimizer


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    loss = backward(model, rank, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def one_rank_skips_a_block(rank: int, settings: dict, is_frozen: bool) -> None:
    model, optimizer = trained_once(rank, settings, is_frozen)
    model.path = [0, 2, 3] if rank == 1 else [0, 1, 2, 3]
    take_step(model, optimizer, rank, 1)


@pytest.mark.thorough("wires-*", "native-*", "exact-*")
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_names_the_module_that_one_rank_of_a_node_skips(way, is_frozen):
    """The other node learns of it too, and nobody waits for the timeout."""
    began = time.monotonic()
    for error in expect_errors(one_rank_skips_a_block, 4, WAYS[way], is_frozen, timeout_s=100.0):
        assert error.startswith("DisagreementError"), error
        assert "about to gather unit blocks.1" in error and "Give such a batch a placeholder" in error, error
    assert time.monotonic() - began < 80, "it should not have taken a timeout"


def one_rank_evaluates(rank: int, settings: dict) -> None:
    model, optimizer = trained_once(rank, settings, is_frozen=False)
    with torch.set_grad_enabled(rank != 1):
        model(tokens_of(rank))


@pytest.mark.parametrize("way", ["shared memory", "wires"])
def test_one_rank_evaluates_while_the_others_train(way):
    for error in expect_errors(one_rank_evaluates, 4, WAYS[way]):
        assert "rank 1 is about to run a forward pass of the model (FSDPTinyLM) without gradients" in error, error


def whole_node_skips_a_frozen_block(rank: int) -> list[float]:
    model, optimizer = trained_once(rank, {}, is_frozen=True)
    losses = []
    for step in range(1, 4):
        model.path = [0, 2, 3] if step == 2 and rank < 2 else [0, 1, 2, 3]
        losses.append(take_step(model, optimizer, rank, step))
    return losses


def test_a_whole_node_may_skip_what_is_frozen():
    assert all(loss < 10 for losses in run_ranks(whole_node_skips_a_frozen_block, 4) for loss in losses)


def another_order_without_gradients(rank: int, settings: dict, is_frozen: bool) -> None:
    model, optimizer = trained_once(rank, settings, is_frozen)
    with torch.no_grad():
        model(tokens_of(rank))  # the copies of the new weights land
        model.path = [1, 0, 2, 3] if rank == 1 else [0, 1, 2, 3]
        model(tokens_of(rank))
    model.path = [0, 1, 2, 3]
    take_step(model, optimizer, rank, 1)
    raise AssertionError(f"rank {dist.get_rank()} has not raised")


@pytest.mark.parametrize(("settings", "is_frozen"), [({"shared_memory": False}, False), ({}, True)])
def test_ranks_of_a_node_that_parted_in_an_evaluation_raise_at_the_next_question(settings, is_frozen):
    """The blocks have equal shapes, so the ranks have computed with each other's. On accelerators training tells likewise."""
    for error in expect_errors(another_order_without_gradients, 4, settings, is_frozen):
        assert error.startswith("DisagreementError"), error
        assert "ranks [0, 1], which are one node, gathered different units" in error and "blocks." in error, error


def evaluates_more_on_one_node(rank: int) -> float:
    model, optimizer = trained_once(rank, {"shared_memory": False}, is_frozen=False)
    with torch.no_grad():
        model(tokens_of(rank))
        model.path = [0, 1] if rank < 2 else [3, 2, 3]
        model(tokens_of(rank))
    model.path = [0, 1, 2, 3]
    return take_step(model, optimizer, rank, 1)


def test_nodes_may_evaluate_different_layers():
    assert all(loss < 10 for loss in run_ranks(evaluates_more_on_one_node, 4))
