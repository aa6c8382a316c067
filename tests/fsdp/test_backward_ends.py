"""A backward pass ends where FSDP2 ends it, and once: nested passes, several roots, passes that are not the last.

Two nodes of two ranks; every scenario with overlapping and with blocking communication. Passes that raise are in
tests/fuzz/regressions/right_from_the_start.
"""

from __future__ import annotations

import functools

import pytest
import torch
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
    make_lm,
    shard,
    tokens_of,
)
from two_nodes import REDUCTION, accumulate, apply, in_both_ways

from hf_zeropp import ZeroPPHandle
from hf_zeropp.traffic import REDUCE_CROSS

UNQUANTIZED = EXACT | {"hpz_size": "node"}
DEPTH = 4


def checkpointed(reentrant: bool, policy: str = "fp32") -> torch.nn.Module:
    """Return a model whose calls of units are checkpointed, as Transformers does it."""
    model = shard(make_lm(depth=DEPTH), POLICIES[policy])
    model.call = functools.partial(checkpoint, use_reentrant=reentrant)
    return model


def train(model: torch.nn.Module, handle: ZeroPPHandle, rank: int, counts=(1, 3, 2)) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, micro_steps in enumerate(counts):
        accumulate(model, handle, rank, range(10 * step, 10 * step + micro_steps))
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def scenario_reentrant_checkpointing_of_units(rank: int, overlap: bool) -> None:
    """It changes no bit, and every unit crosses nodes once in a step, as without."""
    for policy in ("fp32", "bf16 reduce"):
        weights = {}
        for reentrant in (False, True):
            model = checkpointed(reentrant, policy)
            handle = apply(model, overlap)
            weights[reentrant] = train(model, handle, rank)
            assert handle.traffic.counts[REDUCE_CROSS].calls == 3 * (DEPTH + 1)
            handle.traffic.reset()
            train(model, handle, rank, counts=(2,))
            counted, predicted = handle.traffic.counts[REDUCE_CROSS], handle.predict(2)[REDUCE_CROSS]
            assert (counted.calls, counted.cross_node) == (predicted.calls, predicted.cross_node)
        for name, weight in weights[False].items():
            assert torch.equal(weights[True][name], weight), name


def scenario_reductions_overlap_with_nested_passes(rank: int, overlap: bool) -> None:
    """While a block is computed anew, the gradients of the one behind it are still under way."""
    model = checkpointed(True)
    handle = apply(model, overlap)
    under_way = []
    model.blocks[0].register_forward_hook(lambda module, args, output: under_way.append(len(handle._run.driver)))
    backward(model, rank)
    assert under_way == [0, DEPTH - 1 if overlap else 0]
    check_gradients(model, make_lm(depth=DEPTH), rank, REDUCTION)


def scenario_reentrant_checkpointing_without_a_root(rank: int, overlap: bool) -> None:
    """Blocks that are called by hand are roots of their own: FSDP2 ends the backward pass of each in its nested pass."""
    container = shard(make_lm(depth=DEPTH)).blocks
    reference = make_lm(depth=DEPTH).blocks
    handle = apply(container, overlap, **UNQUANTIZED)
    x = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(rank))
    for micro_step in range(2):
        handle.set_last_micro_step(micro_step == 1)
        y = x.clone().requires_grad_()
        for block in container:
            y = checkpoint(block, y, use_reentrant=True)
        y.square().mean().backward()
    y = x
    for block in reference:
        y = block(y)
    y.square().mean().backward()
    for name, gradient in full_gradients(container).items():
        expected = reference.get_parameter(name).grad
        torch.distributed.all_reduce(expected, torch.distributed.ReduceOp.AVG)
        torch.testing.assert_close(gradient, 2 * expected, rtol=1e-4, atol=1e-6, msg=name)


def scenario_one_loss_over_two_roots(rank: int, overlap: bool) -> None:
    """Actor and critic: each root is reduced in a callback of its own, and the pass is asked about once."""
    container, reference = (torch.nn.ModuleList(make_lm(seed) for seed in (0, 1)) for _ in range(2))
    for one in container:
        shard(one).call = functools.partial(checkpoint, use_reentrant=True)
    handle = apply(container, overlap, **UNQUANTIZED)
    answers = iter([False, True])
    handle.set_last_micro_step(lambda: next(answers))
    for step in range(2):
        (loss_of(container[0], tokens_of(rank, step)) + loss_of(container[1], tokens_of(rank, step))).backward()
    for ours, plain in zip(container, reference, strict=True):
        check_gradients(ours, plain, rank, Reduction(None, None, 2), steps=(0, 1))


def scenario_passes_that_are_not_the_last(rank: int, overlap: bool) -> None:
    """FSDP2 does not wait for its reductions then. What they add is there all the same."""
    model = checkpointed(True)
    handle = apply(model, overlap)
    for step, is_last in enumerate((False, False, True)):
        model.set_is_last_backward(is_last)
        backward(model, rank, step)
    check_gradients(model, make_lm(depth=DEPTH), rank, REDUCTION, steps=(0, 1, 2), slack=3)
    assert handle.traffic.counts[REDUCE_CROSS].calls == 3 * (DEPTH + 1)


test_the_end_of_a_backward_pass = pytest.mark.thorough("*blocking", "*reentrant_checkpointing_without_a_root*")(
    in_both_ways(__name__)
)
