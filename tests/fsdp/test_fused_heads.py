"""A head that is a unit of its own, and whose weight the model multiplies by itself, as TRL's losses do. On 4 ranks (2 nodes)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from frozen_runs import UNQUANTIZED, VOCAB, tiny_llama
from torch.distributed.fsdp import fully_shard
from toy import full_gradients
from transformers import LlamaForCausalLM
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp, generation_mode


class Fused(LlamaForCausalLM):
    """It does not call its head, unless it is asked to."""

    def forward(self, tokens: torch.Tensor, calls_head: bool = False) -> torch.Tensor:
        hidden = self.model(input_ids=tokens).last_hidden_state
        return self.lm_head(hidden) if calls_head else hidden @ self.lm_head.weight.t()


def fused_llama() -> nn.Module:
    model = tiny_llama()
    model.__class__ = Fused
    return model


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    tokens = tokens_of(rank)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def check_with_pass_between(rank: int, run: Callable[[nn.Module], None]) -> None:
    """Run something between the forward and the backward pass of a step, and look at its gradients."""
    model, reference = fused_llama(), fused_llama()
    for module in (*model.model.layers, model.lm_head, model):
        fully_shard(module, reshard_after_forward=True)
    apply_zeropp(model, UNQUANTIZED | {"ranks_per_node": 2})
    loss = loss_of(model, rank)
    with torch.no_grad():
        run(model)
    loss.backward()
    torch.stack([loss_of(reference, each) for each in range(4)]).mean().backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


def scenario_nothing_between(rank: int) -> None:
    check_with_pass_between(rank, lambda model: None)


def scenario_an_evaluation_that_calls_the_head_between(rank: int) -> None:
    check_with_pass_between(rank, lambda model: model(tokens_of(9), calls_head=True))


def scenario_an_evaluation_that_does_not_between(rank: int) -> None:
    check_with_pass_between(rank, lambda model: model(tokens_of(9)))


def scenario_a_generation_between(rank: int) -> None:
    def generate(model: nn.Module) -> None:
        with generation_mode(model):
            model(tokens_of(9), calls_head=True)

    check_with_pass_between(rank, generate)


test_a_fused_head = on_four_ranks(__name__)
