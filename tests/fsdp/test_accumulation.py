"""Gradient accumulation: one reduction across nodes per step, nothing lost, nothing of full size kept unless a setting says so.

Two nodes of two ranks; every scenario with overlapping and with blocking communication. Every short order of events on one
rank is in test_pending_model.py. Programs in which gradients are read or dropped between micro-steps, and blocks are skipped or
used twice, are in tests/fuzz/regressions.

With ``qgz_accumulate`` ``"rank"`` or ``"whole"`` gradients stay on the rank at full size until the last micro-step, by FSDP2's
own means. The yardsticks are stock FSDP2 under ``set_requires_gradient_sync(False)``, and the unsharded model. Bytes are counted
in tests/integrations/test_accelerate.py.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from harness import run_ranks
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint
from toy import (
    EXACT,
    POLICIES,
    Reduction,
    backward,
    check_gradients,
    every_gradient,
    full_gradients,
    full_weights,
    gathered_weights,
    local_gradients,
    loss_of,
    loss_without_head,
    make_lm,
    shard,
    tokens_of,
)
from two_nodes import REDUCTION, accumulate, apply, in_both_ways, reduction_in

from hf_zeropp.traffic import GATHER_CROSS, GATHER_NODE, REDUCE_CROSS, REDUCE_NODE

UNQUANTIZED = EXACT | {"hpz_size": "node"}


def scenario_micro_steps_add_up(rank: int, overlap: bool) -> None:
    """Any number of them, in every dtype; and again in the next step."""
    for policy in POLICIES:
        model = shard(make_lm(), POLICIES[policy])
        handle = apply(model, overlap)
        for steps in ((0,), (1, 2), (3, 4, 5, 6, 7)):
            accumulate(model, handle, rank, steps)
            check_gradients(model, make_lm(), rank, reduction_in(policy), steps=steps)
            model.zero_grad()


def scenario_divide_factors_that_change(rank: int, overlap: bool) -> None:
    """Between micro-steps: each one's gradients are divided by its own factor, also in fp16, and where only sums are reduced.

    The first has none, and is divided by the number of ranks.
    """
    factors = (None, 16.0, 3.0)
    for policy, sums, last in itertools.product(("fp32", "fp16 reduce"), (False, True), (True, False)):
        model = shard(make_lm(), POLICIES[policy])
        handle = apply(model, overlap, **UNQUANTIZED)
        for step, factor in enumerate(factors):
            for module in (model, *model.blocks):
                module.set_force_sum_reduction_for_comms(sums)
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
            handle.set_last_micro_step(last and step == 2)
            backward(model, rank, step)
        weights, reduced = gathered_weights(model), full_gradients(model)
        own = [local_gradients(weights, make_lm(), rank, step) for step in range(3)]
        for name, gradients in every_gradient(own, reduced.keys(), weights).items():
            expected = sum(
                gradient.sum(0) / (factor or 4.0) for gradient, factor in zip(gradients, factors, strict=True)
            )
            tolerance = 1e-5 if policy == "fp32" else 1e-2
            torch.testing.assert_close(reduced[name].double(), expected, rtol=tolerance, atol=tolerance / 10)


def scenario_predictions_follow_gradient_hooks(rank: int, overlap: bool) -> None:
    """A unit whose gradients are looked at crosses nodes at every micro-step."""
    model = shard(make_lm())
    handle = apply(model, overlap)
    backward(model, rank)
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda param: None)
    handle.traffic.reset()
    for step in range(3):
        handle.set_last_micro_step(step == 2)
        backward(model, rank, step)
    predicted = handle.predict(3)[REDUCE_CROSS]
    counted = handle.traffic.counts[REDUCE_CROSS]
    assert (counted.calls, counted.cross_node) == (predicted.calls, predicted.cross_node)
    assert counted.calls == 2 + 3


def scenario_bytes_held_and_sent(rank: int, overlap: bool) -> None:
    """During accumulation: 1/N of every unit in fp32, no gradient alive, sharded or not, no byte of weights across nodes."""
    kept_by_fsdp2 = shard(make_lm(depth=3))
    kept_by_fsdp2.set_requires_gradient_sync(False)
    backward(kept_by_fsdp2, rank)
    assert len(unsharded_gradients(kept_by_fsdp2)) == len(list(kept_by_fsdp2.parameters())), "the measure cannot fail"
    model = shard(make_lm(depth=3))
    handle = apply(model, overlap)
    accumulate(model, handle, rank, (0, 1))  # buffers are made in the first step
    model.zero_grad()
    handle.set_last_micro_step(False)
    before = live_bytes()
    backward(model, rank, 0)
    assert live_bytes() - before == handle.partial_bytes(), "something is held beside the partial sums"
    shard_numel = sum(shard_of.padded_numel for unit in handle.units for shard_of in unit.param_shards)
    assert handle.partial_bytes() == 2 * shard_numel * 4  # two nodes' shards; padding aside, half of the model
    assert unsharded_gradients(model) == []
    handle.traffic.reset()
    backward(model, rank, 1)
    counts = handle.traffic.counts
    assert {GATHER_NODE, REDUCE_NODE} == counts.keys(), "a later micro-step crossed nodes"
    assert counts[GATHER_NODE].cross_node == counts[REDUCE_NODE].cross_node == 0
    handle.set_last_micro_step(True)
    backward(model, rank, 2)
    counts = handle.traffic.counts
    assert GATHER_CROSS not in counts
    assert counts[REDUCE_CROSS].calls == len(handle.reduces)


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}.values())


def unsharded_gradients(model) -> list[str]:
    """Names of the parameters whose gradient FSDP2 holds in full size."""
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in (model, *model.blocks)]
    return [
        param._param_fqn
        for group in groups
        for param in group.fsdp_params
        if param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
    ]


def scenario_progress_turns_quantization_off(rank: int, overlap: bool) -> None:
    """``qgz_until``: beyond it gradients are exact, also when it passes between micro-steps."""
    model = shard(make_lm())
    handle = apply(model, overlap, qgz_until=0.5)
    exact, quantized = Reduction(None, None, 2), REDUCTION
    for progress, reduction, rough in ((0.0, quantized, True), (0.49, quantized, True), (0.5, exact, False)):
        model.zero_grad()
        handle.set_progress(progress)
        accumulate(model, handle, rank, (0, 1))
        check_gradients(model, make_lm(), rank, reduction, steps=(0, 1))
        share = check_gradients(model, make_lm(), rank, quantized, steps=(0, 1))["blocks.0.up.weight"]
        assert (share > 0.01) == rough, share
    model.zero_grad()
    handle.set_progress(0.2)
    handle.set_last_micro_step(False)
    backward(model, rank, 0)
    handle.set_progress(0.7)
    handle.set_last_micro_step(True)
    backward(model, rank, 1)
    check_gradients(model, make_lm(), rank, quantized, steps=(0, 1))


BF16 = {"qgz_accumulator": "bfloat16"}
UNIT = 2.0**-8
"""An error of rounding to nearest in bf16 is at most this part of the sum."""


@dataclasses.dataclass(frozen=True)
class Rounded(Reduction):
    """A reduction whose partial sums are rounded after each micro-step but the last."""

    def bound(self, gradients: torch.Tensor) -> float:
        roundings = len(gradients) - 1
        sums = gradients.abs().flatten(2).amax(2).sum().item()
        return super().bound(gradients) * (1 + roundings * UNIT) + roundings * UNIT * sums * (1 + roundings * UNIT)


def scenario_partial_sums_in_bf16_are_within_their_bound(rank: int, overlap: bool) -> None:
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    cases = [(policy, {}, (8, 4, 2), {}) for policy in POLICIES]
    cases += [(policy, {"qgz_bits": None, "qgz_intra_bits": None}, (None, None, 2), {}) for policy in POLICIES]
    cases += [("fp32", {"hpz_size": None}, (8, 4, 2), {}), ("fp32", {"ranks_per_node": 1}, (8, 4, 1), offload)]
    for policy, settings, reduction, arguments in cases:
        model = shard(make_lm(), POLICIES[policy], **arguments)
        handle = apply(model, overlap, **BF16, **settings)
        dtype = POLICIES[policy].reduce_dtype or torch.float32
        for steps in ((0,), (1, 2, 3)):
            accumulate(model, handle, rank, steps)
            check_gradients(model, make_lm(), rank, Rounded(*reduction, dtype), steps=steps)
            model.zero_grad()


def scenario_partial_sums_in_bf16_are_the_same_in_every_run_and_way(rank: int, overlap: bool) -> None:
    """And half of the bytes are held."""
    found, held = [], []
    ways = ({}, {}, {"overlap": not overlap}, {"shared_memory": False}, {"qgz_accumulator": "float32"})
    for settings in ways:
        model = shard(make_lm())
        handle = apply(model, **({"overlap": overlap} | BF16 | settings))
        handle.set_last_micro_step(False)
        backward(model, rank, 0)
        held.append(handle.partial_bytes())
        accumulate(model, handle, rank, (1, 2))
        found.append(full_gradients(model))
    *in_bf16, in_fp32 = found
    assert all(torch.equal(again[name], in_bf16[0][name]) for again in in_bf16 for name in again)
    assert not all(torch.equal(in_fp32[name], in_bf16[0][name]) for name in in_fp32)
    assert held == [held[0]] * 4 + [2 * held[0]] and held[0] > 0


# Accumulation on the rank.

ON_RANK = {"qgz_accumulate": "rank", "qgz_intra_bits": None}
COUNTS = (3, 1, 2)
"""Micro-steps of the steps of one run."""


def train(model, rank: int, tell: Callable[[bool], None], counts=COUNTS) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of each step, and the weights at the end. ``tell`` is called with whether a micro-step is the last."""
    optimizer, seen, step = torch.optim.SGD(model.parameters(), lr=0.1), [], 0
    for count in counts:
        for number in range(count):
            tell(number == count - 1)
            backward(model, rank, step)
            step += 1
        seen.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    seen.append(full_weights(model))
    return seen


