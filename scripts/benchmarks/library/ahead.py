"""Predict where this package pays: H100s from 16 to 256, on networks of 10 Gbit/s to 3.2 Tbit/s. No row here was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from hf_zeropp.estimate.cluster import GPUS, gpu_cluster
from hf_zeropp.estimate.comparison import MARGIN, STOCK, choices, compare, fastest, recommended
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.training_job import Job, Setup
from library.pages import Grid
from library.plots import log_ticks, panels, pyplot, save

MODELS = ("7B", "70B")
WORLDS = (16, 64, 256)
GBITS = (10, 100, 200, 400, 800, 3200)
ACCUMULATIONS = (1, 8)
RANKS_PER_NODE = 8
TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Ahead:
    """One job on one cluster.

    Attributes:
        model: number of parameters.
        world_size: GPUs.
        micro_steps: per step.
        gbit: of a node's network.
        stock: the fastest of FSDP2 and HSDP that fits, and its seconds; None where none fits.
        own: the settings of this package to compare with it, and their seconds: those that are recommended, or else the fastest
            that fit. None where none fit.
        is_recommended: whether the settings are recommended, and not to leave this package off.
    """

    model: str
    world_size: int
    micro_steps: int
    gbit: int
    stock: tuple[str, float] | None
    own: tuple[str, float] | None
    is_recommended: bool

    @property
    def gain(self) -> float | None:
        """How many times faster the settings are."""
        return None if self.stock is None or self.own is None else self.stock[1] / self.own[1]


def predict_all() -> list[Ahead]:
    """Return all jobs on all clusters."""
    return [
        _ahead(model, world, micro_steps, gbit)
        for model in MODELS
        for micro_steps in ACCUMULATIONS
        for world in WORLDS
        for gbit in GBITS
    ]


def ahead_grids(rows: list[Ahead]) -> Iterator[Grid]:
    """Yield one table for each model and accumulation."""
    for model in MODELS:
        for micro_steps in ACCUMULATIONS:
            title = (
                f"predicted, {model}, {micro_steps} micro-steps: x faster than the best of {', '.join(STOCK)} that fits; off "
                f"where that is as fast, within {MARGIN:.0%}, and the recommendation is to leave this package off"
            )
            grid = Grid(title, ("GPUs", *(_network(gbit) for gbit in GBITS)))
            for world in WORLDS:
                cells = [_cell(_find(rows, model, world, micro_steps, gbit)) for gbit in GBITS]
                grid.rows.append([str(world), *cells])
            yield grid


def plot_ahead(rows: list[Ahead], path: Path) -> None:
    """Draw the gain over the rate of the network, one panel per model and accumulation, one line per number of GPUs."""
    title = (
        f"Predicted, not measured: a step of the recommended settings beside the best of {', '.join(STOCK)} that fits\n"
        f"H100, {RANKS_PER_NODE} on a node, {TOKENS} tokens per GPU and micro-step, activation checkpointing, learning rate 1e-5"
    )
    figure, axes = panels(len(MODELS), title, rows=len(ACCUMULATIONS), sharey=True, height=3)
    cases = [(model, micro_steps) for micro_steps in ACCUMULATIONS for model in MODELS]
    for axis, (model, micro_steps) in zip(axes, cases, strict=True):
        for world in WORLDS:
            gains = [_find(rows, model, world, micro_steps, gbit).gain for gbit in GBITS]
            shown = [(place, gain) for place, gain in enumerate(gains) if gain is not None]
            if shown:
                color = pyplot().cm.viridis(WORLDS.index(world) / len(WORLDS))
                axis.plot(*zip(*shown, strict=True), color=color, marker=".", label=f"{world} GPUs")
        if not axis.lines:
            axis.text(0.5, 0.6, "no rival fits", transform=axis.transAxes, ha="center")
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_title(f"{model}, {micro_steps} micro-step{'s' if micro_steps > 1 else ''} per step", fontsize=9)
        axis.set_xticks(range(len(GBITS)), [_network(gbit) for gbit in GBITS], fontsize=7)
        log_ticks(axis, (0.5, 1, 2, 4, 8, 16, 32))
    for axis in axes[:: len(MODELS)]:
        axis.set_ylabel("times as fast")
    for axis in axes[-len(MODELS) :]:
        axis.set_xlabel("network of a node")
    save(figure, path)


def _ahead(name: str, world_size: int, micro_steps: int, gbit: int) -> Ahead:
    cluster = gpu_cluster(GPUS["h100"], world_size, RANKS_PER_NODE, gbit * 1e9 / 8)
    job = Job(
        ModelShape.of_count(name), Setup(world_size, RANKS_PER_NODE, micro_steps), cluster, TOKENS, checkpointing=True
    )
    rows, own = compare(job, STOCK), choices(job)
    stock, choice = fastest(rows), recommended(rows, own)
    is_recommended = choice is not None and choice.settings is not None
    shown = choice if is_recommended else fastest(own)
    return Ahead(
        name, world_size, micro_steps, gbit,
        None if stock is None else (stock.method, stock.time.step_s),
        None if shown is None else (shown.method, shown.time.step_s),
        is_recommended,
    )  # fmt: skip


def _find(rows: list[Ahead], model: str, world_size: int, micro_steps: int, gbit: int) -> Ahead:
    key = (model, world_size, micro_steps, gbit)
    return next(row for row in rows if (row.model, row.world_size, row.micro_steps, row.gbit) == key)


def _cell(row: Ahead) -> str:
    if row.own is None:
        return "nothing fits" if row.stock is None else f"{row.stock[0]} alone fits"
    if row.stock is None or row.gain is None:
        return f"{row.own[0]} alone fits"
    # Two digits would round a loss up to what the promise allows.
    gain = f"{row.gain:.2f}" if row.gain >= 1 else f"{row.gain:.3f}"
    return f"{'' if row.is_recommended else 'off: '}{gain} ({row.own[0]}; {row.stock[0]})"


def _network(gbit: int) -> str:
    return f"{gbit / 1000:g} Tbit/s" if gbit >= 1000 else f"{gbit} Gbit/s"
