"""Gradient accumulation: one reduction across nodes per step, nothing of full size kept, nothing lost.

Two nodes of two ranks; every scenario with overlapping and with blocking communication.
"""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from toy import (
    EXACT,
    POLICIES,
    Reduction,
    backward,
    check_gradients,
    every_gradient,
    full_gradients,
    gathered_weights,
    local_gradients,
    loss_of,
    loss_without_head,
    make_lm,
    shard,
)
from two_nodes import REDUCTION, accumulate, apply, in_both_ways, raise_out_of_memory, reduction_in

from hf_zeropp import ZeroPPHandle
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


def scenario_with_one_rank_per_node(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    handle = apply(model, overlap, ranks_per_node=1)
    accumulate(model, handle, rank, (0, 1, 2))
    check_gradients(model, make_lm(), rank, Reduction(8, 4, 1), steps=(0, 1, 2))


def scenario_a_look_at_gradients_completes_them(rank: int, overlap: bool) -> None:
    """A gradient that is read between micro-steps is the true one, and accumulation continues after the read."""
    model = shard(make_lm())
    handle = apply(model, overlap, **UNQUANTIZED)
    exact = Reduction(None, None, 2)
    handle.set_last_micro_step(False)
    backward(model, rank, 0)
    assert handle.partial_bytes() > 0
    check_gradients(model, make_lm(), rank, exact, steps=(0,))
    assert handle.partial_bytes() == 0
    accumulate(model, handle, rank, (1, 2))
    check_gradients(model, make_lm(), rank, exact, steps=(0, 1, 2))


def scenario_zero_grad_starts_over(rank: int, overlap: bool) -> None:
    """Dropped micro-steps are gone, whichever way the gradients are dropped; also for a unit the rest skips."""
    for drop in (lambda model, handle: model.zero_grad(), lambda model, handle: handle.discard_accumulated()):
        model = shard(make_lm())
        handle = apply(model, overlap)
        accumulate(model, handle, rank, (0,))
        model.zero_grad()
        handle.set_last_micro_step(False)
        for step in (5, 6):
            backward(model, rank, step)
        drop(model, handle)
        accumulate(model, handle, rank, (1, 2))
        check_gradients(model, make_lm(), rank, REDUCTION, steps=(1, 2))
        model.zero_grad()
        handle.set_last_micro_step(False)
        backward(model, rank, 5)
        drop(model, handle)
        model.zero_grad()
        check_skipping(model, handle, rank)


def check_skipping(model, handle: ZeroPPHandle, rank: int) -> None:
    """Only one block takes part from here on: the other has no gradient, or one of zeros."""
    model.path = [0]
    handle.set_last_micro_step(True)
    backward(model, rank, 1)
    left = model.blocks[1].up.weight.grad
    model.path = [0, 1]
    assert left is None or left.to_local().abs().sum() == 0


def scenario_backward_that_raises_and_is_caught(rank: int, overlap: bool) -> None:
    """As stock FSDP2: what was reduced before the error counts, and nothing counts twice."""
    results = []
    for ours in (True, False):
        model = shard(make_lm(depth=3))
        handle = apply(model, overlap, **UNQUANTIZED) if ours else None
        if handle is not None:
            handle.set_last_micro_step(False)
        backward(model, rank, 0)
        if handle is not None:
            handle.set_last_micro_step(True)
        hook = model.blocks[1].register_full_backward_pre_hook(raise_out_of_memory)
        with pytest.raises(MemoryError):
            backward(model, rank, 1)
        hook.remove()
        results.append(full_gradients(model))
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-7, msg=name)


def scenario_a_block_skipped_in_the_last_micro_step(rank: int, overlap: bool) -> None:
    """Stochastic depth: its accumulated gradient still arrives (for fp16, divided as FSDP2 divides)."""
    for policy in POLICIES:
        model = shard(make_lm(depth=3), POLICIES[policy])
        handle = apply(model, overlap)
        accumulate(model, handle, rank, (0,))
        model.zero_grad()
        handle.set_last_micro_step(False)
        for step in (0, 1):
            backward(model, rank, step)
        handle.set_last_micro_step(True)
        model.path = [0, 2]
        backward(model, rank, 2)
        model.path = [0, 1, 2]
        reference = make_lm(depth=3, paths=[[0, 1, 2], [0, 1, 2], [0, 2]])
        check_gradients(model, reference, rank, reduction_in(policy), steps=(0, 1, 2))
        assert handle.partial_bytes() == 0


def scenario_a_block_used_twice(rank: int, overlap: bool) -> None:
    """It is reduced once per use, so the errors of two reductions add up."""
    model, reference = shard(make_lm()), make_lm()
    model.path = reference.path = [0, 1, 0]
    handle = apply(model, overlap)
    accumulate(model, handle, rank, (0, 1, 2))
    # Twice the bound: two gradients, each of which may be as large as their sum, or larger where they cancel.
    check_gradients(model, reference, rank, REDUCTION, steps=(0, 1, 2), slack=2.0)


def scenario_parameters_without_gradient_now_and_then(rank: int, overlap: bool) -> None:
    """A unit that is reduced as a whole, in part, and as a whole again: no micro-step is lost, none comes back."""
    model = shard(make_lm())
    handle = apply(model, overlap)
    accumulate(model, handle, rank, (0,))
    for drop in (False, True):
        model.zero_grad()
        handle.set_last_micro_step(False)
        backward(model, rank, 0)
        if drop:
            model.zero_grad()
        backward(model, rank, 1, loss_without_head)
        handle.set_last_micro_step(True)
        backward(model, rank, 2)
        steps, losses = (0, 1, 2), (loss_of, loss_without_head, loss_of)
        check_gradients(model, make_lm(), rank, REDUCTION, steps=steps[drop:], loss=losses[drop:])


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


def scenario_full_gradients_that_fsdp2_keeps(rank: int, overlap: bool) -> None:
    """The measure of the scenario above can fail: without our accumulation, it finds every gradient in full size."""
    model = shard(make_lm(depth=3))
    apply(model, overlap)
    model.set_requires_gradient_sync(False)
    backward(model, rank)
    assert len(unsharded_gradients(model)) == len(list(model.parameters()))


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


test_accumulation = pytest.mark.thorough(
    "*blocking",
    "*divide_factors_that_change*",
    "*a_block_*",
    "*predictions_follow_gradient_hooks*",
    "*full_gradients_that_fsdp2_keeps*",
)(in_both_ways(__name__))
