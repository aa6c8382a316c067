"""Every method side by side, and what to use: the settings of this package that pay, or none of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from hf_zeropp.config import BLOCK, PRESETS, ZeroPPConfig
from hf_zeropp.estimate.exchanges import HALF_BYTES
from hf_zeropp.estimate.memory_and_bytes import FSDP2, IN_NODE, KEPT, SYNCED, estimate, ours
from hf_zeropp.estimate.step_time import StepTime, step_time
from hf_zeropp.estimate.training_job import Job, Setup
from hf_zeropp.estimate.unit_work import COALESCED, DEEPSPEED, METHODS, Method
from hf_zeropp.fsdp.weights.low_rates import lowest_rate

SETTINGS = "these settings"
"""The method of ``Job.setup.config``, where it is none of the presets."""

EXACTNESS = ("balanced", "exact", "paper", "half_model", "min_traffic")
"""Presets in the order of preference among equally fast ones: fewer bits and less known settings come later.

``"exact"`` rounds less than ``"balanced"`` and holds twice the memory. ``"pcie"`` is for one node."""

MARGIN = 0.03
"""Share of a step that counts as equal: medians of one measured job moved by as much from one run to the next."""

STOCK = (FSDP2, SYNCED, KEPT, IN_NODE, "HSDP")
"""The ways of FSDP2 without this package, beside which its settings have to pay."""

CODES_WITHIN_NODE = {"qwz_intra_bits": 8, "qgz_intra_bits": 8}
"""The other choice than the backend's own collectives within a node, for slow links."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One method of a comparison, or one choice of this package's settings.

    Attributes:
        method: its name.
        time: the prediction of its step.
        memory: bytes per rank, with gathered units, without activations.
        fits: whether that is within the memory of a GPU.
        settings: of a choice: a preset, and what to set beside it. None for methods.
    """

    method: str
    time: StepTime
    memory: float
    fits: bool
    settings: dict[str, Any] | None = None


def methods_of(setup: Setup) -> list[str]:
    """Return the methods to compare, the settings of the job among them where no preset has them."""
    names = [name for name in (*METHODS, *PRESETS) if setup.micro_steps > 1 or name not in (SYNCED, COALESCED)]
    plain = dataclasses.replace(setup.config, frozen_bits=None, pack_embeddings=False)
    return names if plain in map(ZeroPPConfig.preset, PRESETS) else [*names, SETTINGS]


def compare(job: Job, methods: Iterable[str]) -> list[Row]:
    """Return a row for each method. Settings of the job count for ``SETTINGS`` alone."""
    rows = []
    for method in methods:
        memory = memory_of(job, method)
        rows.append(Row(method, step_time(*resolved(job, method)), memory, memory <= job.cluster.device.memory))
    return rows


def resolved(job: Job, name: str) -> tuple[Job, Method | None]:
    """Return the job with the settings that a method names, and the method where it is one beside this package, else None."""
    if name in PRESETS:
        return with_settings(job, {"preset": name}), None
    return job, None if name == SETTINGS else METHODS[name]


def with_settings(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return the job under other settings. How the frozen base is stored stays as it is."""
    config = ZeroPPConfig.from_dict({**settings, **job.setup.config.of_frozen})
    return dataclasses.replace(job, setup=dataclasses.replace(job.setup, config=config))


def choices(job: Job) -> list[Row]:
    """Return a row for each choice: presets, with and without codes within a node, and gradients, or weights too, on the rank."""
    setup = job.setup
    presets = [preset for preset in EXACTNESS if setup.learning_rate >= lowest_rate(ZeroPPConfig.preset(preset))]
    on_rank = ("rank", "whole") if setup.micro_steps > 1 else ("whole",)
    places: list[dict[str, str]] = [{}, *({"qgz_accumulate": where} for where in on_rank)]
    rows = []
    # Within one node only ``pcie`` sends anything else than FSDP2 does.
    for preset in presets if setup.num_nodes > 1 else ("pcie",):
        # On CPU codes within a node are the default. Some presets name their bits.
        has_bits = setup.on_cpu or "qgz_intra_bits" in PRESETS[preset]
        for hops in ({},) if has_bits else ({}, CODES_WITHIN_NODE):
            rows += [_choice(job, {"preset": preset, **hops, **place}) for place in places]
    return rows


def _choice(job: Job, settings: dict[str, Any]) -> Row:
    (row,) = compare(with_settings(job, settings), [SETTINGS])
    beside = ", ".join(f"{name}: {value}" for name, value in settings.items() if name != "preset")
    name = f"{settings['preset']} ({beside})" if beside else settings["preset"]
    return dataclasses.replace(row, method=name, settings=settings)


