"""Runs families in modes on 4 ranks, all in one process group as long as nothing raises, and says what came of each."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from families import Family
from harness import RankError, run_ranks
from modes import GENERATING_KINDS, GENERATING_MODES, WORLD, Outcome, run_mode

TOGETHER = 40
"""How many cases share a process group: a new one costs a second, and what came of the others is known when all have run."""

Case = tuple[Family, str]
"""A family and a mode."""


def cases_of(families: Sequence[Family], modes: Sequence[str]) -> list[Case]:
    """Return all cases that make sense: what generates no tokens is not asked to."""
    return [(f, mode) for mode in modes for f in families if mode not in GENERATING_MODES or f.kind in GENERATING_KINDS]


def run(cases: Sequence[Case], report: Callable[[Case, Outcome], None] | None = None) -> dict[Case, Outcome]:
    """Run the cases.

    Args:
        cases: families and modes.
        report: called with each outcome, as soon as it is known.

    Returns:
        The outcomes: an error where any rank raised, else the largest gap.
    """
    outcomes: dict[Case, Outcome] = {}
    cases = list(cases)
    while cases:
        found = _run_together(cases[:TOGETHER])
        for case, outcome in zip(cases, found, strict=False):
            outcomes[case] = outcome
            if report is not None:
                report(case, outcome)
        cases = cases[len(found) :]
    return outcomes


def _run_together(cases: list[Case]) -> list[Outcome]:
    """Run cases in one process group, up to the first that raises."""
    try:
        by_rank = run_ranks(run_cases, WORLD, cases, timeout_s=120, limit_s=60 + 60 * len(cases))
    except RankError as error:  # a rank died or hung, so nothing is known of the others
        if len(cases) > 1:
            return _run_together(cases[:1])
        kinds = ", ".join(sorted({failure.kind for failure in error.errors}))
        return [Outcome(f"{kinds} on ranks {sorted(failure.rank for failure in error.errors)}", trace=str(error))]
    return [max(outcomes, key=lambda each: (bool(each.error), each.gap)) for outcomes in zip(*by_rank, strict=True)]


def run_cases(rank: int, cases: list[Case]) -> list[Outcome]:
    """Run cases one after the other, up to the first that raises on any rank. Ranks call it."""
    outcomes: list[Outcome] = []
    for family, mode in cases:
        try:
            outcomes.append(run_mode(rank, family, mode))
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcomes.append(Outcome(f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        errors = [""] * WORLD
        dist.all_gather_object(errors, outcomes[-1].error)
        if any(errors):
            # Models that were half prepared leave hooks behind, and ranks may have stopped at different collectives.
            outcomes[-1].error = outcomes[-1].error or next(filter(None, errors))
            break
    return outcomes
