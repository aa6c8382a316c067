"""A model that is sharded over a part of the world, beside tensor parallelism or pipeline stages."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import announce, expect_errors, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import EXACT, full_weights, make_lm, shard
from two_nodes import check_that_a_killed_rank_ends_all

from hf_zeropp import apply_zeropp, publish_weights

WORLD, RANKS_PER_NODE = 8, 4
UNQUANTIZED = EXACT | {"ranks_per_node": RANKS_PER_NODE, "hpz_size": "node"}
STEPS, MICRO_STEPS = 3, 2


def tensor_parallel_lm():
    """Return a model whose feed-forward layers are cut over two neighbouring ranks, sharded over the four others.

    Beside it stands the mesh that ``apply_zeropp`` has to be told: none, where the model shows it.
    """
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("shard", "tensor"))
    model = make_lm(hidden=12, inner=28)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"]), None


def stage_lm():
    """Return the model of this rank's pipeline stage, which is sharded over every other rank, and its mesh."""
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("shard", "stage"))
    stage = mesh.get_local_rank("stage")
    return shard(make_lm(seed=stage, depth=2 + stage), mesh=mesh["shard"]), mesh["shard"]


def train(model, handle, seed: int) -> list[float]:
    """Train, with tokens that the ranks of one tensor-parallel group have in common. Return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            if handle is not None:
                handle.set_last_micro_step(micro_step == MICRO_STEPS - 1)
            tokens = torch.randint(0, 29, (2, 5), generator=generator)
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def beside_stock(rank: int, make: Callable[[], tuple], settings: dict) -> dict:
    """Train with and without ZeRO++, and return what both gave."""
    stock, _ = make()
    stock_losses = train(stock, None, seed=rank // 2)
    model, mesh = make()
    handle = apply_zeropp(model, settings, mesh=mesh)
    losses = train(model, handle, seed=rank // 2)
    handle.traffic.reset()
    losses += train(model, handle, seed=rank // 2)
    stock_losses += train(stock, None, seed=rank // 2)
    weights, expected = full_weights(model), full_weights(stock)
    return {
        "losses": (losses, stock_losses),
        "difference": max((weights[name] - expected[name]).abs().max().item() for name in expected),
        "groups": [
            dist.get_process_group_ranks(group) for group in (handle.topology.node_group, handle.topology.cross_group)
        ],
        "counted": handle.traffic.cross_node_bytes,
        "predicted": RANKS_PER_NODE * STEPS * sum(count.cross_node for count in handle.predict(MICRO_STEPS).values()),
    }


@pytest.mark.thorough("stages")
@pytest.mark.parametrize("make", [tensor_parallel_lm, stage_lm], ids=["tensor parallelism", "stages"])
def test_a_part_of_the_world_unquantized_as_stock(make):
    for rank, found in enumerate(run_ranks(beside_stock, WORLD, make, UNQUANTIZED)):
        node, place = divmod(rank, RANKS_PER_NODE)
        first = 4 * node + place % 2
        assert found["groups"] == [[first, first + 2], [place, place + 4]]
        ours, stock = found["losses"]
        # The two hops add up gradients in another order than one reduction. The losses show some fp32 roundings of that.
        assert ours == pytest.approx(stock, abs=2e-5)
        assert found["difference"] < 1e-4
        assert found["counted"] == found["predicted"] > 0


@pytest.mark.thorough
def test_tensor_parallelism_with_default_settings():
    """Copies are checked as well, within the shard group."""
    settings = {"ranks_per_node": RANKS_PER_NODE}
    for found in run_ranks(beside_stock, WORLD, tensor_parallel_lm, settings, env={"ZEROPP_CHECK": "1"}):
        ours, stock = found["losses"]
        assert ours == pytest.approx(stock, rel=0.05)
        assert found["counted"] == found["predicted"] > 0


def stage_of_two_nodes(rank: int):
    """Return the model of this rank's stage with its handle. Each of two stages is sharded over two nodes of one rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    model = fully_shard(make_lm(depth=1 + rank // 2), mesh=mesh)
    return model, apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": 1}, mesh=mesh)


def hand_over(rank: int) -> None:
    """Send activations to the next stage and gradients back, between the ranks of one place in both."""
    activations, gradients = torch.ones(4), torch.ones(4)
    if rank < 2:
        dist.send(activations, rank + 2)
        dist.recv(gradients, rank + 2)
    else:
        dist.recv(activations, rank - 2)
        dist.send(gradients, rank - 2)


def train_stages_without_end(rank: int) -> None:
    model, handle = stage_of_two_nodes(rank)
    for step in itertools.count():
        train(model, handle, seed=rank)
        hand_over(rank)
        announce(f"step {step}")


def test_a_killed_rank_ends_all_stages():
    check_that_a_killed_rank_ends_all(train_stages_without_end, 0)


def with_other_micro_steps(rank: int) -> None:
    model, handle = stage_of_two_nodes(rank)
    handle.set_last_micro_step(rank == 0)
    tokens = torch.arange(6).view(1, 6)
    for _ in range(2):
        model(tokens).float().sum().backward()
        handle.set_last_micro_step(True)
    hand_over(rank)


def test_other_micro_steps_on_a_rank_of_one_stage_end_both():
    errors = expect_errors(with_other_micro_steps, 4)
    assert all("DisagreementError" in error for error in errors[:2]), errors  # the other stage waits for this one


def publish_what_is_cut(rank: int) -> None:
    model, _ = tensor_parallel_lm()
    apply_zeropp(model, UNQUANTIZED)
    next(publish_weights(model))


def test_weights_that_are_cut_are_not_published_as_full_ones():
    for error in expect_errors(publish_what_is_cut, WORLD):
        assert "publish_weights yields full weights" in error and "full_tensor" in error
