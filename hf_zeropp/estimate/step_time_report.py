"""The part of ``hf-zeropp estimate`` that predicts step times: its flags, every method side by side, and the preset to use."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from hf_zeropp.config import BLOCK, PRESETS, ZeroPPConfig
from hf_zeropp.estimate.cluster import ATTAINABLE_MFU, GPUS, Cluster, find_gpu, format_rate, gpu_cluster, parse_rate
from hf_zeropp.estimate.measured_cluster import read_cluster
from hf_zeropp.estimate.memory_and_bytes import SYNCED, estimate, ours
from hf_zeropp.estimate.memory_report import COUNT_UNITS, shorten
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.step_time import SETTINGS, StepTime, method_names, resolved, step_time, token_s, with_settings
from hf_zeropp.estimate.training_job import Job, Setup
from hf_zeropp.estimate.unit_work import DEEPSPEED, METHODS
from hf_zeropp.fsdp.weights.low_rates import lowest_rate
from hf_zeropp.sizes import parse_bytes, parse_count

EXACTNESS = ("balanced", "exact", "paper", "half_model", "min_traffic")
"""Presets in the order of preference among equally fast ones: fewer bits and less known settings come later.

``"exact"`` rounds less than ``"balanced"`` and holds twice the memory. ``"pcie"`` is for one node."""

MARGIN = 0.03
"""Share of a step that counts as equal: medians of one measured job moved by as much from one run to the next."""

STOCK = ("FSDP2", SYNCED, "HSDP")
"""The ways of FSDP2 without this package, beside which its settings have to pay."""

CODES_WITHIN_NODE = {"qwz_intra_bits": 8, "qgz_intra_bits": 8}
"""The other choice than the backend's own collectives within a node, for slow links."""

GENERATION_METHODS = ("ZeRO-3", "FSDP2", "HSDP", DEEPSPEED, "balanced")
DEFAULT_TOKENS = 2048
_TIME_FLAGS = (
    "recommend", "generate", "gpu_memory", "within", "active", "checkpointing", "mfu", "batch_tokens"
)  # fmt: skip


def add_time_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of step times to the parser of ``estimate``."""
    group = parser.add_argument_group("step time", "Predicted with --gpu and --network, or with --cluster.")
    group.add_argument("--gpu", help=f"The GPU of every rank: {', '.join(GPUS)}.")
    group.add_argument("--network", help="The network of one node in each direction, such as 100gbit.")
    group.add_argument(
        "--within",
        help="The links of one GPU within its node, both directions together, as vendors state it, such as 600GBps. The default "
        "is the GPU's own.",
    )
    group.add_argument(
        "--cluster", type=Path, help="A file of hf-zeropp bench-network, in place of --gpu and --network."
    )
    group.add_argument(
        "--batch-tokens", type=int, help=f"The tokens per rank and micro-step. The default is {DEFAULT_TOKENS}."
    )
    group.add_argument("--checkpointing", action="store_true", help="Recompute activations in the backward pass.")
    group.add_argument(
        "--mfu",
        type=float,
        help=f"The share of the GPU's peak that training attains without communication. The default is {ATTAINABLE_MFU}, an "
        "assumption.",
    )
    group.add_argument(
        "--active",
        help="The parameters that one token meets in a mixture of experts, such as 37B. By default its config says.",
    )
    group.add_argument("--gpu-memory", help="The memory of a GPU, such as 80GB. The default is the GPU's own.")
    group.add_argument("--recommend", action="store_true", help="Print what to paste, and why.")
    group.add_argument(
        "--generate", type=int, metavar="SEQUENCES", help="Also predict generation, with this many sequences per rank."
    )


def wants_times(args: argparse.Namespace) -> bool:
    """Return whether the arguments ask for step times.

    Raises:
        ValueError: they ask for something of them without naming a cluster, or name two.
    """
    if args.cluster and (args.gpu or args.network or args.within or args.mfu):
        raise ValueError(
            "expected --cluster alone, got --gpu, --network, --within or --mfu beside it: the file holds all. Drop one."
        )
    if args.cluster or (args.gpu and args.network):
        return True
    missing = "--network" if args.gpu else "--gpu" if args.network else "--gpu and --network, or --cluster"
    if asked := [f"--{name.replace('_', '-')}" for name in ("gpu", "network", *_TIME_FLAGS) if getattr(args, name)]:
        raise ValueError(
            f"expected {missing} beside {asked[0]}, got none. Say --gpu h100 --network 100gbit, for example."
        )
    return False


class TimeEstimate:
    """Step times of the job that the command line describes. Everything is checked before anything is printed.

    Attributes:
        setup: how the model is trained, on what the cluster computes.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(self, args: argparse.Namespace, model: ModelShape, setup: Setup) -> None:
        if setup.tensor_parallel > 1:
            raise ValueError(
                f"expected no --tensor-parallel beside a prediction of times, got {setup.tensor_parallel}: what tensor "
                "parallelism itself sends is not modelled. Leave out --gpu, --network and --cluster to see bytes and memory."
            )
        cluster = _cluster(args, setup)
        self._gpu_memory = _gpu_memory(args.gpu_memory, cluster)
        if args.active is not None:
            model = dataclasses.replace(model, active=_active_share(args.active, model))
        if args.generate is not None and args.generate < 1:
            raise ValueError(f"expected at least one sequence for --generate, got {args.generate}")
        self._num_sequences = args.generate
        tokens = DEFAULT_TOKENS if args.batch_tokens is None else args.batch_tokens
        self._job = Job(model, setup, cluster, tokens, args.checkpointing)
        self._rows = compare(self._job, self._gpu_memory, _methods(self._job.setup))
        self.setup = self._job.setup
        self._recommendation = ""
        if args.recommend:
            hsdp, own = choices_with_replicas(self._job, self._gpu_memory)
            rows = [row for row in self._rows if row.method != "HSDP"] + hsdp
            self._recommendation = recommendation(self._job, rows, own)

    def to_json(self) -> dict[str, Any]:
        """Return the cluster, the predictions, and what else was asked for."""
        times = [
            {
                "method": row.name,
                "step_s": row.time.step_s,
                "tokens_per_s": row.time.tokens_per_s(self._job),
                "mfu": row.time.mfu(self._job),
                "exposed": row.time.exposed,
                "memory": row.memory,
                "fits": row.fits,
            }
            for row in self._rows
        ]
        cluster = dataclasses.asdict(self._job.cluster)
        answer = {"simulated": True, "cluster": cluster, "tokens": self._job.tokens, "times": times}
        if self._num_sequences:
            answer["generation"] = dict(generation_rates(self._job, self._num_sequences))
        return answer | ({"recommendation": self._recommendation} if self._recommendation else {})

    def show(self, console: Console) -> None:
        """Print the table, and what else was asked for."""
        console.print(time_table(self._job, self._rows, self._gpu_memory))
        if self._num_sequences:
            console.print(generation_table(self._job, self._num_sequences))
        if self._recommendation:
            # No markup and no wrapping: the block is there to be copied.
            console.print(self._recommendation, markup=False, highlight=False, soft_wrap=True)


