"""Partial sums in bf16 (``qgz_accumulator``): how far off, the same in every run, and half of the memory.

Two nodes of two ranks. The yardstick is the same accumulation with partial sums in fp32.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accelerate_runs import distance
from torch.distributed.fsdp import CPUOffloadPolicy
from toy import (
    EXACT,
    POLICIES,
    Reduction,
    backward,
    check_gradients,
    full_gradients,
    loss_without_head,
    make_lm,
    shard,
)
from two_nodes import accumulate, on_four_ranks

from hf_zeropp import ZeroPPHandle, apply_zeropp

BF16 = {"qgz_accumulator": "bfloat16"}
UNQUANTIZED = EXACT | {"hpz_size": "node"}
STEPS = (0, 1, 2, 3, 4, 5, 6, 7)
UNIT = 2.0**-8
"""An error of rounding to nearest is at most this part of the sum."""


@dataclasses.dataclass(frozen=True)
class Rounded(Reduction):
    """A reduction whose partial sums are rounded after each micro-step but the last."""

    def bound(self, gradients: torch.Tensor) -> float:
        roundings = len(gradients) - 1
        sums = gradients.abs().flatten(2).amax(2).sum().item()
        return super().bound(gradients) * (1 + roundings * UNIT) + roundings * UNIT * sums * (1 + roundings * UNIT)


def apply(model: torch.nn.Module, **settings) -> ZeroPPHandle:
    return apply_zeropp(model, {"ranks_per_node": 2} | BF16 | settings)


def gradients_of(rank: int, steps=STEPS, **settings) -> dict[str, torch.Tensor]:
    model = shard(make_lm())
    accumulate(model, apply(model, **settings), rank, steps)
    return full_gradients(model)


def scenario_every_dtype_is_within_its_bound(rank: int) -> None:
    for policy in POLICIES:
        dtype = POLICIES[policy].reduce_dtype or torch.float32
        for settings, bits in (({}, (8, 4)), ({"qgz_bits": None, "qgz_intra_bits": None}, (None, None))):
            model = shard(make_lm(), POLICIES[policy])
            handle = apply(model, **settings)
            for steps in ((0,), (1, 2, 3)):
                accumulate(model, handle, rank, steps)
                check_gradients(model, make_lm(), rank, Rounded(*bits, 2, dtype), steps=steps)
                model.zero_grad()


def scenario_other_settings_are_within_their_bound(rank: int) -> None:
    cases = [
        ({"hpz_size": None}, 2, {}),
        ({"ranks_per_node": 1}, 1, {}),
        ({}, 2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ]
    for settings, per_node, arguments in cases:
        model = shard(make_lm(), **arguments)
        accumulate(model, apply(model, **settings), rank, STEPS[:4])
        check_gradients(model, make_lm(), rank, Rounded(8, 4, per_node), steps=STEPS[:4])


def scenario_every_run_and_way_gives_the_same_bits(rank: int) -> None:
    steps = STEPS[:3]
    first = gradients_of(rank, steps)
    for settings in ({}, {"overlap": False}, {"shared_memory": False}):
        again = gradients_of(rank, steps, **settings)
        assert all(torch.equal(again[name], first[name]) for name in first), settings


def scenario_half_of_the_bytes_are_held(rank: int) -> None:
    held = {}
    for kind in ("bfloat16", "float32"):
        model = shard(make_lm(depth=3))
        handle = apply(model, qgz_accumulator=kind)
        handle.set_last_micro_step(False)
        for step in STEPS:
            backward(model, rank, step)
        held[kind] = handle.partial_bytes()
        assert {reduce._partial.sums.dtype for reduce in handle.reduces} == {getattr(torch, kind)}
        assert held[kind] == sum(reduce._partial.sums.untyped_storage().nbytes() for reduce in handle.reduces)
    assert 0 < held["bfloat16"] == held["float32"] / 2


def scenario_unsynchronized_micro_steps_stay_fsdp2s(rank: int) -> None:
    """``set_requires_gradient_sync(False)`` keeps gradients in full and partial sums of nothing."""
    results = []
    for kind in ("bfloat16", "float32"):
        model = shard(make_lm())
        handle = apply(model, qgz_accumulator=kind)
        for step in (0, 1, 2):
            model.set_requires_gradient_sync(step == 2)
            backward(model, rank, step)
            assert all(reduce.partial_bytes() == 0 for reduce in handle.reduces)
            assert (handle.partial_bytes() > 0) == (step < 2)  # FSDP2's own sums, at full size
        results.append(full_gradients(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[1])


def scenario_gradients_dropped_read_and_missing(rank: int) -> None:
    """Partial sums in bf16 are zeroed in part, delivered early, and cross without a last micro-step's gradients."""
    looks, ends = zip(*(program_with_drops(rank, kind) for kind in ("bfloat16", "float32")), strict=True)
    assert 0 < distance(*looks) < 1e-2 and 0 < distance(*ends) < 1e-2, (distance(*looks), distance(*ends))


def program_with_drops(rank: int, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients at a look between micro-steps, and at the end."""
    model = shard(make_lm())
    handle = apply(model, **UNQUANTIZED, qgz_accumulator=kind)
    handle.set_last_micro_step(False)
    backward(model, rank, 5)
    model.zero_grad()
    backward(model, rank, 0)
    look = {name: gradient.clone() for name, gradient in full_gradients(model).items()}
    assert handle.partial_bytes() == 0
    backward(model, rank, 1)
    backward(model, rank, 2, loss_without_head)
    model.head.weight.grad.zero_()  # its part of the sums is dropped
    backward(model, rank, 4)
    handle.set_last_micro_step(True)
    model.path = [0]
    backward(model, rank, 3)
    assert handle.partial_bytes() == 0
    return look, full_gradients(model)


test_accumulator = pytest.mark.thorough("*other_settings_are_within*", "every_dtype*")(on_four_ranks(__name__))
