"""Four ranks as two nodes under the default settings: the bound of a gradient's error there, and tests that run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from harness import RankError, Scenarios, scenarios_of, started_ranks
from toy import POLICIES, Reduction, backward

from hf_zeropp import ZeroPPHandle, apply_zeropp

REDUCTION = Reduction(node_bits=8, cross_bits=4, ranks_per_node=2)


def apply(model: nn.Module, overlap: bool, **settings) -> ZeroPPHandle:
    return apply_zeropp(model, {"ranks_per_node": 2, "overlap": overlap} | settings)


def accumulate(model: nn.Module, handle: ZeroPPHandle, rank: int, steps: Sequence[int]) -> None:
    """Run a micro-step for each number of ``steps``, of which the last one ends the step."""
    for index, step in enumerate(steps):
        handle.set_last_micro_step(index == len(steps) - 1)
        backward(model, rank, step)


def reduction_in(policy: str) -> Reduction:
    return Reduction(8, 4, 2, POLICIES[policy].reduce_dtype or torch.float32)


def raise_out_of_memory(module: nn.Module, gradients: Any) -> None:
    """Raise, as a hook before a module's backward pass."""
    raise MemoryError("in backward")


def on_four_ranks(module: str, *args: Any, **kwargs: Any) -> Callable[[str], None]:
    """Return the test of a module's scenarios on four ranks. Further arguments are those of ``Scenarios``."""
    scenarios = Scenarios(4, scenarios_of(module), *args, **kwargs)

    @scenarios.parametrize
    def test(scenario: str) -> None:
        scenarios.check(scenario)

    return test


def in_both_ways(module: str, further: Sequence[Callable[[int, bool], None]] = ()) -> Callable[[str, str], None]:
    """Return the test of a module's scenarios, and of further ones, with overlapping and with blocking communication."""
    functions = [*scenarios_of(module), *further]
    ways = {"overlap": Scenarios(4, functions, True), "blocking": Scenarios(4, functions, False)}

    @Scenarios.parametrize_ways(ways)
    def test(scenario: str, way: str) -> None:
        ways[way].check(scenario)

    return test


def check_that_a_killed_rank_ends_all(train_without_end: Callable[[int], None], killed: int) -> None:
    """Kill one of four ranks behind the second step, of which each announces the number. All others end before the timeout."""
    import pytest

    with started_ranks(train_without_end, 4, timeout_s=20) as ranks:
        ranks[killed].wait_for("step 1")
        ranks[killed].kill()
        with pytest.raises(RankError) as failure:
            ranks.collect(grace_s=15)
    ended = {one.rank: one.kind for one in failure.value.errors}
    assert ended.pop(killed) == "ProcessDied"
    assert ended.keys() == {*range(4)} - {killed} and "TimeoutError" not in ended.values(), failure.value.errors