# ---- What the arguments mean.


def _cluster(args: argparse.Namespace, setup: Setup) -> Cluster:
    setup = setup.in_replicas(1)
    if args.cluster:
        measured = read_cluster(args.cluster)
        if measured.ranks_per_node != setup.ranks_per_node:
            raise ValueError(
                f"expected a file measured with {setup.ranks_per_node} ranks per node, got one with {measured.ranks_per_node} "
                f"({measured.world_size} ranks in all): it is of another cluster. Say --ranks-per-node "
                f"{measured.ranks_per_node}, or measure this cluster with hf-zeropp bench-network."
            )
        # Other numbers of such nodes are what an estimate is for. What one node sends and receives stays the same.
        return dataclasses.replace(measured, world_size=setup.world_size)
    return gpu_cluster(
        find_gpu(args.gpu),
        setup.world_size,
        setup.ranks_per_node,
        parse_rate(args.network),
        within_rate=parse_rate(args.within) if args.within else None,
        mfu=ATTAINABLE_MFU if args.mfu is None else args.mfu,
    )


def _gpu_memory(text: str | None, cluster: Cluster) -> float:
    if text is None:
        return cluster.device.memory
    with contextlib.suppress(ValueError):
        if (memory := parse_bytes(text)) > 0:
            return memory
    raise ValueError(f"expected a size with its unit for --gpu-memory, such as 80GB, got {text!r}")


def _active_share(text: str, model: ModelShape) -> float:
    count = parse_count(text)
    if not count or count > model.num_params:
        raise ValueError(
            f"expected a count of at most {model.num_params} parameters for --active, such as 37B, got {text!r}"
        )
    return count / model.num_params


def _methods(setup: Setup) -> tuple[str, ...]:
    """Return the methods to compare, the settings of the job among them where no preset has them."""
    names = tuple(name for name in method_names() if setup.micro_steps > 1 or name != SYNCED)
    plain = dataclasses.replace(setup.config, frozen_bits=None, pack_embeddings=False)
    known = [ZeroPPConfig.preset(preset) for preset in PRESETS]
    return names if plain in known else (*names, SETTINGS)


# ---- Every method, and what to use.


