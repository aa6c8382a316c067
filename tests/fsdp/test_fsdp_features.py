"""Uses of FSDP2 besides a plain step, under ZeRO++: each must give the exact mean's gradients within the bound.

Two nodes of two ranks and the default settings (INT8 weights, INT8 and INT4 gradients) unless a scenario says so.
Every scenario runs twice: blocking and overlapping communication take different ways through the comm objects.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
import torch.nn as nn
from harness import Scenarios
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from toy import (
    EXACT,
    POLICIES,
    Reduction,
    backward,
    check_gradients,
    full,
    full_gradients,
    full_weights,
    gathered_weights,
    loss_of,
    loss_without_head,
    make_lm,
    shard,
    tokens_of,
)

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.traffic import FSDP2_REDUCE

REDUCTION = Reduction(node_bits=8, cross_bits=4, ranks_per_node=2)


def apply(model: nn.Module, overlap: bool, **settings) -> ZeroPPHandle:
    return apply_zeropp(model, {"ranks_per_node": 2, "overlap": overlap} | settings)


def reduction_in(policy: str) -> Reduction:
    return Reduction(8, 4, 2, POLICIES[policy].reduce_dtype or torch.float32)


@contextlib.contextmanager
def warnings_of_comms():
    """The messages comm objects log inside."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hf_zeropp.fsdp.run")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def frozen_parameters_mixed_in(rank: int, overlap: bool) -> None:
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


def freezing_between_steps(rank: int, overlap: bool) -> None:
    """requires_grad changes after a step: the layout of the reduction follows."""
    model, reference = shard(make_lm()), make_lm()
    apply(model, overlap)
    for frozen in (False, True):
        model.zero_grad()
        model.blocks[0].up.weight.requires_grad_(not frozen)
        reference.blocks[0].up.weight.requires_grad_(not frozen)
        backward(model, rank)
        check_gradients(model, reference, rank, REDUCTION)


def parameters_without_gradient(rank: int, overlap: bool) -> None:
    """They travel as zeros beside the others, and keep no gradient, as in stock FSDP2."""
    for policy in ("fp32", "fp16 reduce"):
        model, reference = shard(make_lm(), POLICIES[policy]), make_lm()
        apply(model, overlap)
        for step in range(2):
            model.zero_grad()
            backward(model, rank, step, loss_without_head)
        shares = check_gradients(model, reference, rank, reduction_in(policy), steps=(1,), loss=loss_without_head)
        assert "head.weight" not in shares
        assert model.head.weight.grad is None


def divide_factors_and_forced_sums(rank: int, overlap: bool) -> None:
    """gloo knows no pre-multiplied sum, so stock FSDP2 cannot be compared with here: the exact mean can."""
    prepare = [
        (3.0, lambda module: module.set_gradient_divide_factor(3.0)),
        (4.0, lambda module: module.set_gradient_divide_factor(4.0)),
        (4.0, lambda module: module.set_force_sum_reduction_for_comms(True)),
    ]
    for policy, (factor, set_factor) in itertools.product(POLICIES, prepare):
        model = shard(make_lm(), POLICIES[policy])
        for module in (model, *model.blocks):
            set_factor(module)
        handle = apply(model, overlap)
        for step in range(2):
            handle.set_last_micro_step(step == 1)
            backward(model, rank, step)
        check_gradients(model, make_lm(), rank, reduction_in(policy), steps=(0, 1), factor=factor)


def no_sync_by_hand(rank: int, overlap: bool) -> None:
    """set_requires_gradient_sync(False): FSDP2 keeps and adds full-size gradients, our reduction gets their sum."""
    model = shard(make_lm())
    apply(model, overlap)
    for step, sync in enumerate((False, False, True)):
        model.set_requires_gradient_sync(sync)
        backward(model, rank, step)
    check_gradients(model, make_lm(), rank, REDUCTION, steps=(0, 1, 2), summed=True)


def checkpointed(model: nn.Module, reentrant: bool) -> nn.Module:
    for block in model.blocks:
        if reentrant:
            block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=True)
        else:
            checkpoint(block)
    return model


def activation_checkpointing(rank: int, overlap: bool) -> None:
    """Both kinds. Recomputation uses the secondary shards: nothing more crosses nodes than without."""
    for reentrant in (False, True):
        model = shard(checkpointed(make_lm(), reentrant))
        handle = apply(model, overlap)
        backward(model, rank)
        check_gradients(model, make_lm(), rank, REDUCTION)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        handle.traffic.reset()
        backward(model, rank)
        crossed = {name: count.cross_node for name, count in handle.traffic.counts.items()}
        assert crossed == {name: count.cross_node for name, count in handle.predict().items()}
        check_gradients(model, make_lm(), rank, REDUCTION)


