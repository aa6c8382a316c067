"""A loop that accumulates and tells nobody crosses nodes in every micro-step: one warning has the two lines to add."""

from __future__ import annotations

import functools

import torch
from toy import logged_messages, loss_of, make_lm, shard, tokens_of
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp

SETTINGS = {"ranks_per_node": 2}
SAID = "backward passes came without an optimizer's step"


def warnings_in(loop) -> list[str]:
    with logged_messages("hf_zeropp.fsdp.gradients.micro_steps") as messages:
        loop()
    return [message for message in messages if SAID in message]


def trained(**settings):
    model = shard(make_lm())
    return model, apply_zeropp(model, SETTINGS | settings), torch.optim.SGD(model.parameters(), lr=0.1)


def accumulate(model, optimizer, rank: int, tell=lambda is_last: None) -> None:
    """Train two steps of three micro-steps. ``tell`` is called before each micro-step."""
    for step in range(6):
        is_last = step % 3 == 2
        tell(is_last)
        loss_of(model, tokens_of(rank, step)).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def scenario_a_loop_that_tells_nobody_is_told_once(rank: int) -> None:
    for settings in ({}, {"qgz_accumulate": "rank"}):
        model, _, optimizer = trained(**settings)
        said = warnings_in(functools.partial(accumulate, model, optimizer, rank))
        assert len(said) == (rank == 0)
        lines = "handle.set_last_micro_step(False)", "handle.set_last_micro_step(True)"
        assert all(line in message for message in said for line in lines)


def scenario_loops_that_tell_or_do_not_accumulate(rank: int) -> None:
    model, handle, optimizer = trained()

    def tells() -> None:
        accumulate(model, optimizer, rank, handle.set_last_micro_step)

    def drops() -> None:
        """As where a step is skipped because its gradients overflowed."""
        for step in range(2):
            loss_of(model, tokens_of(rank, step)).backward()
            optimizer.zero_grad()

    def tells_fsdp2() -> None:
        accumulate(model, optimizer, rank, model.set_requires_gradient_sync)

    def steps_without_clearing() -> None:
        for step in range(2):
            loss_of(model, tokens_of(rank, step)).backward()
            optimizer.step()
        optimizer.zero_grad()

    for loop in (tells, drops, tells_fsdp2, steps_without_clearing):
        assert warnings_in(loop) == [], loop.__name__


def scenario_losses_with_units_of_their_own(rank: int) -> None:
    """A loss for each of two models, and two losses of one model that meet in no unit."""
    (first, _, one), (second, _, other) = trained(), trained()

    def two_models() -> None:
        for step in range(2):
            for model in (first, second):
                loss_of(model, tokens_of(rank, step)).backward()
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()

    model = torch.nn.ModuleDict({"a": shard(make_lm()), "b": shard(make_lm())})
    apply_zeropp(model, SETTINGS)
    both = torch.optim.SGD(model.parameters(), lr=0.1)

    def two_parts() -> None:
        for step in range(2):
            for part in model.values():
                loss_of(part, tokens_of(rank, step)).backward()
            both.step()
            both.zero_grad()

    for loop in (two_models, two_parts):
        assert warnings_in(loop) == [], loop.__name__


test_accumulation = on_four_ranks(__name__)
