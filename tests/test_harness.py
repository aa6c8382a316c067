"""The harness itself: ranks that are stopped and resumed while they run, and scenarios and cases of which one fails."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import RankError, Scenarios, announce, each_case, run_ranks, started_ranks

VICTIM = 1


def sum_ranks(rank: int, pause_s: float = 0.0) -> float:
    """All-reduce, announce it, and after a pause all-reduce once more."""
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    announce("first sum")
    time.sleep(pause_s)
    dist.all_reduce(total)
    return total.item()


def environment_of(rank: int, name: str) -> str | None:
    return os.environ.get(name)


def summing(rank: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def failing_between_collectives(rank: int) -> None:
    summing(rank)
    assert rank != VICTIM, "wrong in the middle"
    summing(rank)


def crashing(rank: int) -> None:
    summing(rank)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGSEGV)
    summing(rank)


def dying_later(rank: int) -> None:
    """The harness calls ``barrier`` when all scenarios have ended."""
    if rank == VICTIM:
        dist.barrier = lambda: os._exit(7)


def failing_in_some_cases(rank: int) -> None:
    def check(case: int) -> None:
        summing(rank)
        assert (rank, case) != (VICTIM, 2), "wrong in the middle"
        summing(rank)

    each_case(range(5), check)


def test_a_stopped_rank_holds_up_its_peers_until_it_is_resumed() -> None:
    with started_ranks(sum_ranks, 3, 0.5) as ranks:
        assert len({os.getpid(), *(rank.pid for rank in ranks)}) == 4
        ranks[VICTIM].wait_for("first sum")
        ranks[VICTIM].stop()
        ranks[0].wait_for("first sum")
        assert not ranks[0].has_ended(within_s=1.5)
        ranks[VICTIM].resume()
        assert ranks.collect() == [9.0] * 3


def test_no_rank_survives_the_context() -> None:
    with started_ranks(sum_ranks, 2, 300.0) as ranks:
        ranks[VICTIM].wait_for("first sum")
        ranks[VICTIM].stop()
    assert not any(rank.process.is_alive() for rank in ranks)


def test_ranks_see_their_own_variables_and_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROPP_QGZ_BITS", "8")
    assert run_ranks(environment_of, 1, "ZEROPP_QGZ_BITS") == [None]
    assert run_ranks(environment_of, 1, "ZEROPP_QGZ_BITS", env={"ZEROPP_QGZ_BITS": "4"}) == ["4"]


# Scenarios and cases, of which one fails. "Seconds" are far less than the 60 s after which a collective gives up.
SECONDS = 30.0


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (failing_between_collectives, "AssertionError: wrong in the middle"),
        (crashing, f"ProcessDied: exit code -{signal.SIGSEGV:d}"),
    ],
)
def test_the_first_scenario_that_fails_is_reported_in_seconds_and_ends_the_run(failing, message) -> None:
    scenarios = Scenarios(3, [summing, failing, sum_ranks])
    start = time.monotonic()
    with pytest.raises(AssertionError, match=f"{failing.__name__} failed first on rank {VICTIM}:") as report:
        scenarios.check(failing.__name__)
    assert time.monotonic() - start < SECONDS
    text = str(report.value)
    first = text.partition("then on")[0]  # what the peers of that rank say comes behind it
    assert message in first and f"in {failing.__name__}" in first, text
    assert scenarios.check("summing") == [3.0] * 3
    with pytest.raises(
        AssertionError, match=rf"sum_ranks did not run .*: {failing.__name__} failed on rank {VICTIM}: {message}"
    ):
        scenarios.check("sum_ranks")


def test_a_case_that_fails_is_named_first_and_releases_the_other_ranks() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as report:
        run_ranks(failing_in_some_cases, 3)
    assert time.monotonic() - start < SECONDS
    first = report.value.errors[0]
    assert (first.rank, first.kind) == (VICTIM, "AssertionError")
    assert first.message.startswith("case 3 of 5, 2: wrong in the middle")
    assert str(report.value).startswith(f"[ranks [{VICTIM}]] AssertionError: case 3 of 5")


def test_a_rank_that_fails_behind_its_last_scenario_fails_all() -> None:
    scenarios = Scenarios(2, [summing, dying_later])
    with pytest.raises(RankError, match="exit code 7"):
        scenarios.check("summing")
