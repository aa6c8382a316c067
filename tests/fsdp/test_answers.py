"""Answers about weights end when they should: with a pass that was left, with an optimizer's step, with another model.

Every program runs under stock FSDP2 and under ZeRO++ without quantization, and must compute the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from toy import EXACT, Block, loss_of, make_lm, shard, tokens_of
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp
from hf_zeropp.fsdp.weights.schedule import GatherSchedule

CONFIG = EXACT | {"hpz_size": "node", "ranks_per_node": 2}

Program = Callable[[int, Callable[[nn.Module], Any]], list[float]]
"""A training program: of a rank, and of what prepares a model. It returns losses."""


def same_as_stock(rank: int, program: Program) -> None:
    """Run ``program`` with stock FSDP2, and with ZeRO++ beside it, at first under ``overlap``."""
    stock = program(rank, lambda model: None)
    assert len(set(stock)) == len(stock) == 4, "stock's weights do not change, so that nothing is tested"
    for overlap in (True, False):
        ours = program(rank, lambda model, overlap=overlap: apply_zeropp(model, CONFIG | {"overlap": overlap}))
        assert ours == pytest.approx(stock, rel=1e-5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


class Left(nn.Module):
    """It raises once, in the middle of a forward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.errors = [KeyboardInterrupt()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x)
        if self.errors:
            raise self.errors.pop()
        return out


def train_through(step: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    """Take four steps, however often a forward pass is left before."""
    losses = []
    while len(losses) < 4:
        try:
            loss = step()
        except KeyboardInterrupt:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def actor_and_critic(rank: int, prepare: Callable[[nn.Module], Any]) -> list[float]:
    """A container whose own forward never runs. The actor is left in its second block."""
    models = nn.ModuleDict({"actor": make_lm(), "critic": make_lm(1)})
    models["actor"].blocks[1].down = Left(models["actor"].blocks[1].down)
    for model in models.values():
        shard(model)
    prepare(models)

    def step() -> torch.Tensor:
        return sum(loss_of(model, tokens_of(rank)) for model in models.values())

    return train_through(step, sgd(models))


def blocks_by_hand(rank: int, prepare: Callable[[nn.Module], Any]) -> list[float]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3))
    blocks[1].down = Left(blocks[1].down)
    for block in blocks:
        fully_shard(block)
    prepare(blocks)
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(rank))

    def step() -> torch.Tensor:
        return nn.Sequential(*blocks)(x).square().mean()

    return train_through(step, sgd(blocks))


def scenario_forward_passes_left_by_interrupt(rank: int) -> None:
    for program in (actor_and_critic, blocks_by_hand):
        same_as_stock(rank, program)


class ManualOptimization(nn.Module):
    """It trains inside its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = shard(make_lm())

    def forward(self, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = loss_of(self.inner, tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


def scenario_steps_inside_of_a_forward_pass(rank: int) -> None:
    def program(rank: int, prepare: Callable[[nn.Module], Any]) -> list[float]:
        model = ManualOptimization()
        prepare(model)
        return model(tokens_of(rank), sgd(model))

    same_as_stock(rank, program)


def scenario_another_model_in_a_backward_pass(rank: int) -> None:
    """Its weights have changed since its last forward pass, and only its next agreement can tell."""

    def program(rank: int, prepare: Callable[[nn.Module], Any]) -> list[float]:
        outer, inner = shard(make_lm()), shard(make_lm(1))
        prepare(outer)
        prepare(inner)
        optimizer, losses = sgd(inner), []

        def train_inner(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                loss = loss_of(inner, tokens_of(rank))
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(4):
            loss = loss_of(outer, tokens_of(rank))
            loss.register_hook(train_inner)
            loss.backward()
        return losses

    same_as_stock(rank, program)


def scenario_the_other_half_of_a_container_in_a_backward_pass(rank: int) -> None:
    """Both have one handle, and are two of FSDP2's roots."""

    def program(rank: int, prepare: Callable[[nn.Module], Any]) -> list[float]:
        models = nn.ModuleDict({"outer": shard(make_lm()), "inner": shard(make_lm(1))})
        prepare(models)
        optimizer, losses = sgd(models["inner"]), []

        def look(gradient: torch.Tensor) -> None:
            losses.append(loss_of(models["inner"], tokens_of(rank)).item())

        for _ in range(4):
            loss_of(models["inner"], tokens_of(rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(models["outer"], tokens_of(rank))
            loss.register_hook(look)
            loss.backward()
        return losses

    same_as_stock(rank, program)


test_losses_are_those_of_stock = pytest.mark.thorough("*another_model_in_a_backward_pass*")(on_four_ranks(__name__))


class Due:
    """A gather that is due, and raises where it is to start if its name is in ``broken``."""

    hops = None

    def __init__(self, name: str, log: list[str], broken: set[str]) -> None:
        self.name, self.log, self.broken = name, log, broken

    def encode(self) -> None:
        pass

    def start(self) -> None:
        if self.name in self.broken:
            raise RuntimeError("Connection closed")
        self.log.append(self.name)

    def land(self) -> None:
        pass


def test_a_hop_that_fails_is_the_last_of_its_pass():
    """The others would pair this rank's next hop with the one that failed."""
    log: list[str] = []
    broken = {"b"}
    schedule, due = GatherSchedule("cpu", overlaps=True), [Due(name, log, broken) for name in "abc"]
    with pytest.raises(RuntimeError):
        schedule.begin(due, starts_now=False)  # type: ignore[arg-type]
    schedule.finish()
    assert log == ["a"]
    broken.clear()
    schedule.begin(due, starts_now=False)  # type: ignore[arg-type]
    assert log == ["a", *"abc"]
