"""Ways to compute, freeze, accumulate and clip gradients in FSDP2, under ZeRO++: within the bound of the exact mean.

Two nodes of two ranks and the default settings (INT8 weights, INT8 and INT4 gradients) unless a scenario says so.
Every scenario runs twice: blocking and overlapping communication take different ways through the comm objects.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from toy import backward, check_gradients, loss_of, make_lm, shard, tokens_of
from two_nodes import REDUCTION, apply, in_both_ways


def scenario_frozen_parameters_mixed_in(rank: int, overlap: bool) -> None:
    """A matrix of one block, the norm of the other and the embedding do not train; the rest reduces as ever."""
    model, reference = make_lm(), make_lm()
    for part in (model, reference):
        norm = part.blocks[1].norm
        for param in (part.blocks[0].up.weight, norm.weight, norm.bias, part.embed.weight):
            param.requires_grad_(False)
    shard(model)
    apply(model, overlap)
    backward(model, rank)
    shares = check_gradients(model, reference, rank, REDUCTION)
    assert "blocks.0.up.weight" not in shares and "blocks.0.down.weight" in shares


def scenario_gradient_hooks_see_the_reduced_gradient(rank: int, overlap: bool) -> None:
    """Optimizers inside the backward pass read .grad in a hook: it must hold the reduced gradient there already."""
    model = shard(make_lm())
    apply(model, overlap)
    seen = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.to_local().clone()}))
    backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION)
    changed = [name for name, param in model.named_parameters() if not torch.equal(seen[name], param.grad.to_local())]
    assert not changed, "the hooks saw something else"


def scenario_all_reduce_hooks_get_the_reduced_gradient(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    apply(model, overlap)
    backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION, factor=2.0)


def reductions_outside_of_backward_are_refused(rank: int, overlap: bool) -> None:
    """Torch 2.15 lets a caller reduce after the backward pass. Without that setting the model trains on."""
    model = shard(make_lm())
    apply(model, overlap)
    model.set_manual_backward_finalization(True)
    loss_of(model, tokens_of(rank)).backward()
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(False\)"):
        model.finalize_backward()
    model.reset_iter_state()
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION)


CAN_FINALIZE = hasattr(FSDPModule, "finalize_backward")
test_gradients = pytest.mark.thorough("*blocking")(
    in_both_ways(__name__, [reductions_outside_of_backward_are_refused] if CAN_FINALIZE else [])
)
