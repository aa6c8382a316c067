"""Studies of loss: what is trained, the run of one cell, and each variant beside the first one, with intervals over seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from library.cluster import Ranks
from library.pages import Grid
from library.plots import colors_of
from library.study import Key, Study
from library.variants import shown

STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5 % point of Student's t by the number of seeds."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A part of a study, in which models learn one thing.

    Attributes:
        title: in tables.
        rates: learning rates of AdamW.
        variants: the first is the one with which the others are compared.
        recipe: fields of ``Recipe`` that are its own.
        checkpoint: whether it goes on from the study's checkpoint.
        length: its steps, as a multiple of those on the command line.
    """

    title: str
    rates: tuple[float, ...]
    variants: tuple[str, ...]
    recipe: dict[str, Any]
    checkpoint: bool = True
    length: float = 1


def keys_of(
    tasks: dict[str, Task], names: Sequence[str], seeds: Sequence[int], rates: Sequence[float], variants: Sequence[str]
) -> list[Key]:
    """Return the runs of a study: ``task``, ``rate``, ``variant`` and ``seed`` of each.

    Seeds are the outer loop, so that a study that is stopped has complete comparisons for some seeds.

    Args:
        tasks: by name.
        names: of those that run.
        seeds: of the runs.
        rates: only these of each task's; an empty sequence chooses all.
        variants: only these of each task's; an empty sequence chooses all.
    """
    return [
        {"task": name, "rate": rate, "variant": variant, "seed": seed}
        for seed in seeds
        for name in names
        for rate in tasks[name].rates
        for variant in tasks[name].variants
        if (not rates or rate in rates) and (not variants or variant in variants)
    ]


def train(ranks: Ranks, steps: int) -> dict[str, Any]:
    """Train one run to its end, and return its row: losses at the start, in the middle and at the end, bytes, and ``look``."""
    curve: dict[str, list[float]] = {"step": [0], "validation": [ranks.call("evaluate")[0]]}
    for upto in (round(steps / 2), steps):
        ranks.call("train", upto - curve["step"][-1] - 1)
        looked, *_ = ranks.call("look")
        # Before the evaluation, which sends weights too. They belong to no step that is counted.
        sent, *_ = ranks.call("shares_of_model")
        curve["step"].append(upto)
        curve["validation"].append(ranks.call("evaluate")[0])
    return {"start": curve["validation"][0], "final": curve["validation"][-1], **looked, **sent, "curve": curve}


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over seeds with the bounds of its 95 % interval. With one seed they are infinite."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of the mean of normally distributed values."""
        mean = statistics.mean(values)
        num = len(values)
        half = STUDENT_T[num] * statistics.stdev(values) / math.sqrt(num) if num in STUDENT_T else math.inf
        return cls(mean, mean - half, mean + half)

    def text(self, form: Callable[[float], str], exact: float) -> str:
        """Return mean and bounds; bold where they exclude ``exact``."""
        if math.isinf(self.low):
            return form(self.mean)
        shown = f"{form(self.mean)} [{form(self.low)}, {form(self.high)}]"
        return shown if self.low <= exact <= self.high else f"**{shown}**"


@dataclasses.dataclass(frozen=True)
class Cell:
    """The runs of a task with one variant at one learning rate.

    Attributes:
        rate: of learning.
        variant: how ranks communicate.
        pairs: one run per seed, each with stock's of the same seed.
    """

    rate: float
    variant: str
    pairs: list[tuple[dict[str, Any], dict[str, Any]]]

    @property
    def change(self) -> Interval:
        """By how much the final losses exceed stock's, relative."""
        return Interval.of([run["final"] / stock["final"] - 1 for run, stock in self.pairs])

    def progress(self, loss: str = "final") -> Interval:
        """Return the fall of the loss in these runs, as a part of the fall in stock's.

        Both start at stock's first loss, so a loss that is higher at once, as with packed weights, counts against the runs.

        Args:
            loss: the field of a row that holds the last loss.
        """
        return Interval.of([(stock["start"] - run[loss]) / (stock["start"] - stock[loss]) for run, stock in self.pairs])

    @property
    def finals(self) -> list[float]:
        """The losses at the end."""
        return [run["final"] for run, _ in self.pairs]

    @property
    def sent(self) -> float | None:
        """The bytes of weights and gradients across nodes in a step, of M; None for FSDP2's own, which were not counted."""
        run, _ = self.pairs[0]
        return None if run["weights"] is None else run["weights"] + run["gradients"]