def memory_of(job: Job, method: str) -> float:
    """Return the bytes per rank under a method, with the units that are gathered at one time."""
    job, stock = resolved(job, method)
    if stock is None:
        line = ours(job.model, job.setup)
        return line.total + line.gathered
    lines = {line.method: line for line in estimate(job.model, job.setup)}
    # FSDP2 synced, with one micro-step, is FSDP2.
    line = lines.get("hpZ" if method in (DEEPSPEED, COALESCED) else method, lines[FSDP2])
    # Gradients that are reduced once per step are kept in full until then.
    full_gradients = HALF_BYTES * job.model.num_trainable if method == COALESCED else 0
    # The papers' formulas leave gathered units out. Every method that shards weights holds as many as FSDP2.
    gathered = 0 if method == "DDP" else line.gathered or lines[FSDP2].gathered
    return line.total + full_gradients + gathered


# ---- What to use.


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the fastest row that fits; None where none does."""
    return min((row for row in rows if row.fits), key=lambda row: row.time.step_s, default=None)


def recommended(rows: Iterable[Row], own: Iterable[Row]) -> Row | None:
    """Return what to use; None where nothing fits.

    That is FSDP2 without this package, in one of the ways of ``STOCK``, unless a choice of settings is faster by ``MARGIN``. Of
    the choices that are as fast as the fastest, by the same margin, it is the first.

    Args:
        rows: methods, those of ``STOCK`` among them.
        own: choices of settings, in the order of preference.
    """
    own = [row for row in own if row.fits]
    rival, best = fastest(row for row in rows if row.method in STOCK), fastest(own)
    if best is None or (rival is not None and best.time.step_s > rival.time.step_s * (1 - MARGIN)):
        return rival
    limit = best.time.step_s * (1 + MARGIN)
    return next(row for row in own if row.time.step_s <= min(limit, rival.time.step_s if rival else math.inf))


def recommendation(job: Job, rows: Sequence[Row]) -> str:
    """Return what to paste, and a sentence that says why.

    Raises:
        ValueError: neither this package nor FSDP2 fits the memory.
    """
    own = choices(job)
    row = recommended(rows, own)
    if row is None:
        least = min(own, key=lambda one: one.memory)
        raise ValueError(
            f"expected settings that fit the memory of a GPU, got {least.memory / 1e9:.1f} GB per rank for the smallest "
            f"({least.method}). Use more ranks, --lora, or GPUs with more memory (--gpu-memory)."
        )
    if row.settings is None:
        text = _off(row, job.setup)
    else:
        frozen = {name: value for name, value in job.setup.config.of_frozen.items() if value}
        text = yaml.safe_dump({BLOCK: row.settings | frozen}, sort_keys=False)
    return f"{text}# {_reason(job, row, rows, own)}\n# Learning rate: {job.setup.learning_rate:g} (--learning-rate).\n"


def _off(row: Row, setup: Setup) -> str:
    """Return what switches this package off, and makes FSDP2 run in the way of a row."""
    text = "export ZEROPP_ENABLED=0  # leave it off\n"
    if row.method == "HSDP":
        sizes = {"dp_replicate_size": setup.num_nodes, "dp_shard_size": setup.ranks_per_node}
        block = {"parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}
        text += f"# In the file of accelerate launch:\n{yaml.safe_dump(block, sort_keys=False)}"
    if row.method == SYNCED:
        arguments = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
        text += f"# In the arguments of the Trainer:\n{yaml.safe_dump(arguments)}"
    if row.method == KEPT:
        text += (
            "# In a loop of your own: model.set_reshard_after_forward(False) once, and before each micro-step\n"
            "# model.set_reshard_after_backward(is_last) and model.set_requires_gradient_sync(is_last).\n"
        )
    if row.method == IN_NODE:
        text += f"# fully_shard(module, reshard_after_forward={setup.ranks_per_node}) for each module.\n"
    return text


def _reason(job: Job, row: Row, rows: Sequence[Row], own: Sequence[Row]) -> str:
    ours = row if row.settings is not None else fastest(own) or min(own, key=lambda one: one.time.step_s)
    rival = fastest(one for one in rows if one.method in STOCK)
    told = [
        f"{one.time.step_s:.3g} s of {one.method}{'' if one.fits else ', which does not fit'}"
        for one in rows
        if one is rival or one.method == FSDP2
    ]
    said = f"{ours.method} is predicted to take {ours.time.step_s:.3g} s per step, against {' and '.join(told)}"
    if job.setup.num_nodes == 1:
        return f"{said}: with one node nothing crosses nodes."
    if row.settings is None:
        return f"{said}: {row.method} without this package is as fast, within {MARGIN:.0%}, or faster."
    return f"{said}; its bytes keep the network busy for {row.time.network_s / row.time.step_s:.0%} of the step."
