"""Ways in which models are called: compiled, behind parameters that were replaced, and around a head. Two nodes of two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from frozen_runs import VOCAB as LLAMA_VOCAB
from frozen_runs import tiny_llama
from torch.distributed.fsdp import fully_shard
from toy import (
    EXACT,
    backward,
    check_gradients,
    full_gradients,
    full_weights,
    gathered_weights,
    make_lm,
    shard,
    tokens_of,
    train,
)
from transformers import LlamaForCausalLM
from two_nodes import REDUCTION, apply, on_four_ranks

from hf_zeropp import apply_zeropp, generation_mode

# torch.compile of blocks, of a whole model and of an optimizer's step.


def scenario_compiled_blocks(rank: int) -> None:
    model = make_lm()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    apply(shard(model), True)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
    check_gradients(model, make_lm(), rank, REDUCTION)


def scenario_compiled_optimizer_steps(rank: int) -> None:
    """A compiled step completes gradients that are pending, and computes what an eager step of stock FSDP2 computes."""
    models = [shard(make_lm()) for _ in range(2)]
    handle = apply(models[0], True, **EXACT)
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
    # Sums in another order.
    torch.testing.assert_close(full_weights(models[0]), full_weights(models[1]), rtol=0, atol=1e-6)


# Parameters may be replaced between ``fully_shard`` and the first use of a model: FSDP2 takes them over then. Ranks agree on
# weights, and cross hops start, before FSDP2 itself comes to a unit. The oracle is stock FSDP2.

UNQUANTIZED = EXACT | {"hpz_size": "node", "ranks_per_node": 2}
CHANGED_WORDS = UNQUANTIZED | {"qwz_mode": "exact"}
BLOCKING = {"overlap": False}
REPLACED = ("norm.weight", "blocks.0.up.weight", "blocks.1.down.bias")


def replace_parameters(model: nn.Module) -> None:
    """Put new parameters in the place of some, in the root's unit and in blocks, with seven times their values."""
    for name in REPLACED:
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        setattr(module, leaf, nn.Parameter(getattr(module, leaf).detach() * 7))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Wrapper(nn.Module):
    """A container that is not sharded itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def scenario_replaced_before_the_first_forward(rank: int) -> None:
    stock = shard(make_lm())
    replace_parameters(stock)
    expected = train(stock, sgd(stock), rank, range(3))
    for settings, enters_the_wrapper in ((UNQUANTIZED, False), (CHANGED_WORDS, True), (UNQUANTIZED | BLOCKING, True)):
        model = shard(make_lm())
        wrapper = Wrapper(model)
        apply_zeropp(wrapper, settings)
        replace_parameters(model)
        entered = wrapper if enters_the_wrapper else model
        assert train(entered, sgd(model), rank, range(3)) == pytest.approx(expected, rel=1e-6), settings


def scenario_replaced_before_weights_are_used_otherwise(rank: int) -> None:
    """Gathered by hand: ``unshard()`` initializes its own unit alone, but all units agree then. And to generate."""
    gathered, generating, reference = shard(make_lm()), shard(make_lm()), make_lm()
    replace_parameters(reference)
    for model in (gathered, generating):
        apply_zeropp(model, UNQUANTIZED)
        replace_parameters(model)
    expected = dict(reference.named_parameters())
    for name, weight in gathered_weights(gathered).items():
        assert torch.equal(weight, expected[name]), name
    with torch.no_grad(), generation_mode(generating):
        assert torch.equal(generating(tokens_of(rank)), reference(tokens_of(rank)))


def scenario_on_meta_still(rank: int) -> None:
    """The error is FSDP2's own, which lists the parameters and says what to do."""
    with torch.device("meta"):
        model = make_lm()
    stock = shard(copy.deepcopy(model))
    shard(model)
    apply_zeropp(model, UNQUANTIZED)
    errors = []
    for one in (stock, model):
        with pytest.raises(RuntimeError, match="materialized from meta device") as caught:
            one(tokens_of(rank))
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and "embed.weight" in errors[0]


# A head that is a unit of its own, and whose weight the model multiplies by itself, as TRL's losses do.


class Fused(LlamaForCausalLM):
    """It does not call its head, unless it is asked to."""

    def forward(self, tokens: torch.Tensor, calls_head: bool = False) -> torch.Tensor:
        hidden = self.model(input_ids=tokens).last_hidden_state
        return self.lm_head(hidden) if calls_head else hidden @ self.lm_head.weight.t()


def fused_llama() -> nn.Module:
    model = tiny_llama()
    model.__class__ = Fused
    return model


def head_tokens_of(rank: int) -> torch.Tensor:
    return torch.randint(3, LLAMA_VOCAB, (2, 7), generator=torch.Generator().manual_seed(rank))


def head_loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    tokens = head_tokens_of(rank)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def generate(model: nn.Module) -> None:
    with generation_mode(model):
        model(head_tokens_of(9), calls_head=True)


PASSES_BETWEEN: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda model: None,
    "an evaluation that calls the head": lambda model: model(head_tokens_of(9), calls_head=True),
    "an evaluation that does not": lambda model: model(head_tokens_of(9)),
    "a generation": generate,
}


def scenario_a_fused_head(rank: int) -> None:
    """Something runs between the forward and the backward pass of a step, whose gradients are right all the same."""
    for between, run in PASSES_BETWEEN.items():
        model, reference = fused_llama(), fused_llama()
        for module in (*model.model.layers, model.lm_head, model):
            fully_shard(module, reshard_after_forward=True)
        apply_zeropp(model, UNQUANTIZED)
        loss = head_loss_of(model, rank)
        with torch.no_grad():
            run(model)
        loss.backward()
        torch.stack([head_loss_of(reference, each) for each in range(4)]).mean().backward()
        for name, gradient in full_gradients(model).items():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=f"{between}: {name}")


test_calls = pytest.mark.thorough("compiled_*")(on_four_ranks(__name__))
