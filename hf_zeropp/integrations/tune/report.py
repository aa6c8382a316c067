"""Trials are compared with stock: a table, a verdict in a sentence, and the lines to paste.

A candidate counts as faster if three of four of its steps are shorter than three of four of stock's. Its losses must be stock's
within ``TOLERANCE`` of the largest of them. Of those that pass, the one with the lowest median is recommended.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_zeropp.config import BLOCK, ENV_ENABLED
from hf_zeropp.integrations.tune.trial import DIFFERENT, STOCK, TRIED, Trial, TrialError

TOLERANCE = 0.02
"""The largest difference of losses, as a share of stock's largest. Default settings are off by 0.001 to 0.01 in a few steps."""
SAME_SCRIPT = 0.002
"""The largest mean difference, in the same share, of two trials of stock."""


@dataclasses.dataclass
class Search:
    """The trials of all candidates.

    Attributes:
        trials: by candidate, one of each round.
        failed: why a candidate gave no measurement.
    """

    trials: dict[str, list[Trial]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, name: str, trial: Trial) -> None:
        """Add a trial.

        Raises:
            TrialError: it is one of stock, and nothing can be compared with it.
        """
        self.trials.setdefault(name, []).append(trial)
        if name != STOCK:
            return
        first = self.trials[STOCK][0].losses
        if not all(map(math.isfinite, trial.losses)):
            raise TrialError("on stock FSDP2 a loss is not finite: nothing can be compared")
        if not statistics.fmean(self._gaps(trial) or [0]) <= SAME_SCRIPT:
            raise TrialError(
                f"two starts on stock FSDP2 have different losses ({first[0]:.5g} and {trial.losses[0]:.5g} in the first step): "
                "the script must train the same at each start, so give it a seed for model and data"
            )

    @property
    def others(self) -> list[str]:
        """The candidates that were measured, the fastest first."""
        return sorted(self.trials.keys() - {STOCK} - self.failed.keys(), key=self.median)

    @property
    def best(self) -> str | None:
        """The fastest candidate that is faster than stock and trains alike."""
        return next((name for name in self.others if self.verdict(name) == "faster"), None)

    def median(self, name: str) -> float:
        """Return the seconds of a step."""
        return self.quartiles(name)[1]

    def quartiles(self, name: str) -> list[float]:
        """Return the seconds that a quarter, half and three quarters of the measured steps take at most."""
        seconds = [second for trial in self.trials[name] for second in trial.seconds]
        return statistics.quantiles(seconds, n=4, method="inclusive")

    def verdict(self, name: str) -> str:
        """Return whether the losses are stock's, and three of four steps are shorter than three of four of stock's."""
        if not self.difference(name) <= TOLERANCE:  # so for NaN, and not where the model returned no loss
            return "refused: the loss differs"
        return "faster" if self.quartiles(name)[2] < self.quartiles(STOCK)[0] else "not faster"

    def difference(self, name: str) -> float:
        """Return the largest difference of losses to stock's, as a share of the largest of them; NaN where a loss is none."""
        gaps = [gap for trial in self.trials[name] for gap in self._gaps(trial)]
        # ``max`` would pass over a NaN that does not stand first.
        return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)

    def _gaps(self, trial: Trial) -> list[float]:
        stock = self.trials[STOCK][0].losses
        largest = max(map(abs, stock), default=0.0) or 1.0
        return [abs(ours - its) / largest for ours, its in zip(trial.losses, stock, strict=False)]


def show(search: Search, console: Console) -> None:
    """Print the table, the verdict and the lines to paste."""
    zero3 = max(trial.zero3 for trial in search.trials[search.others[0]]) / 1e6
    title = f"Seconds per step, MB that enter this node per step (16-bit ZeRO-3: {zero3:.2f}), and loss beside stock's"
    table = Table(box=None, title=title)
    for column in ("", "s", "middle half", "x stock", "MB", "loss off", ""):
        table.add_column(column, no_wrap=True)
    for name in (STOCK, *search.others):
        low, median, high = search.quartiles(name)
        off_by = f"{search.difference(name):.2%}" if name != STOCK and search.trials[STOCK][0].losses else ""
        times = f"{median:.3f}", f"{low:.3f}-{high:.3f}", f"{search.median(STOCK) / median:.2f}"
        received = statistics.fmean(trial.received for trial in search.trials[name]) / 1e6
        table.add_row(name, *times, f"{received:.2f}" if name != STOCK else "", off_by, _verdict(search, name))
    console.print(table)
    why_not = "\n".join(f"{name}: {why}" for name, why in search.failed.items())
    for text in (why_not, f"{sentence(search)}\n", block(search)):
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def to_json(search: Search) -> dict[str, Any]:
    """Return what ``show`` prints, and the figures behind it."""
    figures = {
        name: {
            "median": search.median(name),
            "difference": search.difference(name),
            "verdict": _verdict(search, name),
            "trials": [dataclasses.asdict(trial) for trial in search.trials[name]],
        }
        for name in (STOCK, *search.others)
    }
    said = {"recommended": search.best, "why": sentence(search), "paste": block(search)}
    return {**said, "candidates": figures, "failed": search.failed}


def sentence(search: Search) -> str:
    """Return the verdict, and why."""
    stock_s = search.median(STOCK)
    if best := search.best:
        times = f"{search.median(best):.3g} s per step where stock FSDP2 takes {stock_s:.3g} s"
        said = f"{best}: {times} ({stock_s / search.median(best):.2f} x)."
        has_losses = search.trials[STOCK][0].losses
        return said if has_losses else f"{said} The model returned no loss, so compare the losses yourself."
    nearest = search.others[0]
    return (
        "Leave it off: no candidate that trains alike is faster than stock FSDP2 beyond the spread of the steps "
        f"({stock_s:.3g} s; {nearest}: {search.median(nearest):.3g} s)."
    )


def block(search: Search) -> str:
    """Return what to paste into the job's config file, or its shell. All other settings stay the user's."""
    if search.best is None:
        return f"export {ENV_ENABLED}=0"
    settings = {name: "null" if value is None else value for name, value in TRIED[search.best].items()}
    lines = [f"  {name}: {value}" for name, value in settings.items()]
    return "\n".join([f"{BLOCK}:", f"{lines[0]}  # in place of {' and '.join(DIFFERENT)}", *lines[1:]])


def _verdict(search: Search, name: str) -> str:
    if name in (STOCK, search.best):
        return "" if name == STOCK else "recommended"
    return search.verdict(name)
