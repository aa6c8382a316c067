"""Trials are put together from their ranks, compared with stock, and the best of them is found.

A candidate counts as faster if three of four of its steps are shorter than three of four of stock's, in each trial of stock. Its
losses must be stock's within ``TOLERANCE`` of the largest of them. Its weights must train at the learning rate: a few steps do
not show what deltas of 2 bits lose. Of those that pass, the one with the lowest median is recommended. Stock is tried first and
last, so a machine that becomes faster or slower meanwhile does not decide. Trials of stock must also have the same losses: else
the script is another at each start, and nothing can be compared.
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
from hf_zeropp.traffic import Bytes, Peers, total

TOLERANCE = 0.02
"""The largest difference of losses, as a share of stock's largest. Default settings are off by 0.001 to 0.01 in a few steps."""
SAME_SCRIPT = 0.002
"""The largest mean difference, in the same share, of two trials of stock."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One trial, all ranks of the world together.

    Attributes:
        candidate: what was tried.
        seconds: of each measured step, on the rank that took longest.
        figures: of each step from the first on: the mean loss of the ranks, or the norm of the gradients.
        have_losses: whether they are losses.
        memory: peak bytes of the rank that held most.
        cross_node, intra_node: bytes per step of the node that received most; None where nothing was counted.
        config: in force; None with stock.
        about: further figures of the first rank.
    """

    candidate: Candidate
    seconds: tuple[float, ...]
    figures: tuple[float, ...]
    have_losses: bool
    memory: int
    cross_node: float | None
    intra_node: float | None
    config: ZeroPPConfig | None
    about: dict[str, Any]

    @classmethod
    def of(cls, candidate: Candidate, ranks: Sequence[dict[str, Any]]) -> Measured:
        """Put together what the ranks have measured."""
        first = ranks[0]
        have_losses = all(rank["have_losses"] for rank in ranks)
        sums = [sum(each) for each in zip(*(rank["figures"] for rank in ranks), strict=True)]
        crossed, within = ([rank[key] for rank in ranks] for key in ("cross_node", "intra_node"))
        return cls(
            candidate,
            seconds=tuple(map(max, zip(*(rank["seconds"] for rank in ranks), strict=True))),
            figures=tuple(one / len(ranks) if have_losses else math.sqrt(one) for one in sums),
            have_losses=have_losses,
            memory=max(rank["memory"] for rank in ranks),
            cross_node=None if None in crossed else max(crossed),
            intra_node=None if None in within else max(within),
            config=None if first["config"] is None else ZeroPPConfig(**first["config"]),
            about=first,
        )

    @property
    def compared(self) -> str:
        """The name of the figures. A loop may give its loss to no backward pass that can be seen."""
        return "loss" if self.have_losses else "norm of the gradients (the script shows no loss)"

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds that a quarter, and three quarters, of the steps take at most."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def with_bytes_of_fsdp2(self, ranks_per_node: int) -> Measured:
        """Return this trial of stock with the bytes of FSDP2's own collectives, as rings carry them."""
        counts: list[Bytes] = [
            Peers.among(ranks, ranks[0], ranks_per_node).bytes_in_ring(round(of_slice))
            for ranks, of_slice in self.about["collectives"]
        ]
        if not counts:
            return self
        received = total(counts)
        return dataclasses.replace(
            self, cross_node=received.cross_node * ranks_per_node, intra_node=received.intra_node * ranks_per_node
        )


def difference(one: Measured, stock: Measured, *, mean: bool = False) -> float:
    """Return the largest (or mean) difference of losses, as a share of stock's largest; NaN where a loss is none."""
    gaps = [abs(ours - its) for ours, its in zip(one.figures, stock.figures, strict=True)]
    largest = max(map(abs, stock.figures))
    gap = sum(gaps) / len(gaps) if mean else max(gaps)
    # ``max`` would pass over a NaN that does not stand first.
    return math.nan if any(map(math.isnan, gaps)) else gap / largest if largest else gap


def refusal(one: Measured, stock: Measured) -> str | None:
    """Return why a trial may not be recommended, however fast it is; None if nothing speaks against it."""
    if one.have_losses != stock.have_losses or not difference(one, stock) <= TOLERANCE:
        return f"the {stock.compared} differs"
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
