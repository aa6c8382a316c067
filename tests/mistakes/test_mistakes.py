"""Every mistake in the lists ends in a message that says what was expected, what came, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from catalogue import Mistake, Outcome, outcome_alone
from command_mistakes import COMMANDS
from harness import run_ranks
from rank_mistakes import RANKS, make_all
from settings_mistakes import SETTINGS

QUICK_S = 30.0  # half of the time after which a rank that waits for another gives up


def assert_says(mistake: Mistake, outcome: Outcome) -> None:
    missing = [word for word in mistake.words if word not in outcome.message]
    assert not missing, f"{missing} are not in: {outcome.message}"
    assert outcome.seconds < QUICK_S


@pytest.mark.parametrize("mistake", [*SETTINGS, *COMMANDS], ids=lambda mistake: mistake.name)
def test_before_anything_starts(mistake: Mistake, tmp_path: Path) -> None:
    assert_says(mistake, outcome_alone(mistake, tmp_path))


@pytest.fixture(scope="module")
def on_ranks() -> list[list[Outcome]]:
    return run_ranks(make_all, 4, timeout_s=60)


@pytest.mark.parametrize("index", range(len(RANKS)), ids=[mistake.name for mistake in RANKS])
def test_on_every_rank(on_ranks, index: int) -> None:
    for outcomes in on_ranks:
        assert_says(RANKS[index], outcomes[index])


def test_there_are_enough() -> None:
    names = [mistake.name for mistake in (*SETTINGS, *COMMANDS, *RANKS)]
    assert len(set(names)) >= 60
