"""Ranks that ran different units raise before mixed gradients are applied: layers of equal shape hide from every hop."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from harness import expect_errors, run_ranks
from torch.distributed.fsdp import fully_shard
from toy import EXACT, HIDDEN, Block, backward, full_weights, make_lm, shard, tokens_of, train

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.comm.agreement import Agreement
from hf_zeropp.comm.disagreement import Statement, describe_difference

SETTINGS = {
    "default": EXACT | {"hpz_size": "node"},
    "blocking": EXACT | {"hpz_size": "node", "overlap": False},
    "no copies": EXACT,
}


def trained_once(model: nn.Module, settings: dict) -> tuple[ZeroPPHandle, torch.optim.Optimizer]:
    return apply_zeropp(model, settings | {"ranks_per_node": 2}), torch.optim.SGD(model.parameters(), lr=0.1)


def must_not_step(optimizer: torch.optim.Optimizer, run: Callable[[], object]) -> None:
    """Run a backward pass that ranks run differently, and a step. It must raise before weights change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.to_local().clone() for param in params]
    try:
        run()
        optimizer.step()
    finally:
        assert all(map(torch.equal, before, (param.to_local() for param in params)))


def skips_another_layer_on_each_rank(rank: int, settings: dict) -> None:
    """LayerDrop, with a seed for each rank."""
    model = shard(make_lm(depth=4))
    _, optimizer = trained_once(model, settings)
    model.path = [index for index in range(4) if index != rank]
    must_not_step(optimizer, lambda: backward(model, rank))


def skips_a_layer_on_one_rank(rank: int, settings: dict) -> None:
    """An expert that got no token there. Its weights are on every node already."""
    model = shard(make_lm(depth=3))
    _, optimizer = trained_once(model, settings)
    backward(model, rank)
    optimizer.zero_grad()
    model.path = [0, 2] if rank == 1 else [0, 1, 2]
    must_not_step(optimizer, lambda: backward(model, rank))


def skips_in_an_earlier_micro_step(rank: int, settings: dict) -> None:
    model = shard(make_lm(depth=4))
    handle, optimizer = trained_once(model, settings)

    def run() -> None:
        handle.set_last_micro_step(False)
        model.path = [0, 1, 2] if rank < 2 else [0, 1, 3]
        backward(model, rank)
        handle.set_last_micro_step(True)
        model.path = [0, 1, 2]
        backward(model, rank)

    must_not_step(optimizer, run)


def another_order_of_layers(rank: int, settings: dict) -> None:
    model = shard(make_lm(depth=3))
    _, optimizer = trained_once(model, settings)
    model.path = [0, 1, 2] if rank != 3 else [1, 0, 2]
    must_not_step(optimizer, lambda: backward(model, rank))


class TwoHeads(nn.Module):
    """Two heads of equal shape on one trunk, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = Block(), nn.ModuleList(Block() for _ in range(2))
        for block in (self.trunk, *self.heads):
            fully_shard(block)
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]


def loss_of_another_head(rank: int, settings: dict) -> None:
    """The forward passes are the same, and what is reduced is not."""
    model = TwoHeads()
    _, optimizer = trained_once(model, settings)
    outputs = model(torch.randn(2, HIDDEN))
    must_not_step(optimizer, outputs[rank % 2].square().mean().backward)


DIFFERENCES = {
    skips_another_layer_on_each_rank: [
        "forward passes of module blocks.1: 1 on ranks [0, 2, 3], 0 on rank 1",
        "forward passes of module blocks.2: 1 on ranks [0, 1, 3], 0 on rank 2",
    ],
    skips_a_layer_on_one_rank: ["forward passes of module blocks.1: 1 on ranks [0, 2, 3], 0 on rank 1"],
    skips_in_an_earlier_micro_step: ["forward passes of module blocks.2: 1 on ranks [0, 1], 0 on ranks [2, 3]"],
    another_order_of_layers: ["blocks.1", "on ranks [0, 1, 2]", "on rank 3"],
    loss_of_another_head: [
        "reductions of unit heads.0: 1 on ranks [0, 2], 0 on ranks [1, 3]",
        "reductions of unit heads.1: 0 on ranks [0, 2], 1 on ranks [1, 3]",
    ],
}


PARTING = {
    skips_another_layer_on_each_rank: [
        "rank 0 is about to gather unit blocks.1",
        "rank 3 is about to gather unit blocks.2",
    ],
    another_order_of_layers: ["gather unit blocks.0", "rank 3 is about to gather unit blocks.1"],
}
"""Words where the ranks of a node wait for each other in gathers of their first step."""


@pytest.mark.thorough("*blocking", "*-no copies")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda function: function.__name__)
def test_every_rank_raises_before_the_step(difference, settings):
    if difference in (skips_a_layer_on_one_rank, loss_of_another_head) and settings == "no copies":
        pytest.skip("A rank that gathers less often makes the others wait in a gather, until the timeout.")
    began = time.monotonic()
    expected = DIFFERENCES | PARTING if settings == "default" else DIFFERENCES
    for error in expect_errors(difference, 4, SETTINGS[settings], timeout_s=20.0):
        assert error.startswith("DisagreementError"), error
        assert all(words in error for words in expected[difference]), error
    assert time.monotonic() - began < 60, "it should not have taken a timeout"


def skips_on_all_ranks_alike(rank: int, settings: dict) -> None:
    """And evaluation takes other layers on each node: what stays within a node is not compared."""
    model = shard(make_lm(depth=4))
    _, optimizer = trained_once(model, settings)
    for step in range(3):
        model.path = [index for index in range(4) if index != step]
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.path = [0, 1, 2, 3]
            model(tokens_of(rank))
            if settings["hpz_size"] is not None:
                model.path = [0, 1] if rank < 2 else [2, 3, 3]
                model(tokens_of(rank))
    full_weights(model)


@pytest.mark.thorough("*blocking")
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_ranks_run_alike_is_no_difference(settings):
    run_ranks(skips_on_all_ranks_alike, 4, SETTINGS[settings])


def questions_of_a_step(rank: int, micro_steps: int) -> int:
    """Count the agreements of one step."""
    model = shard(make_lm())
    handle, optimizer = trained_once(model, SETTINGS["default"])
    asked, ask = [], Agreement.ask
    Agreement.ask = lambda self, *args: asked.append(1) or ask(self, *args)  # type: ignore[method-assign]
    for step in range(2):
        asked.clear()
        train(model, optimizer, rank, (step,), handle, micro_steps)
    return len(asked)


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_a_step_asks_once_more_than_its_passes(micro_steps):
    """One question for each forward pass, one for each backward pass, and one before the step."""
    assert run_ranks(questions_of_a_step, 4, micro_steps) == [2 * micro_steps + 1] * 4


def test_many_differences_are_named_in_few_words():
    runs = [tuple(f"reductions of unit {index}" for index in range(10) if index != rank) for rank in range(8)]
    said = describe_difference(
        {rank: Statement("step", {}, run) for rank, run in enumerate(runs)}, dict.fromkeys(range(8), 0)
    )
    assert "unit 4: 1 on ranks" in said and "unit 5" not in said and "and 4 more differ" in said
