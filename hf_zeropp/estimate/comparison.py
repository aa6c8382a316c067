"""Step time, tokens per second and memory of every method, side by side, and the one to recommend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import yaml

from hf_zeropp.config import PRESETS
from hf_zeropp.estimate.flat_methods import FLAT_METHODS
from hf_zeropp.estimate.job import Job
from hf_zeropp.estimate.methods import Estimate, fsdp2, ours, paper_methods
from hf_zeropp.estimate.step_time import DEEPSPEED, StepTime, method_names, step_time, with_method

EXACTNESS = ("balanced", "exact", "paper", "half_model", "min_traffic", "pcie")
"""Presets in the order of preference among equally fast ones: fewer bits and less known settings come later.

``"exact"`` rounds less than ``"balanced"`` and holds twice the memory."""

MARGIN = 0.03
"""Share of a step that counts as equal: medians of one measured job moved by as much from one run to the next."""

_PAPER_LINES = {"ZeRO-3": "ZeRO-3", "HSDP": "MiCS / HSDP", "hpZ": "hpZ", DEEPSPEED: "hpZ", "DDP": "DDP"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One method of a comparison.

    Attributes:
        method: its name.
        time: the prediction of its step.
        memory: bytes per rank, with gathered units, without activations.
        fits: whether that is within the memory of a GPU.
    """

    method: str
    time: StepTime
    memory: float
    fits: bool


def compare(job: Job, gpu_memory: float, methods: Iterable[str] | None = None) -> list[Row]:
    """Return a row for each method, by default all.

    Args:
        job: the settings of its setup are read for the method ``SETTINGS`` alone.
        gpu_memory: bytes per rank.
        methods: names.
    """
    rows = []
    for method in methods or method_names():
        memory = memory_of(job, method)
        rows.append(Row(method, step_time(job, method), memory, memory <= gpu_memory))
    return rows


def memory_of(job: Job, method: str) -> float:
    """Return the bytes per rank under a method, with the units that are gathered at one time."""
    job = with_method(job, method)
    stock = fsdp2(job.model, job.setup)
    if method == "FSDP2":
        return stock.total + stock.gathered
    if method in FLAT_METHODS or method == DEEPSPEED:
        line = _paper_line(job, _PAPER_LINES[method])
        # The papers' formulas leave gathered units out. Whoever shards weights holds as many as FSDP2.
        return line.total + (0 if method == "DDP" else stock.gathered)
    groups = job.setup.config.ranks_per_node
    setup = dataclasses.replace(job.setup, ranks_per_node=groups) if isinstance(groups, int) else job.setup
    line = ours(job.model, setup)
    return line.total + line.gathered


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the fastest row that fits; None where none does."""
    return min((row for row in rows if row.fits), key=lambda row: row.time.step_s, default=None)


def recommended(rows: Iterable[Row], *, knows_changes: bool = False) -> Row | None:
    """Return the preset to use: the most exact one that fits and is as fast as the fastest, by ``MARGIN``; None for none.

    Args:
        rows: the methods that are compared.
        knows_changes: whether somebody said how many weights change in a step. Without that, ``"exact"`` is not recommended:
            at the learning rates of pretraining it sends more than the others.
    """
    presets = [row for row in rows if row.method in PRESETS and row.fits and (knows_changes or row.method != "exact")]
    best = fastest(presets)
    if best is None:
        return None
    equal = [row for row in presets if row.time.step_s <= best.time.step_s * (1 + MARGIN)]
    return min(equal, key=lambda row: _preference(row.method))


def recommendation(job: Job, rows: list[Row]) -> str:
    """Return the ``zeropp_config:`` block to paste, and a sentence that says why.

    Raises:
        ValueError: no preset fits the memory.
    """
    row = recommended(rows, knows_changes=job.setup.changed_weights is not None)
    if row is None:
        least = min((one for one in rows if one.method in PRESETS), key=lambda one: one.memory)
        raise ValueError(
            f"expected a preset that fits the memory of a GPU, got {least.memory / 1e9:.1f} GB per rank for the smallest "
            f"({least.method}). Use more ranks, --lora, or GPUs with more memory (--gpu-memory)."
        )
    block: dict[str, object] = {"preset": row.method}
    if job.setup.config.frozen_bits is not None:
        block["frozen_bits"] = job.setup.config.frozen_bits
    text = yaml.safe_dump({"zeropp_config": block}, sort_keys=False)
    return f"{text}# {_reason(job, row, rows)}\n"


def _reason(job: Job, row: Row, rows: list[Row]) -> str:
    stock = {one.method: one for one in rows if one.method in ("FSDP2", "HSDP")}
    others = [
        f"{one.time.step_s:.3g} s of {one.method}{'' if one.fits else ', which does not fit'}" for one in stock.values()
    ]
    said = f"{row.method} is predicted to take {row.time.step_s:.3g} s per step, against {' and '.join(others)}"
    rival = fastest(stock.values())
    if job.setup.num_nodes == 1:
        return f"{said}: with one node nothing crosses nodes, and FSDP2's own collectives stay."
    if rival is not None and rival.time.step_s < row.time.step_s * (1 - MARGIN):
        return f"{said}: here {rival.method} without this package is faster (ZEROPP_ENABLED=0 switches it off)."
    share = row.time.network_s / row.time.step_s
    return f"{said}; its bytes keep the network busy for {share:.0%} of the step."


def _preference(method: str) -> int:
    return EXACTNESS.index(method) if method in EXACTNESS else len(EXACTNESS)


def _paper_line(job: Job, name: str) -> Estimate:
    return next(line for line in paper_methods(job.model, job.setup) if line.method == name)
