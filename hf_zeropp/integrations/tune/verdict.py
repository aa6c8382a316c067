"""Trials are put together from their ranks, compared with stock, and the best of them is found.

A candidate counts as faster if three of four of its steps are shorter than three of four of stock's, in each trial of stock.
Its losses must be stock's within ``TOLERANCE`` of the largest of them. Deltas of few bits are refused at low learning rates,
because a few steps do not show what they lose. Of those that pass, the one with the lowest median is recommended. Stock is
tried first and last, so a machine that becomes faster or slower meanwhile does not decide. Trials of stock must also have the
same losses: else the script is another at each start, and nothing can be compared.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.weights.low_rates import lowest_rate
from hf_zeropp.integrations.tune.candidates import Candidate

TOLERANCE = 0.02
"""The largest difference of losses, as a share of stock's largest. Default settings are off by 0.001 to 0.01 in a few steps."""
SAME_SCRIPT = 0.002
"""The largest mean difference, in the same share, of two trials of stock."""

_OF_ALL_RANKS = ("seconds", "losses", "memory", "bytes", "config")
"""The figures of a rank that ``Measured`` puts together."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One trial, all ranks of the world together.

    Attributes:
        candidate: what was tried.
        seconds: of each measured step, on the rank that took longest.
        losses: of each step from the first on, the mean of the ranks.
        memory: peak bytes of the rank that held most.
        cross_node, intra_node: bytes per step of the node that received most; 0 where nothing was counted.
        config: in force; None with stock.
        about: further figures of the first rank: none of those above.
    """

    candidate: Candidate
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    memory: int
    cross_node: float
    intra_node: float
    config: ZeroPPConfig | None
    about: dict[str, Any]

    @classmethod
    def of(cls, candidate: Candidate, ranks: Sequence[dict[str, Any]]) -> Measured:
        """Put together what the ranks have measured."""
        received = [rank["bytes"] for rank in ranks if rank["bytes"]]
        return cls(
            candidate,
            seconds=tuple(map(max, zip(*(rank["seconds"] for rank in ranks), strict=True))),
            losses=tuple(map(statistics.mean, zip(*(rank["losses"] for rank in ranks), strict=True))),
            memory=max(rank["memory"] for rank in ranks),
            cross_node=max((each["cross_node"] for each in received), default=0),
            intra_node=max((each["intra_node"] for each in received), default=0),
            config=None if ranks[0]["config"] is None else ZeroPPConfig(**ranks[0]["config"]),
            about={name: value for name, value in ranks[0].items() if name not in _OF_ALL_RANKS},
        )

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds that a quarter, and three quarters, of the steps take at most."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def difference(one: Measured, stock: Measured, *, mean: bool = False) -> float:
    """Return the largest (or mean) difference of losses, as a share of stock's largest; NaN where a loss is none."""
    gaps = [abs(ours - its) for ours, its in zip(one.losses, stock.losses, strict=True)]
    largest = max(map(abs, stock.losses))
    gap = sum(gaps) / len(gaps) if mean else max(gaps)
    # ``max`` would pass over a NaN that does not stand first.
    return math.nan if any(map(math.isnan, gaps)) else gap / largest if largest else gap


def refusal(one: Measured, stock: Measured) -> str | None:
    """Return why a trial may not be recommended, however fast it is; None if nothing speaks against it."""
    if not difference(one, stock) <= TOLERANCE:
        return "the loss differs"
    rate = one.about["learning_rate"]
    if one.config is not None and rate < lowest_rate(one.config):
        return f"changes of weights in {one.config.qwz_bits} bits lose too much at a learning rate of {rate:g}"
    return None


def is_faster(one: Measured, stocks: Sequence[Measured]) -> bool:
    """Return whether three of four steps are shorter than three of four of each trial of stock."""
    return all(one.quartiles[1] < stock.quartiles[0] for stock in stocks)


def best_of(others: Sequence[Measured], stocks: Sequence[Measured]) -> Measured | None:
    """Return the fastest of those that are faster than stock and not refused; None if there is none."""
    passed = [one for one in others if is_faster(one, stocks) and refusal(one, stocks[0]) is None]
    return min(passed, key=lambda one: one.median, default=None)