def cells_of(study: Study, name: str, task: Task) -> list[Cell]:
    """Return the cells of a task that were measured, in the order of learning rates and variants."""
    cells = []
    for rate, variant in itertools.product(task.rates, task.variants):
        runs = study.rows("runs", task=name, rate=rate, variant=variant)
        stock = {run["seed"]: run for run in study.rows("runs", task=name, rate=rate, variant=task.variants[0])}
        if pairs := [(run, stock[run["seed"]]) for run in runs if run["seed"] in stock]:
            cells.append(Cell(rate, variant, pairs))
    return cells


def loss_grid(study: Study, name: str, task: Task) -> Grid:
    """Make the table of a task: losses, differences to stock, progress and bytes, by learning rate and variant."""
    rows = []
    for cell in cells_of(study, name, task):
        is_stock, several = cell.variant == task.variants[0], len(cell.pairs) > 1
        row = {"rate, variant": f"{cell.rate:g}, {shown(cell.variant)}", "seeds": str(len(cell.pairs))}
        row |= {"loss": f"{statistics.mean(cell.finals):.4f}"}
        row |= {"std over seeds": f"{statistics.stdev(cell.finals):.4f}" if several else ""}
        row |= {"loss to stock": "" if is_stock else cell.change.text("{:+.3%}".format, 0.0)}
        row |= {"progress": "" if is_stock else cell.progress().text("{:.1%}".format, 1.0)}
        rows.append(row | {"bytes, M": f"{cell.sent:.3f}" if cell.sent is not None else ""})
    return Grid.of(f"{task.title}: validation loss at the end", rows)


def progress_over_rates(axis: Any, cells: Sequence[Cell], loss: str = "final") -> None:
    """Draw the progress over the learning rate with its intervals, a line for each variant, and stock's.

    Args:
        axis: the panel.
        cells: of a task.
        loss: as in ``Cell.progress``.
    """
    for style, own in _lines(cells):
        shares = [cell.progress(loss) for cell in own]
        half = [100 * (share.high - share.mean) if math.isfinite(share.high) else 0.0 for share in shares]
        axis.errorbar([cell.rate for cell in own], [100 * share.mean for share in shares], half, capsize=3, **style)
    axis.set(xlabel="learning rate of fine-tuning", ylabel="% of stock's progress", xscale="log")
    axis.axhline(100, color="black", linewidth=1, label=shown("stock"))


def bytes_over_rates(axis: Any, cells: Sequence[Cell]) -> None:
    """Draw the bytes over the learning rate, a line for each variant."""
    for style, own in _lines(cells):
        axis.plot([cell.rate for cell in own], [cell.sent for cell in own], **style)
    axis.set(
        xlabel="learning rate of fine-tuning", ylabel="bytes across nodes in a step, of M (stock: 3)", xscale="log"
    )
    axis.set_ylim(bottom=0)


def _lines(cells: Sequence[Cell]) -> list[tuple[dict[str, Any], list[Cell]]]:
    """Return how the line of each variant is drawn, and its cells."""
    colors = colors_of(dict.fromkeys(cell.variant for cell in cells))
    return [
        ({"color": color, "marker": "o", "label": shown(name)}, [cell for cell in cells if cell.variant == name])
        for name, color in colors.items()
    ]
