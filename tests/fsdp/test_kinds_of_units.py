"""Units of every kind that FSDP2 shards, and its ways to compute gradients, under ZeRO++: within the bound of the exact mean.

Two nodes of two ranks and the default settings (INT8 weights, INT8 and INT4 gradients) unless a scenario says so.
Every scenario runs twice: blocking and overlapping communication take different ways through the comm objects.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from toy import (
    POLICIES,
    Reduction,
    backward,
    check_gradients,
    gathered_weights,
    logged_messages,
    loss_of,
    make_lm,
    shard,
    tokens_of,
)
from two_nodes import REDUCTION, accumulate, apply, in_both_ways, reduction_in

from hf_zeropp import generation_mode
from hf_zeropp.traffic import FSDP2_REDUCE


def scenario_units_that_thaw_behind_their_first_forward_pass(rank: int, overlap: bool) -> None:
    """FSDP2 chose the dtype of gradients in that pass, and none for a frozen unit (pytorch#186998)."""
    for frozen in (lambda model: model.blocks[0], lambda model: model):
        for num_micro_steps in (1, 2):
            model = make_lm()
            frozen(model).requires_grad_(False)
            handle = apply(shard(model, POLICIES["bf16"]), overlap)
            with torch.no_grad():
                loss_of(model, tokens_of(rank))
            model.reshard()  # FSDP2 leaves the root gathered, and forgets later what is said of its gathered parameters
            model.requires_grad_(True)
            accumulate(model, handle, rank, range(num_micro_steps))
            check_gradients(model, make_lm(), rank, reduction_in("bf16"), steps=tuple(range(num_micro_steps)))


def scenario_other_ways_to_shard(rank: int, overlap: bool) -> None:
    """Two modules in one unit, no resharding, columns instead of rows, offload to CPU."""
    together = make_lm()
    fully_shard([together.norm, together.head], reshard_after_forward=False)
    columns = make_lm(hidden=8, inner=20)
    for model, reference in (
        (shard(together), make_lm()),
        (shard(make_lm(), reshard_after_forward=False), make_lm()),
        (shard(columns, shard_placement_fn=columns_of_matrices), make_lm(hidden=8, inner=20)),
        (shard(make_lm(), offload_policy=CPUOffloadPolicy(pin_memory=False)), make_lm()),
    ):
        apply(model, overlap)
        for _ in range(2):
            model.zero_grad()
            backward(model, rank)
        check_gradients(model, reference, rank, REDUCTION)


def scenario_one_node_generates_with_an_offloaded_model(rank: int, overlap: bool) -> None:
    """No schedule starts the gathers of offloaded weights ahead, so they come before the other node stops."""
    model = shard(make_lm(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    apply(model, overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        with torch.no_grad(), generation_mode(model):
            if rank < 2:
                model(tokens_of(rank))


def columns_of_matrices(param: torch.Tensor) -> Shard:
    return Shard(1) if param.ndim == 2 else Shard(0)


def scenario_unit_of_mixed_dtypes(rank: int, overlap: bool) -> None:
    """FSDP2 hands its weights over as bytes: they stay FSDP2's, exact and counted, its gradients reduce as ever."""
    model = make_lm()
    model.blocks[0].up.to(torch.bfloat16).requires_grad_(False)
    model.blocks[0].up.forward = functools.partial(half_linear, model.blocks[0].up)
    weights = {f"blocks.0.{name}": param.detach().clone() for name, param in model.blocks[0].named_parameters()}
    shard(model)
    handle = apply(model, overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        handle.traffic.reset()
        backward(model, rank)
        optimizer.step()
    counted = handle.traffic.counts
    gathered = gathered_weights(model)
    assert counted == handle.predict()
    assert all(torch.equal(gathered[name], weight) for name, weight in weights.items())


def half_linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x.bfloat16(), linear.weight, linear.bias).float()


def scenario_units_that_stay_fsdp2s_are_named_once(rank: int, overlap: bool) -> None:
    """One warning of one rank names all of them, for each model."""
    for _ in range(2):
        with logged_messages() as messages:
            model = make_lm(depth=4)
            for block in (model.blocks[1], model.blocks[3]):
                block.up.to(torch.bfloat16).requires_grad_(False)
                block.up.forward = functools.partial(half_linear, block.up)
            apply(shard(model), overlap)
            for step in range(2):
                backward(model, rank, step)
                model.zero_grad()
        assert len(messages) == (1 if rank == 0 else 0), messages
        assert all("mix dtypes" in message and "blocks.1, blocks.3" in message for message in messages)


def scenario_an_asynchronous_unshard_gathers_at_once_and_says_so(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    apply(model, overlap)
    expected = gathered_weights(model)
    with logged_messages() as messages:
        for _ in range(2):
            for block in model.blocks:
                block.unshard(async_op=True).wait()
            for name, param in model.blocks.named_parameters():
                assert torch.equal(param, expected[f"blocks.{name}"])
            for block in model.blocks:
                block.reshard()
    assert len(messages) == (len(model.blocks) if rank == 0 else 0), messages
    assert all("unshard(async_op=True)" in message for message in messages)


def scenario_double_precision_is_fsdp2s_own(rank: int, overlap: bool) -> None:
    """fp64 has no wire form: FSDP2's own collectives, also while accumulating."""
    model, reference = shard(make_lm().double()), make_lm()
    handle = apply(model, overlap)
    accumulate(model, handle, rank, (0, 1))
    check_gradients(model, reference, rank, Reduction(None, None, 2, torch.float64), steps=(0, 1))
    counted, predicted = handle.traffic.counts[FSDP2_REDUCE], handle.predict(2)[FSDP2_REDUCE]
    assert (counted.calls, counted.cross_node) == (predicted.calls, predicted.cross_node)


def scenario_inference_mode_between_steps(rank: int, overlap: bool) -> None:
    """(Before the first step it breaks stock FSDP2 as well.)"""
    model = shard(make_lm())
    apply(model, overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()  # not the model's: its root stays unsharded, as after any forward without backward
        backward(model, rank)
        check_gradients(model, make_lm(), rank, REDUCTION)
        optimizer.step()
        with torch.inference_mode():
            model(tokens_of(rank))


def scenario_models_in_half_precision(rank: int, overlap: bool) -> None:
    """No mixed precision: weights, gradients and sums in the model's own 16-bit dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        model = shard(make_lm().to(dtype))
        handle = apply(model, overlap)
        accumulate(model, handle, rank, (0, 1))
        assert model.head.weight.grad.dtype == dtype
        check_gradients(model, make_lm(), rank, Reduction(8, 4, 2, dtype), steps=(0, 1))


def scenario_units_of_every_kind(rank: int, overlap: bool) -> None:
    """One of a norm alone, one without parameters, one inside another, and a root that has nothing left."""
    model = make_lm()
    model.blocks.append(nn.Identity())
    model.path.append(2)
    for part in (model.embed, model.blocks[0].up, model.norm, model.head):
        fully_shard(part)
    handle = apply(shard(model), overlap)
    accumulate(model, handle, rank, (0, 1))
    check_gradients(model, make_lm(), rank, REDUCTION, steps=(0, 1))


# Ways to compute gradients.


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


def scenario_reductions_outside_of_backward_are_refused(rank: int, overlap: bool) -> None:
    """Torch 2.15 lets a caller reduce after the backward pass. Without that setting the model trains on."""
    if not hasattr(FSDPModule, "finalize_backward"):
        return
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


test_units_and_gradients = pytest.mark.thorough("*blocking", "*models_in_half_precision*")(in_both_ways(__name__))