def compare(ours, theirs, **tolerance) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], msg=name, **tolerance)


def scenario_equals_stock_without_synchronization(rank: int, overlap: bool) -> None:
    """Sums over four ranks have another order than a ring. Changing numbers of micro-steps."""
    for policy in ("fp32", "bf16"):
        model, stock = shard(make_lm(), POLICIES[policy]), shard(make_lm(), POLICIES[policy])
        handle = apply(model, overlap, **ON_RANK | UNQUANTIZED)
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if policy == "fp32" else {"rtol": 0.05, "atol": 0.02}
        expected = train(stock, rank, stock.set_requires_gradient_sync)
        compare(train(model, rank, handle.set_last_micro_step), expected, **tolerance)


def scenario_both_ways_are_one_way(rank: int, overlap: bool) -> None:
    """A user who calls ``set_requires_gradient_sync`` himself gets the same bits, whether the handle is told or not."""
    results = []
    for tells_handle, tells_fsdp2 in ((True, False), (False, True), (True, True)):
        model = shard(make_lm())
        handle = apply(model, overlap, **ON_RANK)

        def tell(last: bool, model=model, handle=handle, ours=tells_handle, theirs=tells_fsdp2) -> None:
            if ours:
                handle.set_last_micro_step(last)
            if theirs:
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)

        results.append(train(model, rank, tell))
    for result in results[1:]:
        compare(result, results[0], rtol=0, atol=0)