def clip_grad_norm(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    apply(model, overlap)
    backward(model, rank)
    before = full_gradients(model)
    norm = torch.sqrt(sum(gradient.double().square().sum() for gradient in before.values()))
    clipped = full(nn.utils.clip_grad_norm_(model.parameters(), norm.item() / 3))
    after = full_gradients(model)
    torch.testing.assert_close(clipped.double(), norm, rtol=1e-5, atol=0)  # fp32 sums of 2000 squares
    for name, gradient in after.items():
        torch.testing.assert_close(gradient, before[name] / 3, rtol=1e-4, atol=1e-8)


def other_ways_to_shard(rank: int, overlap: bool) -> None:
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


def columns_of_matrices(param: torch.Tensor) -> Shard:
    return Shard(1) if param.ndim == 2 else Shard(0)


def gradient_hooks_see_the_reduced_gradient(rank: int, overlap: bool) -> None:
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


def all_reduce_hooks_get_the_reduced_gradient(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    apply(model, overlap)
    backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION, factor=2.0)


def unit_of_mixed_dtypes(rank: int, overlap: bool) -> None:
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


def units_that_stay_fsdp2s_are_named_once(rank: int, overlap: bool) -> None:
    """One warning of one rank names all of them, for each model."""
    for _ in range(2):
        with warnings_of_comms() as messages:
            model = make_lm(depth=4)
            for block in (model.blocks[1], model.blocks[3]):
                block.up.to(torch.bfloat16).requires_grad_(False)
                block.up.forward = functools.partial(half_linear, block.up)
            apply(shard(model), overlap)
            for step in range(2):
                backward(model, rank, step)
        assert len(messages) == (1 if rank == 0 else 0), messages
        assert all("mix dtypes" in message and "blocks.1, blocks.3" in message for message in messages)


def an_asynchronous_unshard_gathers_at_once_and_says_so(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    apply(model, overlap)
    expected = gathered_weights(model)
    with warnings_of_comms() as messages:
        for _ in range(2):
            for block in model.blocks:
                block.unshard(async_op=True).wait()
            for name, param in model.blocks.named_parameters():
                assert torch.equal(param, expected[f"blocks.{name}"])
            for block in model.blocks:
                block.reshard()
    assert len(messages) == (len(model.blocks) if rank == 0 else 0), messages
    assert all("unshard(async_op=True)" in message for message in messages)


def double_precision_is_fsdp2s_own(rank: int, overlap: bool) -> None:
    """fp64 has no wire form: FSDP2's own collectives, also while accumulating."""
    model, reference = shard(make_lm().double()), make_lm()
    handle = apply(model, overlap)
    for step in range(2):
        handle.set_last_micro_step(step == 1)
        backward(model, rank, step)
    check_gradients(model, reference, rank, Reduction(None, None, 2, torch.float64), steps=(0, 1))
    counted, predicted = handle.traffic.counts[FSDP2_REDUCE], handle.predict(2)[FSDP2_REDUCE]
    assert (counted.calls, counted.cross_node) == (predicted.calls, predicted.cross_node)


def backward_that_raised(rank: int, overlap: bool) -> None:
    """A backward pass that raises on all ranks, as running out of memory does, must not reach the next gradients."""
    for ranks_per_node in (1, 2):
        model = shard(make_lm(depth=4))
        handle = apply(model, overlap, ranks_per_node=ranks_per_node)
        backward(model, rank)
        for _ in range(2):
            run_into_an_error(model, rank)
            for step in range(2):
                handle.set_last_micro_step(step == 1)
                backward(model, rank, step)
            check_gradients(model, make_lm(depth=4), rank, Reduction(8, 4, ranks_per_node), steps=(0, 1))


def run_into_an_error(model: nn.Module, rank: int) -> None:
    """Half a backward pass, then what FSDP2 documents for the time after."""
    hidden = []
    hook = model.blocks[1].register_forward_hook(lambda module, args, output: hidden.append(output))
    loss = loss_of(model, tokens_of(rank, 7))
    hook.remove()
    hidden[0].register_hook(raise_error)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        loss.backward()
    model.zero_grad()  # while the root is unsharded: FSDP2 would keep these gradients of its own
    model.reset_iter_state()
    model.zero_grad()


def raise_error(gradient: torch.Tensor) -> None:
    raise RuntimeError("out of memory, say")


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


def two_losses_through_one_forward(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    apply(model, overlap)
    loss = loss_of(model, tokens_of(rank))
    loss.backward(retain_graph=True)
    loss.backward()
    check_gradients(model, make_lm(), rank, REDUCTION, factor=2.0)


def gradients_added_to_old_ones(rank: int, overlap: bool) -> None:
    """Without ``zero_grad`` the gradients of the second step are added to those of the first."""
    model = shard(make_lm())
    apply(model, overlap)
    for step in range(2):
        backward(model, rank, step)
    check_gradients(model, make_lm(), rank, REDUCTION, steps=(0, 1))


def inference_mode_between_steps(rank: int, overlap: bool) -> None:
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


def converted_models(rank: int, overlap: bool) -> None:
    """model.to() and its kin work as with stock FSDP2, which swaps tensors (and refuses weakly referenced ones)."""
    model = shard(make_lm())
    apply(model, overlap, **EXACT | {"hpz_size": "node"})
    with torch.no_grad():
        model(tokens_of(rank))
    model.to(torch.bfloat16).to(torch.float32)
    with torch.no_grad():
        logits = model(tokens_of(rank))
    reference = make_lm()
    reference.load_state_dict(full_weights(model))
    assert torch.equal(logits, reference(tokens_of(rank)))


def hpz_of_other_sizes(rank: int, overlap: bool) -> None:
    """Copies shared by one rank, by the node, by the world: hops of one rank and hops that cross nodes twice."""
    for hpz_size in (1, 2, 4, None):
        model = shard(make_lm())
        handle = apply(model, overlap, hpz_size=hpz_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            handle.traffic.reset()
            backward(model, rank)
            optimizer.step()
        counted, predicted = handle.traffic.counts, handle.predict()
        optimizer.zero_grad()
        backward(model, rank)
        check_gradients(model, make_lm(), rank, REDUCTION)
        assert counted == predicted, f"hpz_size={hpz_size}: {counted} != {predicted}"


def models_in_half_precision(rank: int, overlap: bool) -> None:
    """No mixed precision: weights, gradients and sums in the model's own 16-bit dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        model = shard(make_lm().to(dtype))
        handle = apply(model, overlap)
        for step in range(2):
            handle.set_last_micro_step(step == 1)
            backward(model, rank, step)
        assert model.head.weight.grad.dtype == dtype
        check_gradients(model, make_lm(), rank, Reduction(8, 4, 2, dtype), steps=(0, 1))


def units_of_every_kind(rank: int, overlap: bool) -> None:
    """One of a norm alone, one without parameters, one inside another, and a root that has nothing left."""
    model = make_lm()
    model.blocks.append(nn.Identity())
    model.path.append(2)
    for part in (model.embed, model.blocks[0].up, model.norm, model.head):
        fully_shard(part)
    handle = apply(shard(model), overlap)
    for step in range(2):
        handle.set_last_micro_step(step == 1)
        backward(model, rank, step)
    check_gradients(model, make_lm(), rank, REDUCTION, steps=(0, 1))


def weights_that_come_after_sharding(rank: int, overlap: bool) -> None:
    """Sharded on the meta device, ZeRO++ applied, then materialized and loaded: FSDP2's way for large models."""
    with torch.device("meta"):
        model = make_lm()
    shard(model)
    apply(model, overlap)
    model.to_empty(device="cpu")
    dcp.set_model_state_dict(model, make_lm().state_dict(), options=dcp.StateDictOptions(full_state_dict=True))
    backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION)
    model.reshard()
    expected = dict(make_lm().named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in full_weights(model).items())


def compiled_blocks(rank: int, overlap: bool) -> None:
    model = make_lm()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    apply(shard(model), overlap)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION)


def compiled_model_has_the_handle_of_the_model_inside(rank: int, overlap: bool) -> None:
    model = shard(make_lm())
    compiled = torch.compile(model, backend="aot_eager")
    handle = apply(compiled, overlap)
    loss_of(compiled, tokens_of(rank)).backward()
    check_gradients(model, make_lm(), rank, REDUCTION)
    assert apply(model, overlap) is handle


def compiled_optimizer_steps(rank: int, overlap: bool) -> None:
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


EAGER = [
    frozen_parameters_mixed_in,
    freezing_between_steps,
    parameters_without_gradient,
    divide_factors_and_forced_sums,
    no_sync_by_hand,
    activation_checkpointing,
    clip_grad_norm,
    other_ways_to_shard,
    gradient_hooks_see_the_reduced_gradient,
    all_reduce_hooks_get_the_reduced_gradient,
    unit_of_mixed_dtypes,
    double_precision_is_fsdp2s_own,
    # FSDP2 of torch 2.11 cannot go on after a backward pass that raised.
    *([backward_that_raised] if hasattr(FSDPModule, "reset_iter_state") else []),
    *([reductions_outside_of_backward_are_refused] if hasattr(FSDPModule, "finalize_backward") else []),
    two_losses_through_one_forward,
    gradients_added_to_old_ones,
    inference_mode_between_steps,
    converted_models,
    hpz_of_other_sizes,
    models_in_half_precision,
    units_of_every_kind,
    weights_that_come_after_sharding,
]
WAYS = {
    "overlap": Scenarios(
        4, [*EAGER, units_that_stay_fsdp2s_are_named_once, an_asynchronous_unshard_gathers_at_once_and_says_so], True
    ),
    "blocking": Scenarios(4, EAGER, False),
}
COMPILED = Scenarios(
    4, [compiled_blocks, compiled_model_has_the_handle_of_the_model_inside, compiled_optimizer_steps], True
)


@Scenarios.parametrize_ways(WAYS)
def test_feature(scenario, way):
    WAYS[way].check(scenario)


@COMPILED.parametrize
def test_compiled(scenario):
    COMPILED.check(scenario)