@dataclasses.dataclass(frozen=True)
class Row:
    """One method of a comparison, or one choice of this package's settings.

    Attributes:
        method: its name.
        time: the prediction of its step.
        memory: bytes per rank, with gathered units, without activations.
        fits: whether that is within the memory of a GPU.
        settings: of a choice: a preset, and what to set beside it. None for methods.
        replicas: of the model. With 1, HSDP has one on each node.
    """

    method: str
    time: StepTime
    memory: float
    fits: bool
    settings: dict[str, Any] | None = None
    replicas: int = 1

    @property
    def name(self) -> str:
        """The method, with the number of replicas."""
        return f"{self.method}, {self.replicas} replicas" if self.replicas > 1 else self.method


def compare(job: Job, gpu_memory: float, methods: Sequence[str]) -> list[Row]:
    """Return a row for each method on GPUs of so many bytes. Settings count for ``SETTINGS`` alone."""
    rows = [_row(job if method == "HSDP" else job.in_replicas(1), method, gpu_memory) for method in methods]
    if job.setup.replicas > 1:
        rows += [_row(job, method, gpu_memory) for method in methods if method not in METHODS]
    return rows


def _row(job: Job, method: str, gpu_memory: float) -> Row:
    memory = memory_of(job, method)
    return Row(method, step_time(job, method), memory, memory <= gpu_memory, replicas=job.setup.replicas)


def choices_with_replicas(job: Job, gpu_memory: float) -> tuple[list[Row], list[Row]]:
    """Return rows of HSDP and of ``choices`` for each number of replicas that have several nodes.

    Fewer replicas come first: they take less memory.
    """
    jobs = [job.in_replicas(replicas) for replicas in job.setup.numbers_of_replicas]
    return [_row(one, "HSDP", gpu_memory) for one in jobs], [row for one in jobs for row in choices(one, gpu_memory)]


def choices(job: Job, gpu_memory: float) -> list[Row]:
    """Return a row for each choice of settings: presets, with and without codes within a node and gradients on the rank."""
    setup = job.setup
    presets = [preset for preset in EXACTNESS if setup.rate >= lowest_rate(ZeroPPConfig.preset(preset))]
    rows = []
    # Within one node only ``pcie`` sends anything else than FSDP2 does.
    for preset in presets if setup.num_nodes > 1 else ("pcie",):
        # On CPU codes within a node are the default. Some presets name their bits.
        has_bits = setup.on_cpu or "qgz_intra_bits" in PRESETS[preset]
        for hops in ({},) if has_bits else ({}, CODES_WITHIN_NODE):
            for sums in ({}, {"qgz_accumulate": "rank"}) if setup.micro_steps > 1 else ({},):
                settings = {"preset": preset, **hops, **sums}
                row = _row(with_settings(job, settings), SETTINGS, gpu_memory)
                rows.append(dataclasses.replace(row, method=_name(settings), settings=settings))
    return rows


def memory_of(job: Job, method: str) -> float:
    """Return the bytes per rank under a method, with the units that are gathered at one time."""
    job, other = resolved(job, method)
    setup = job.setup
    if other is not None:
        lines = {line.method: line for line in estimate(job.model, setup)}
        line = lines.get({DEEPSPEED: "hpZ"}.get(method, method), lines["FSDP2"])  # synced with one micro-step: FSDP2
        # The papers' formulas leave gathered units out. Every method that shards weights holds as many as FSDP2.
        return line.total + (0 if method == "DDP" else line.gathered or lines["FSDP2"].gathered)
    if isinstance(setup.config.ranks_per_node, int):
        setup = dataclasses.replace(setup, ranks_per_node=setup.config.ranks_per_node)
    line = ours(job.model, setup)
    return line.total + line.gathered


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


def recommendation(job: Job, rows: list[Row], own: list[Row]) -> str:
    """Return what to paste, and a sentence that says why.

    Raises:
        ValueError: neither this package nor FSDP2 fits the memory.
    """
    row = recommended(rows, own)
    if row is None:
        least = min(own, key=lambda one: one.memory)
        raise ValueError(
            f"expected settings that fit the memory of a GPU, got {least.memory / 1e9:.1f} GB per rank for the smallest "
            f"({least.name}). Use more ranks, --lora, or GPUs with more memory (--gpu-memory)."
        )
    if row.settings is None:
        text = _off(row, job.setup)
    else:
        block = dict(row.settings)
        block |= {name: value for name, value in job.setup.config.of_frozen.items() if value}
        text = yaml.safe_dump({BLOCK: block}, sort_keys=False)
        text += _replicated(job.setup, row.replicas) if row.replicas > 1 else ""
    assumed = f"# A learning rate of {job.setup.rate:g} is assumed. Say yours: --learning-rate 1e-6, for example.\n"
    return f"{text}# {_reason(job, row, rows, own)}\n{assumed if job.setup.learning_rate is None else ''}"


