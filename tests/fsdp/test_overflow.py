"""A NaN of one rank reaches all ranks. Which blocks of a wire it spoils is in tests/comm/test_two_hops.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from toy import POLICIES, full_gradients, full_weights, loss_of, make_lm, shard, tokens_of
from two_nodes import in_both_ways

from hf_zeropp import apply_zeropp

NODES = {"ranks_per_node": 2}
INT4 = {"qgz_intra_bits": 4}
UNQUANTIZED = {"qgz_bits": None, "qgz_intra_bits": None}


def poisoned_gradients(rank: int, settings: dict, value: float, on_rank: int) -> dict[str, torch.Tensor]:
    """``value`` in one activation's gradient on one rank, at the last of two micro-steps or the first."""
    model = shard(make_lm())
    handle = apply_zeropp(model, NODES | settings)
    for step, is_last in enumerate((False, True)):
        handle.set_last_micro_step(is_last)
        hidden = []
        hook = model.blocks[0].register_forward_hook(lambda module, args, output, keep=hidden: keep.append(output))
        loss = loss_of(model, tokens_of(rank, step))
        hook.remove()
        if rank == on_rank and step == on_rank % 2:
            hidden[0].register_hook(lambda gradient: torch.where(torch.arange(12) == 5, value, gradient))
        loss.backward()
    return full_gradients(model)


def scenario_nan_and_inf_on_one_rank(rank: int, overlap: bool) -> None:
    """They show in the gradients of what lies behind (block 0 and the embedding), and nowhere else."""
    faults = ((float("nan"), 0), (float("inf"), 3))
    for settings, (value, on_rank) in itertools.product(({}, INT4, UNQUANTIZED), faults):
        gradients = poisoned_gradients(rank, settings | {"overlap": overlap}, value, on_rank)
        spoiled = {name.rsplit(".", 1)[0] for name, gradient in gradients.items() if not gradient.isfinite().all()}
        assert {"embed", "blocks.0.down", "blocks.0.norm", "blocks.0.up"} == spoiled, (settings, value, spoiled)


def scenario_grad_scaler_skips_on_every_rank(rank: int, overlap: bool) -> None:
    """fp16 gradients overflow on one rank alone: no rank steps, every rank halves its scale; then all step."""
    model = shard(make_lm(), POLICIES["fp16 reduce"])
    handle = apply_zeropp(model, NODES | {"overlap": overlap})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = full_weights(model)
    for size, steps, scale in ((1e6, 0, 512.0), (1.0, 1, 512.0)):
        loss = loss_of(model, tokens_of(rank)) * (size if rank == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (handle.traffic.steps, scaler.get_scale()) == (steps, scale)
        moved = any(not torch.equal(weight, before[name]) for name, weight in full_weights(model).items())
        assert moved == bool(steps)


test_overflow = pytest.mark.thorough("*blocking")(in_both_ways(__name__))
