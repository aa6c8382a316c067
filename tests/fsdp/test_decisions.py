"""Ranks that differ raise the same error, which names unit and rank; ranks that stop are noticed within the world's timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from checked_training import RANKS_PER_NODE, training
from happens_before import checked_world
from harness import RankError, announce, expect_errors, run_ranks, started_ranks
from toy import EXACT, backward, make_lm, shard, tokens_of, train
from two_nodes import raise_out_of_memory

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.comm.agreement import Agreement, Answer
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.hooks import listen_to_optimizers

TIMEOUT_S = 6.0


def new_model(overlap: bool = True, **settings) -> tuple[torch.nn.Module, ZeroPPHandle]:
    model = shard(make_lm())
    return model, apply_zeropp(model, EXACT | {"ranks_per_node": 2, "overlap": overlap} | settings)


def another_last_micro_step(rank: int, overlap: bool) -> None:
    model, handle = new_model(overlap)
    handle.set_last_micro_step(rank != 2)
    backward(model, rank)


def frozen_on_one_rank(rank: int, overlap: bool) -> None:
    model, _ = new_model(overlap, hpz_size="node")
    backward(model, rank)
    if rank == 3:
        model.blocks[1].norm.requires_grad_(False)
    backward(model, rank)


def delivered_on_one_rank(rank: int, overlap: bool) -> None:
    model, handle = new_model(overlap)
    handle.set_last_micro_step(False)
    backward(model, rank)
    if rank == 0:
        handle.deliver()
    model(tokens_of(rank))


def gradient_read_on_one_rank(rank: int, overlap: bool) -> torch.Tensor:
    model, handle = new_model(overlap)
    handle.set_last_micro_step(False)
    backward(model, rank)
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=r"not complete \(rank 0\).*set_last_micro_step\(True\).*handle.deliver\(\)"
        ):
            model.head.weight.grad.to_local().sum()
    handle.set_last_micro_step(True)
    backward(model, rank)
    return model.head.weight.grad.full_tensor()


@pytest.mark.thorough("*blocking")
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
def test_a_look_on_one_rank_raises_there_and_hangs_nobody(overlap):
    first, *others = run_ranks(gradient_read_on_one_rank, 4, overlap)
    assert first.any() and all(torch.equal(first, other) for other in others)


def raised_in_backward_on_some_ranks(rank: int, overlap: bool) -> None:
    """At another unit than elsewhere: what is under way differs, and no rank waits for what never comes."""
    model, _ = new_model(overlap)
    if rank == 0:
        model.blocks[0].register_full_backward_pre_hook(raise_out_of_memory)
    try:
        backward(model, rank)
    except MemoryError:
        model(tokens_of(rank))


DIFFERENCES = {
    another_last_micro_step: [
        "rank 2 is about to run a backward pass of another micro-step",
        "[0, 1, 3]",
        "of the last",
    ],
    frozen_on_one_rank: ["unit blocks.1 differs", "rank 3: torch.float32, frozen: weight, bias", "ranks [0, 1, 2]: "],
    delivered_on_one_rank: [
        "rank 0 is about to complete accumulated gradients",
        "[1, 2, 3] are about to run a forward",
    ],
}


@pytest.mark.thorough("*blocking")
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda function: function.__name__)
def test_a_difference_is_named_on_every_rank(difference, overlap):
    began = time.monotonic()
    for error in expect_errors(difference, 4, overlap, timeout_s=20.0):
        assert all(words in error for words in DIFFERENCES[difference]), error
    assert time.monotonic() - began < 60, "it should not have taken a timeout"


@pytest.mark.thorough
def test_an_error_on_one_rank_ends_all():
    """No rank knows better than the timeout when a peer raises in the middle of a backward pass; but all end."""
    with (
        pytest.raises(RankError) as failure,
        started_ranks(raised_in_backward_on_some_ranks, 4, True, timeout_s=TIMEOUT_S) as ranks,
    ):
        ranks.collect(grace_s=4 * TIMEOUT_S)
    assert {error.kind for error in failure.value.errors} & {"TimeoutError"} == set(), failure.value


def train_for_ever(rank: int, settings: dict) -> None:
    model = shard(make_lm())
    handle = apply_zeropp(model, {"ranks_per_node": 2} | settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100_000):
        train(model, optimizer, rank, (step,), handle, micro_steps=2)
        if step == 2:
            announce("warm")


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"overlap": False, "shared_memory": False}], ids=["default", "blocking"])
def test_a_stopped_rank_ends_all_others_within_the_timeout(settings):
    """As stock FSDP2: every group has the world's timeout."""
    with started_ranks(train_for_ever, 4, settings, timeout_s=TIMEOUT_S) as ranks:
        for rank in ranks:
            rank.wait_for("warm")
        ranks[3].stop()
        began = time.monotonic()
        others = [ranks[0], ranks[1], ranks[2]]
        assert all(rank.has_ended(within_s=4 * TIMEOUT_S) for rank in others)
        assert time.monotonic() - began < 4 * TIMEOUT_S


def events_of_steps(rank: int) -> list[str]:
    """Return what a warm step does on GPUs, of one micro-step and of two.

    It asks (a), waits for an answer (w), reduces a unit (r), and has stepped (s).
    """
    events: list[str] = []

    def noting(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: events.append(event) or call(*args, **kwargs)

    with (
        checked_world(2 * RANKS_PER_NODE),
        mock.patch.object(Agreement, "ask", noting("a", Agreement.ask)),
        mock.patch.object(Answer, "_wait_for", noting("w", Answer._wait_for)),
        mock.patch.object(ZeroPPReduceScatter, "__call__", noting("r", ZeroPPReduceScatter.__call__)),
        mock.patch.object(Decisions, "after_optimizer_step", noting("s", Decisions.after_optimizer_step)),
    ):
        run = training()
        found = []
        for micro_steps in (1, 2):
            run.step(micro_steps)
            events.clear()
            run.step(micro_steps)
            found.append("".join(events))
    return found


@pytest.mark.one_rank
def test_on_gpus_an_answer_is_waited_for_where_it_has_arrived():
    """Only a forward pass needs its answer at once. A backward pass looks at its own one unit later, a step at the last."""
    expected = ["aw" + "rarwrr" + "aws", "aw" + "rarwrr" + "aw" + "rarwrr" + "aws"]
    assert run_ranks(events_of_steps, 1, init=False) == [expected]


class Noting:
    """Notes when it is told of a step."""

    def __init__(self, number: int, told: list[int]) -> None:
        self.number = number
        self.told = told

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, **how: bool) -> None:
        self.told.append(self.number)

    after_optimizer_step = before_optimizer_step


def test_models_are_told_of_a_step_in_the_order_of_their_preparation():
    """A model may run collectives before a step, so the order must be the same on all ranks, and not one of addresses."""
    told: list[int] = []
    apart = [bytearray(4096 * (number % 7)) for number in range(64)]  # objects get addresses in no order
    listeners = [Noting(number, told) for number in range(64)]
    for listener in listeners:
        listen_to_optimizers(listener)
    del apart, listener
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    assert told == [*range(64)] * 2
    told.clear()
    del listeners[::2]
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    assert told == [*range(1, 64, 2)] * 2
