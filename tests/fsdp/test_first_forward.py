"""Parameters may be replaced between ``fully_shard`` and the first use of a model: FSDP2 takes them over then.

Ranks agree on weights, and cross hops start, before FSDP2 itself comes to a unit. The oracle is stock FSDP2.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from toy import EXACT, gathered_weights, make_lm, shard, tokens_of, train
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp, generation_mode

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


def scenario_replaced_before_weights_are_gathered_by_hand(rank: int) -> None:
    """``unshard()`` initializes its own unit alone, but all units agree then, and their cross hops start."""
    model, reference = shard(make_lm()), make_lm()
    apply_zeropp(model, UNQUANTIZED)
    replace_parameters(model)
    replace_parameters(reference)
    expected = dict(reference.named_parameters())
    for name, weight in gathered_weights(model).items():
        assert torch.equal(weight, expected[name]), name


def scenario_replaced_before_generation(rank: int) -> None:
    model, reference = shard(make_lm()), make_lm()
    apply_zeropp(model, UNQUANTIZED)
    replace_parameters(model)
    replace_parameters(reference)
    with torch.no_grad(), generation_mode(model):
        assert torch.equal(model(tokens_of(rank)), reference(tokens_of(rank)))


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


test_first_forward = on_four_ranks(__name__)