def _off(row: Row, setup: Setup) -> str:
    """Return what switches this package off, and makes FSDP2 run in the way of a row."""
    text = "export ZEROPP_ENABLED=0  # leave it off\n"
    if row.method == "HSDP":
        text += _replicated(setup, setup.in_replicas(row.replicas).of_hsdp.replicas)
    if row.method == SYNCED:
        text += "# In the arguments of the Trainer:\n"
        text += yaml.safe_dump({"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}})
    return text


def _replicated(setup: Setup, replicas: int) -> str:
    """Return what makes Accelerate replicate the model."""
    sizes = {"dp_replicate_size": replicas, "dp_shard_size": setup.in_replicas(replicas).world_size}
    block = {"parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}
    return f"# In the file of accelerate launch:\n{yaml.safe_dump(block, sort_keys=False)}"


def _reason(job: Job, row: Row, rows: list[Row], own: list[Row]) -> str:
    ours = row if row.settings is not None else fastest(own) or min(own, key=lambda one: one.time.step_s)
    # Of HSDP, and of this package without replicas or with some, the best is told.
    stock = [[one for one in rows if one.method == name] for name in STOCK]
    others = [*stock, [one for one in own if (one.replicas > 1) != (ours.replicas > 1)]]
    told = [_told(fastest(ones) or min(ones, key=lambda one: one.time.step_s)) for ones in others if ones]
    said = f"{ours.name} is predicted to take {ours.time.step_s:.3g} s per step, against {' and '.join(told)}"
    if job.setup.num_nodes == 1:
        return f"{said}: with one node nothing crosses nodes."
    if row.settings is None:
        return f"{said}: {row.name} without this package is as fast, within {MARGIN:.0%}, or faster."
    return f"{said}; its bytes keep the network busy for {row.time.network_s / row.time.step_s:.0%} of the step."


def _told(row: Row) -> str:
    return f"{row.time.step_s:.3g} s of {row.name}{'' if row.fits else ', which does not fit'}"


def _name(settings: dict[str, Any]) -> str:
    beside = ", ".join(f"{name}: {value}" for name, value in settings.items() if name != "preset")
    return f"{settings['preset']} ({beside})" if beside else settings["preset"]


# ---- Tables.


def time_table(job: Job, rows: Sequence[Row], gpu_memory: float) -> Table:
    """Return a rich table with one row per method. It fits 80 columns."""
    cluster, device = job.cluster, job.cluster.device
    title = (
        f"{job.model.name}: {cluster.num_nodes} nodes x {cluster.ranks_per_node} {device.name}\n"
        f"{format_rate(cluster.network.rate)} attainable per node, {cluster.within.rate / 1e9:.3g} GB/s within, "
        f"{job.tokens} tokens x {job.setup.micro_steps}"
    )
    share = f" ({device.flops / device.peak_flops:.0%} of the peak)" if device.flops != device.peak_flops else ""
    limit = "its memory is unknown" if math.isinf(gpu_memory) else f"it fits if at most {gpu_memory / 1e9:.3g} GB"
    caption = (
        f"Simulated, not measured. Attainable: {device.flops / 1e12:.3g} TFLOP/s{share}.\n"
        "Exposed: the share of a step in which a rank does not compute.\n"
        f"GB/rank is without activations; {limit}."
    )
    result = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    result.add_column("predicted", no_wrap=True)
    for name in ("step s", "tokens/s", "MFU", "exposed", "GB/rank", "fits"):
        result.add_column(name, justify="right", no_wrap=True)
    best = fastest(rows)
    for row in rows:
        time = row.time
        cells = (
            f"{time.step_s:.4g}",
            shorten(time.tokens_per_s(job), COUNT_UNITS),
            f"{time.mfu(job):.1%}",
            f"{time.exposed:.0%}",
            f"{row.memory / 1e9:.3g}",
            "yes" if row.fits else "no",
        )
        result.add_row(row.name, *cells, style="bold" if row is best else None)
    return result


def generation_rates(job: Job, num_sequences: int) -> list[tuple[str, float]]:
    """Return methods, and the tokens per second that all ranks generate with so many sequences each."""
    job = dataclasses.replace(job, tokens=num_sequences)
    return [(method, num_sequences * job.cluster.world_size / token_s(job, method)) for method in GENERATION_METHODS]


def generation_table(job: Job, num_sequences: int) -> Table:
    """Return a rich table of generated tokens per second under each method."""
    title = f"Generation: {num_sequences} sequences per rank, weights that have crossed nodes before"
    result = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    result.add_column("predicted", no_wrap=True)
    result.add_column("tokens/s, all ranks", justify="right")
    for method, tokens_per_s in generation_rates(job, num_sequences):
        result.add_row(method, shorten(tokens_per_s, COUNT_UNITS))
    return result
