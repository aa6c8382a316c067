"""A model that is sharded over a part of the world: the stages of a pipeline, and tensor parallelism.

Training beside tensor parallelism is in tests/integrations/test_meshes.py, and both are in tests/fuzz/regressions.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import announce, expect_errors, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toy import EXACT, full_weights, make_lm, shard
from toy import train as train_steps
from two_nodes import check_that_a_killed_rank_ends_all

from hf_zeropp import apply_zeropp, publish_weights

WORLD, RANKS_PER_NODE = 8, 4
UNQUANTIZED = EXACT | {"ranks_per_node": RANKS_PER_NODE, "hpz_size": "node"}
STEPS, MICRO_STEPS = 3, 2


def train(model, handle, rank: int) -> list[float]:
    return train_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, range(STEPS), handle, MICRO_STEPS)


def stage_beside_stock(rank: int) -> None:
    """Train the model of a pipeline stage, which is sharded over every other rank, with and without ZeRO++."""
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("shard", "stage"))
    stage = mesh.get_local_rank("stage")
    stock, model = (shard(make_lm(seed=stage, depth=2 + stage), mesh=mesh["shard"]) for _ in range(2))
    handle = apply_zeropp(model, UNQUANTIZED, mesh=mesh["shard"])
    node, place = divmod(rank, RANKS_PER_NODE)
    first = 4 * node + place % 2
    groups = handle.topology.node_group, handle.topology.cross_group
    assert [dist.get_process_group_ranks(group) for group in groups] == [[first, first + 2], [place, place + 4]]
    losses, expected = train(model, handle, rank), train(stock, None, rank)
    handle.traffic.reset()
    losses, expected = losses + train(model, handle, rank), expected + train(stock, None, rank)
    # The two hops add up gradients in another order than one reduction. The losses show some fp32 roundings of that.
    assert losses == pytest.approx(expected, abs=2e-5)
    torch.testing.assert_close(full_weights(model), full_weights(stock), rtol=0, atol=1e-4)
    predicted = sum(count.cross_node for count in handle.predict(MICRO_STEPS).values())
    assert handle.traffic.cross_node_bytes == RANKS_PER_NODE * STEPS * predicted > 0


@pytest.mark.thorough
def test_stages_unquantized_as_stock():
    run_ranks(stage_beside_stock, WORLD)


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
        train(model, handle, rank)
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = make_lm(hidden=12, inner=28)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    apply_zeropp(shard(model, mesh=mesh["shard"]), UNQUANTIZED | {"ranks_per_node": 2})
    with pytest.raises(ValueError, match=r"(?s)publish_weights yields full weights.*full_tensor"):
        next(publish_weights(model))


def test_weights_that_are_cut_are_not_published_as_full_ones():
    run_ranks(publish_what_is_cut, 4)
