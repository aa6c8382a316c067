"""Gradient accumulation: one reduction across nodes per step, nothing of full size kept, nothing lost.

Two nodes of two ranks; every scenario with overlapping and with blocking communication. Every short order of events on one
rank is in test_pending_model.py. Programs in which gradients are read or dropped between micro-steps, and blocks are skipped or
used twice, are in tests/fuzz/regressions.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
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
    make_lm,
    shard,
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


test_accumulation = pytest.mark.thorough(
    "*blocking",
    "*partial_sums_in_bf16_are_within*",
    "*divide_factors_that_change*",
    "*predictions_follow_gradient_hooks*",
    "*full_gradients_that_fsdp2_keeps*",
)(in_both_ways(__name__))
