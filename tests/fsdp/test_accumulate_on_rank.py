"""``qgz_accumulate="rank"``: gradients stay on the rank at full size until the last micro-step, by FSDP2's own means.

The yardsticks are stock FSDP2 under ``set_requires_gradient_sync(False)``, and the unsharded model. Bytes are counted in
tests/integrations/test_accelerate.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from harness import run_ranks
from torch.utils.checkpoint import checkpoint
from toy import (
    EXACT,
    POLICIES,
    Reduction,
    backward,
    check_gradients,
    full_gradients,
    full_weights,
    loss_of,
    loss_without_head,
    make_lm,
    shard,
    tokens_of,
)
from two_nodes import in_both_ways

from hf_zeropp import ZeroPPHandle, apply_zeropp

ON_RANK = {"qgz_accumulate": "rank", "qgz_intra_bits": None}
UNQUANTIZED = EXACT | {"hpz_size": "node"}
COUNTS = (3, 1, 2)
"""Micro-steps of the steps of one run."""


def apply(model: torch.nn.Module, overlap: bool = True, **settings) -> ZeroPPHandle:
    return apply_zeropp(model, {"ranks_per_node": 2, "overlap": overlap} | ON_RANK | settings)


def train_as_stock(model, rank: int, counts=COUNTS) -> list[dict[str, torch.Tensor]]:
    """Train under FSDP2's own ``no_sync``, and return the gradients of each step."""
    return _train(model, rank, counts, lambda last: model.set_requires_gradient_sync(last))


def train_as_ours(model, handle: ZeroPPHandle, rank: int, counts=COUNTS) -> list[dict[str, torch.Tensor]]:
    return _train(model, rank, counts, handle.set_last_micro_step)


def _train(model, rank: int, counts, tell) -> list[dict[str, torch.Tensor]]:
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
        handle = apply(model, overlap, **UNQUANTIZED)
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if policy == "fp32" else {"rtol": 0.05, "atol": 0.02}
        compare(train_as_ours(model, handle, rank), train_as_stock(stock, rank), **tolerance)


def scenario_both_ways_are_one_way(rank: int, overlap: bool) -> None:
    """A user who calls ``set_requires_gradient_sync`` himself gets the same bits, whether the handle is told or not."""
    results = []
    for tells_handle, tells_fsdp2 in ((True, False), (False, True), (True, True)):
        model = shard(make_lm())
        handle = apply(model, overlap)

        def tell(last: bool, model=model, handle=handle, ours=tells_handle, theirs=tells_fsdp2) -> None:
            if ours:
                handle.set_last_micro_step(last)
            if theirs:
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)

        results.append(_train(model, rank, COUNTS, tell))
    compare(results[1], results[0], rtol=0, atol=0)
    compare(results[2], results[0], rtol=0, atol=0)


def scenario_gradients_of_full_size_are_held(rank: int, overlap: bool) -> None:
    """In FSDP2's reduce dtype, and reported."""
    for policy, itemsize in (("fp32", 4), ("bf16", 4), ("bf16 reduce", 2)):
        model = shard(make_lm(), POLICIES[policy])
        handle = apply(model, overlap)
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
    handle = apply(model, overlap)
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
    handle = apply(model, overlap)
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
    handle = apply(model, overlap)
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
    handle = apply(model, overlap)
    for step, path in enumerate(([0, 2], [0, 1, 2])):
        handle.set_last_micro_step(step == 1)
        model.path = path
        backward(model, rank, step)
    assert all(param.grad is not None for param in model.parameters())
    assert handle.partial_bytes() == 0


def scenario_schedules_of_quantization_take_effect(rank: int, overlap: bool) -> None:
    """Full gradients are no sums of one kind: ``qgz_until`` need not wait for them."""
    model = shard(make_lm())
    handle = apply(model, overlap, qgz_until=0.5)
    train_as_ours(model, handle, rank, (2,))
    handle.set_last_micro_step(False)
    backward(model, rank, 0)
    handle.set_progress(0.9)
    handle.set_last_micro_step(True)
    backward(model, rank, 1)
    check_gradients(model, make_lm(), rank, Reduction(None, None, 2), steps=(0, 1), summed=True)


def two_ranks_give_the_bits_of_stock(rank: int) -> None:
    """A sum of two has one order."""
    model, stock = shard(make_lm()), shard(make_lm())
    handle = apply(model, **UNQUANTIZED, ranks_per_node=1)
    compare(train_as_ours(model, handle, rank), train_as_stock(stock, rank), rtol=0, atol=0)


test_accumulation_on_the_rank = pytest.mark.thorough(
    "*blocking", "*schedules_of_quantization*", "*units_that_no_pass_has_used_yet*"
)(in_both_ways(__name__))


@pytest.mark.thorough
def test_two_ranks_give_the_bits_of_stock():
    run_ranks(two_ranks_give_the_bits_of_stock, 2)
