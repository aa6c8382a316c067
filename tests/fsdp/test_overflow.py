"""A NaN of one rank reaches all ranks, and zeros stay zeros."""

from __future__ import annotations

import itertools

import pytest
import torch
from toy import POLICIES, VOCAB, backward, full_gradients, full_weights, loss_of, make_lm, shard, tokens_of
from two_nodes import in_both_ways

from hf_zeropp import apply_zeropp
from hf_zeropp.ops.format import GRAD_BLOCK

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
    values = (float("nan"), float("inf"), float("-inf"))
    for settings, value, on_rank in itertools.product(({}, INT4, UNQUANTIZED), values, (0, 3)):
        gradients = poisoned_gradients(rank, settings | {"overlap": overlap}, value, on_rank)
        spoiled = {name.rsplit(".", 1)[0] for name, gradient in gradients.items() if not gradient.isfinite().all()}
        assert {"embed", "blocks.0.down", "blocks.0.norm", "blocks.0.up"} == spoiled, (settings, value, spoiled)


def scenario_only_the_block_is_spoiled(rank: int, overlap: bool) -> None:
    """One element of a matrix: its block decodes to NaN, the others of the same matrix stay."""
    model = shard(make_lm(hidden=2 * GRAD_BLOCK, inner=64))
    apply_zeropp(model, NODES | {"overlap": overlap})
    loss = loss_of(model, tokens_of(rank))
    if rank == 1:  # the unsharded root is at hand
        model.head.weight.register_hook(lambda gradient: gradient.index_put((torch.tensor(0), torch.tensor(40)), NAN))
    loss.backward()
    spoiled = ~full_gradients(model)["head.weight"].isfinite()
    assert spoiled[0, :GRAD_BLOCK].all() and spoiled.sum() == GRAD_BLOCK


NAN = torch.tensor(float("nan"))


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


def scenario_zeros_stay_zeros(rank: int, overlap: bool) -> None:
    """Rows of the embedding that no rank used, beside rows that were; and a gradient that is zero throughout."""
    model = shard(make_lm())
    apply_zeropp(model, NODES | {"overlap": overlap})
    backward(model, rank)
    used = torch.cat([tokens_of(source).flatten() for source in range(4)]).unique()
    unused = [token for token in range(VOCAB) if token not in used]
    gradient = full_gradients(model)["embed.weight"]
    assert unused and (gradient[unused] == 0).all() and (gradient[used] != 0).any(1).all()
    model.zero_grad()
    (loss_of(model, tokens_of(rank)) * 0.0).backward()
    assert all((gradient == 0).all() for gradient in full_gradients(model).values())


test_overflow = pytest.mark.thorough("*blocking", "*zeros_stay_zeros*")(in_both_ways(__name__))
