"""Replicas (HSDP): a model that is sharded over each of several groups of nodes, with gradients averaged over the groups.

The oracle is stock FSDP2 on the same (replicate, shard) mesh. Nodes have one rank or two.
"""

import os
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checked_training import mesh_of_replicas
from harness import Scenarios, expect_errors, run_ranks, scenarios_of
from test_secondary_check import yesterdays_shard
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from toy import (
    EXACT,
    POLICIES,
    Reduction,
    backward,
    check_gradients,
    full_gradients,
    loss_of,
    loss_without_head,
    make_lm,
    shard,
)
from toy import train as train_steps

from hf_zeropp import apply_zeropp
from hf_zeropp.comm.topology import prime_factors
from hf_zeropp.comm.two_hops import ReduceLayouts
from hf_zeropp.fsdp.weights.secondary_check import WrongCopies
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.traffic import REDUCE_REPLICAS, Peers

UNQUANTIZED = EXACT | {"hpz_size": "node"}


def train(model, handle, rank: int, *, steps: int = 3, **kwargs) -> list[float]:
    """Train on tokens that differ on every rank. Return the losses."""
    return train_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, range(steps), handle, **kwargs)


def assert_equal_replicas(model, mesh) -> None:
    """Check that every rank holds the bits of the ranks with the same shard."""
    for name, param in model.named_parameters():
        local = param.to_local().contiguous()
        others = [torch.empty_like(local) for _ in range(mesh["replicate"].size())]
        dist.all_gather(others, local, group=mesh.get_group("replicate"))
        assert all(torch.equal(local, other) for other in others), name


def beside_stock(
    rank: int,
    ranks_per_node: int,
    settings: dict,
    relative: float,
    *,
    policy: MixedPrecisionPolicy | None = None,
    num_replicas: int = 2,
    micro_steps: int = 1,
    clip: float | None = None,
) -> None:
    """Train with and without ZeRO++, and compare losses, replicas and bytes."""
    mesh = mesh_of_replicas(num_replicas)
    stock, model = (shard(make_lm(hidden=16, inner=48), policy, mesh=mesh) for _ in range(2))
    handle = apply_zeropp(model, settings | {"ranks_per_node": ranks_per_node})
    assert handle.is_active and handle.traffic.num_nodes == dist.get_world_size() // ranks_per_node
    training = {"micro_steps": micro_steps, "clip": clip}
    ours, expected = train(model, handle, rank, **training), train(stock, None, rank, **training)
    assert ours == pytest.approx(expected, rel=relative), (ours, expected)
    assert_equal_replicas(model, mesh)
    assert all(isinstance(param, DTensor) and param.device_mesh.ndim == 2 for param in model.parameters())
    handle.traffic.reset()
    train(model, handle, rank, **training)
    counted, predicted = handle.traffic.counts, handle.predict(micro_steps)
    assert counted["reduce, replicas"].cross_node > 0
    for name, one in predicted.items():
        if not one.is_measured:
            found, expected_bytes = counted[name], one.times(3)
            assert found.cross_node == expected_bytes.cross_node, (name, found, one)
            assert found.intra_node == expected_bytes.intra_node, (name, found, one)


# Two hops and stock's reduction add up in different orders. Losses show some fp32 roundings of that, or none.
TOLERANCE = 1e-6


def scenario_unquantized_over_micro_steps_with_clipping(rank: int, ranks_per_node: int) -> None:
    beside_stock(rank, ranks_per_node, UNQUANTIZED, TOLERANCE, micro_steps=3, clip=0.05)


def scenario_presets(rank: int, ranks_per_node: int) -> None:
    for preset, micro_steps in (("balanced", 2), ("exact", 1), ("half_model", 1)):
        beside_stock(rank, ranks_per_node, {"preset": preset}, 0.01, micro_steps=micro_steps)


def scenario_without_overlap_and_in_bf16(rank: int, ranks_per_node: int) -> None:
    beside_stock(rank, ranks_per_node, UNQUANTIZED | {"overlap": False}, TOLERANCE, micro_steps=2)
    beside_stock(rank, ranks_per_node, UNQUANTIZED, 0.02, policy=POLICIES["bf16 reduce"])


def scenario_a_divide_factor(rank: int, ranks_per_node: int) -> None:
    """Gradients are divided by what the user said, in all, as stock's are."""
    mesh = mesh_of_replicas(2)
    for policy, relative in (("fp32", 1e-5), ("fp16 reduce", 0.02)):
        stock, model = (shard(make_lm(), POLICIES[policy], mesh=mesh) for _ in range(2))
        apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": ranks_per_node})
        for factor in (None, 3.0):
            for one in (stock, model):
                for module in one.modules():
                    if isinstance(module, FSDPModule) and factor is not None:
                        module.set_gradient_divide_factor(factor)
                        # gloo has no sums with a factor, which stock asks for otherwise.
                        module.set_force_sum_reduction_for_comms(True)
                one.zero_grad()
                backward(one, rank)
            expected = full_gradients(stock)
            for name, grad in full_gradients(model).items():
                bound = relative * expected[name].abs().max().item()
                torch.testing.assert_close(grad, expected[name], rtol=relative, atol=bound)


def scenario_a_dtype_without_a_wire_form(rank: int, ranks_per_node: int) -> None:
    """FSDP2 reduces float64 itself, over the shard group. The replicas are averaged all the same."""
    in_float64 = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    beside_stock(rank, ranks_per_node, UNQUANTIZED, TOLERANCE, policy=in_float64)