def scenario_gradients_of_full_size_are_held(rank: int, overlap: bool) -> None:
    """In FSDP2's reduce dtype, and reported."""
    for policy, itemsize in (("fp32", 4), ("bf16", 4), ("bf16 reduce", 2)):
        model = shard(make_lm(), POLICIES[policy])
        handle = apply(model, overlap, **ON_RANK)
        handle.set_last_micro_step(False)
        for step in (0, 1):
            backward(model, rank, step)
            assert all(param.grad is None for param in model.parameters())
        numel = sum(param.numel() for param in model.parameters())
        assert handle.partial_bytes() == numel * itemsize, policy
        handle.set_last_micro_step(True)
        backward(model, rank, 2)
        assert handle.partial_bytes() == 0


def scenario_a_step_without_a_last_micro_step_is_refused(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    handle = apply(model, overlap, **ON_RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.set_last_micro_step(False)
    backward(model, rank, 0)
    with pytest.raises(RuntimeError, match=r"discard_accumulated.*qgz_accumulate=\"node\""):
        optimizer.step()
    handle.discard_accumulated()
    optimizer.step()  # there is nothing to do
    handle.set_last_micro_step(True)
    backward(model, rank, 1)
    check_gradients(model, make_lm(), rank, Reduction(None, 4, 2), steps=(1,))


def two_forward_passes_and_one_backward_pass(model, rank: int) -> None:
    sum(loss_of(model, tokens_of(rank, step)) for step in (0, 1)).backward()


def scenario_what_fsdp2_leaves_in_a_last_micro_step_is_refused_with_its_own_remedies(rank: int, overlap: bool) -> None:
    """Two forward passes through reentrant checkpointing, then one backward pass: stock FSDP2 adds them to the next step's."""
    model = shard(make_lm())
    handle = apply(model, overlap, **ON_RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.call = functools.partial(checkpoint, use_reentrant=True)
    two_forward_passes_and_one_backward_pass(model, rank)
    with pytest.raises(RuntimeError, match=r"was a last micro-step.*use_reentrant=False.*discard_accumulated"):
        optimizer.step()
    handle.discard_accumulated()
    optimizer.zero_grad()  # FSDP2 has left the blocks unsharded as well, so ``model.zero_grad()`` would not find the shards
    model.call = functools.partial(checkpoint, use_reentrant=False)
    two_forward_passes_and_one_backward_pass(model, rank)
    assert handle.partial_bytes() == 0
    check_gradients(model, make_lm(), rank, Reduction(None, 4, 2), steps=(0, 1))
    optimizer.step()


def scenario_units_and_parameters_that_miss_the_last_micro_step(rank: int, overlap: bool) -> None:
    """Stochastic depth, and a head that a loss does not use: their gradients arrive with the others."""
    model = shard(make_lm(depth=3))
    handle = apply(model, overlap, **ON_RANK)
    for step, path in enumerate(([0, 1, 2], [0, 1, 2], [0, 2])):
        handle.set_last_micro_step(step == 2)
        model.path = path
        backward(model, rank, step)
    model.path = [0, 1, 2]
    reference = make_lm(depth=3, paths=[[0, 1, 2], [0, 1, 2], [0, 2]])
    check_gradients(model, reference, rank, Reduction(None, 4, 2), steps=(0, 1, 2), summed=True)
    assert handle.partial_bytes() == 0
    model.zero_grad()
    handle.set_last_micro_step(False)
    backward(model, rank, 0)
    handle.set_last_micro_step(True)
    backward(model, rank, 1, loss_without_head)
    losses = (loss_of, loss_without_head)
    check_gradients(model, make_lm(depth=3), rank, Reduction(None, 4, 2), steps=(0, 1), summed=True, loss=losses)


def scenario_units_that_no_pass_has_used_yet(rank: int, overlap: bool) -> None:
    """FSDP2's own ``no_sync`` raises there in mixed precision, as it looks for gradients of what was never gathered."""
    model = shard(make_lm(depth=3), POLICIES["bf16"])
    handle = apply(model, overlap, **ON_RANK)
    for step, path in enumerate(([0, 2], [0, 1, 2])):
        handle.set_last_micro_step(step == 1)
        model.path = path
        backward(model, rank, step)
    assert all(param.grad is not None for param in model.parameters())
    assert handle.partial_bytes() == 0


def scenario_schedules_of_quantization_take_effect(rank: int, overlap: bool) -> None:
    """Full gradients are no sums of one kind: ``qgz_until`` need not wait for them."""
    model = shard(make_lm())
    handle = apply(model, overlap, **ON_RANK, qgz_until=0.5)
    train(model, rank, handle.set_last_micro_step, (2,))
    handle.set_last_micro_step(False)
    backward(model, rank, 0)
    handle.set_progress(0.9)
    handle.set_last_micro_step(True)
    backward(model, rank, 1)
    check_gradients(model, make_lm(), rank, Reduction(None, None, 2), steps=(0, 1), summed=True)


test_accumulation = pytest.mark.thorough(
    "*blocking",
    "*partial_sums_in_bf16_are_within*",
    "*divide_factors_that_change*",
    "*predictions_follow_gradient_hooks*",
    "*schedules_of_quantization*",
    "*units_that_no_pass_has_used_yet*",
)(in_both_ways(__name__))


def two_ranks_give_the_bits_of_stock(rank: int) -> None:
    """A sum of two has one order."""
    model, stock = shard(make_lm()), shard(make_lm())
    handle = apply(model, True, **ON_RANK | UNQUANTIZED, ranks_per_node=1)
    expected = train(stock, rank, stock.set_requires_gradient_sync)
    compare(train(model, rank, handle.set_last_micro_step), expected, rtol=0, atol=0)


@pytest.mark.thorough
def test_two_ranks_give_the_bits_of_stock():
    run_ranks(two_ranks_give_the_bits_of_stock, 2)
