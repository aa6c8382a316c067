"""torch.compile of blocks, of a whole model and of an optimizer's step, under ZeRO++."""

from __future__ import annotations

import pytest
import torch
from toy import (
    EXACT,
    backward,
    check_gradients,
    full_weights,
    loss_of,
    make_lm,
    shard,
    tokens_of,
)
from two_nodes import REDUCTION, apply, on_four_ranks


def scenario_compiled_blocks(rank: int, overlap: bool) -> None:
    model = make_lm()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    apply(shard(model), overlap)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION)


def scenario_compiled_model_has_the_handle_of_the_model_inside(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    compiled = torch.compile(model, backend="aot_eager")
    handle = apply(compiled, overlap)
    loss_of(compiled, tokens_of(rank)).backward()
    check_gradients(model, make_lm(), rank, REDUCTION)
    assert apply(model, overlap) is handle


def scenario_compiled_optimizer_steps(rank: int, overlap: bool) -> None:
    """A compiled step completes gradients that are pending, and computes what an eager step of stock FSDP2 computes."""
    models = [shard(make_lm()) for _ in range(2)]
    handle = apply(models[0], overlap, **EXACT)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    steps = [torch.compile(optimizers[0].step, backend="eager"), optimizers[1].step]
    for number in range(4):
        handle.set_last_micro_step(number % 2 == 0)
        for _ in range(2):
            for model in models:
                backward(model, rank)
        for step, optimizer in zip(steps, optimizers, strict=True):
            step()
            optimizer.zero_grad()
    ours, stock = map(full_weights, models)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, stock[name], rtol=0, atol=1e-6)  # sums in another order


test_compiled = pytest.mark.thorough("compiled_model*", "compiled_optimizer*")(on_four_ranks(__name__, True))