def scenario_a_gradient_on_one_replica(rank: int, ranks_per_node: int) -> None:
    """A parameter that one replica alone uses has its gradient on all. Stock cannot do so: the oracle is one unsharded model."""
    mesh = mesh_of_replicas(2)
    model, whole = shard(make_lm(), mesh=mesh), make_lm()
    apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": ranks_per_node})
    loss = loss_of if mesh.get_local_rank("replicate") == 0 else loss_without_head
    for one in (model, whole):
        backward(one, rank, loss=loss)
    found = full_gradients(model)
    for name, param in whole.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(expected)
        torch.testing.assert_close(found[name], expected / dist.get_world_size(), rtol=1e-5, atol=1e-6)


def scenario_an_edit_on_one_replica(rank: int, ranks_per_node: int) -> None:
    """All replicas gather anew where the weights of any have changed; a forward pass uses what its own replica holds."""
    mesh = mesh_of_replicas(2)
    model = shard(make_lm(), mesh=mesh)
    handle = apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": ranks_per_node})
    before = backward(model, 0)
    with torch.no_grad():
        if mesh.get_local_rank("replicate") == 0:
            model.head.weight.to_local().mul_(2)
    after = backward(model, 0)
    assert (after != before) == (mesh.get_local_rank("replicate") == 0)
    assert handle.is_active


def scenario_reduced_within_replicas_alone(rank: int, ranks_per_node: int) -> None:
    """Sums are right where the user lets replicas be averaged in the last micro-step alone."""
    mesh = mesh_of_replicas(2)
    model = shard(make_lm(), mesh=mesh)
    handle = apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": ranks_per_node})
    once = handle.predict(3)[REDUCE_REPLICAS].cross_node
    for tells in (False, True):  # ``set_requires_all_reduce`` alone, and beside this package's own call
        model.zero_grad()
        handle.traffic.reset()
        for micro_step in range(3):
            is_last = micro_step == 2
            model.set_requires_all_reduce(is_last)
            if tells:
                handle.set_last_micro_step(is_last)
            backward(model, rank, micro_step)
        check_gradients(model, make_lm(), rank, Reduction(None, None, ranks_per_node), steps=(0, 1, 2))
        assert handle.traffic.counts[REDUCE_REPLICAS].cross_node == once > 0


def scenario_replicas_that_differ_are_found(rank: int, ranks_per_node: int) -> None:
    """``ZEROPP_CHECK`` finds drift, and names a rank that sends old weights also in the replica that never sees them."""
    mesh = mesh_of_replicas(2)
    with mock.patch.dict(os.environ, {"ZEROPP_CHECK": "1"}):
        model = shard(make_lm(), mesh=mesh)
        handle = apply_zeropp(model, {"ranks_per_node": ranks_per_node})
        train(model, handle, rank, steps=2)
        if mesh.get_local_rank("replicate") == 1 and mesh.get_local_rank("shard") == 0:
            with torch.no_grad():
                model.blocks[0].up.weight.to_local().add_(1)
        with pytest.raises(WrongCopies, match="replicas hold different weights of unit blocks.0"):
            train(model, handle, rank)
        model = shard(make_lm(), mesh=mesh)
        handle = apply_zeropp(model, {"ranks_per_node": ranks_per_node})
        with yesterdays_shard() if rank == 1 else nullcontext():
            with pytest.raises(WrongCopies, match="rank 1 sent other weights than its masters hold"):
                train(model, handle, rank)


FUNCTIONS = scenarios_of(__name__)
WAYS = {"2 x (2 x 1)": Scenarios(4, FUNCTIONS, 1), "2 x (2 x 2)": Scenarios(8, FUNCTIONS, 2)}


@pytest.mark.thorough("replicas_that_differ*", "without_overlap*", "presets*", "*2 x (2 x 2)")
@Scenarios.parametrize_ways(WAYS)
def test_replicas(scenario, way):
    WAYS[way].check(scenario)


def put_off_on_some_ranks(rank: int) -> None:
    model = shard(make_lm(), mesh=mesh_of_replicas(2))
    apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": 1})
    model.set_requires_all_reduce(rank < 2)
    backward(model, rank)


def test_replicas_that_some_ranks_put_off_are_named():
    for error in expect_errors(put_off_on_some_ranks, 4):
        assert "DisagreementError" in error


def any_number_of_replicas(rank: int, num_replicas: int) -> None:
    beside_stock(rank, 1, UNQUANTIZED, TOLERANCE, num_replicas=num_replicas, micro_steps=2)
    beside_stock(rank, 1, {}, 0.01, num_replicas=num_replicas)


@pytest.mark.thorough
@pytest.mark.parametrize("num_replicas", [3, 4, 6])
def test_any_number_of_replicas(num_replicas):
    """Unquantized, an all-reduce takes fewer bytes than rounds among three and more."""
    run_ranks(any_number_of_replicas, 2 * num_replicas, num_replicas, limit_s=300)


@pytest.mark.parametrize("bits", [3, 4, 8, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_never_take_more_bytes_than_an_all_reduce(bits, dtype):
    """Stock receives 2 (R-1)/R times the bytes of each element. In one round, a large prime R would take R-1 codes."""
    numel = 2**16
    layout = WireLayout([Segment(numel, bits)], 128, dtype)
    layouts = ReduceLayouts(layout, layout)
    for num_replicas in range(2, 200):
        rounds = [Peers(0, factor - 1) for factor in prime_factors(num_replicas)]
        ours = layouts.replica_bytes(rounds, Peers(0, num_replicas - 1)).cross_node
        assert ours <= 2 * numel * dtype.itemsize * (num_replicas - 1) / num_replicas, num_replicas
    if bits == 4 and dtype == torch.bfloat16:
        assert layouts.replica_bytes([Peers(0, 6)], Peers(0, 6)).cross_node == 6 * layout.nbytes
        assert layouts.replica_bytes([Peers(0, 10)], Peers(0, 10)).cross_node == 2 * 2 * numel // 11 * 10
