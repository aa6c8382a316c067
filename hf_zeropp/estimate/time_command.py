"""The part of ``hf-zeropp estimate`` that predicts step times: its flags, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_zeropp.config import PRESETS, ZeroPPConfig
from hf_zeropp.estimate import time_report
from hf_zeropp.estimate.cluster import ATTAINABLE_MFU, Cluster, gpu_cluster
from hf_zeropp.estimate.cluster_file import read_cluster
from hf_zeropp.estimate.comparison import Row, compare, recommendation, recommended
from hf_zeropp.estimate.gpus import GPUS, find_gpu
from hf_zeropp.estimate.job import Job
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.rates import parse_rate
from hf_zeropp.estimate.setup import Setup
from hf_zeropp.estimate.step_time import DEEPSPEED, SETTINGS, method_names
from hf_zeropp.estimate.trace import write_trace
from hf_zeropp.sizes import parse_bytes, parse_count

GENERATION_METHODS = ("ZeRO-3", "FSDP2", "HSDP", DEEPSPEED, "balanced")
_TIME_FLAGS = ("recommend", "trace", "generate", "gpu_memory", "within", "active", "checkpointing")


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
        "--batch-tokens", type=int, default=2048, help="The tokens per rank and micro-step. The default is 2048."
    )
    group.add_argument("--checkpointing", action="store_true", help="Recompute activations in the backward pass.")
    group.add_argument(
        "--mfu",
        type=float,
        help=f"The share of the GPU's peak that training attains without communication. The default is {ATTAINABLE_MFU}, an "
        "assumption.",
    )
    group.add_argument("--active", help="The parameters that one token meets, for mixtures of experts, such as 37B.")
    group.add_argument("--gpu-memory", help="The memory of a GPU, such as 80GB. The default is the GPU's own.")
    group.add_argument("--recommend", action="store_true", help="Print the zeropp_config: block to use, and why.")
    group.add_argument(
        "--trace", type=Path, help="Write a timeline of the recommended preset's step for ui.perfetto.dev."
    )
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
    asked = [name for name in _TIME_FLAGS if getattr(args, name)]
    if args.gpu or args.network or asked:
        got = "--gpu" if args.gpu else "--network" if args.network else f"--{asked[0].replace('_', '-')}"
        raise ValueError(f"expected {missing} beside {got}, got none. Say --gpu h100 --network 100gbit, for example.")
    return False


class TimeEstimate:
    """Step times of the job that the command line describes. Everything is checked before anything is printed.

    Args:
        args: the command line.
        model: its units.
        setup: how it is trained.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(self, args: argparse.Namespace, model: ModelShape, setup: Setup) -> None:
        self._args = args
        if setup.tensor_parallel > 1:
            raise ValueError(
                f"expected no --tensor-parallel beside a prediction of times, got {setup.tensor_parallel}: what tensor "
                "parallelism itself sends is not modelled. Leave out --gpu, --network and --cluster to see bytes and memory."
            )
        cluster = _cluster(args, setup)
        self._gpu_memory = _gpu_memory(args.gpu_memory, cluster)
        active = _active_share(args.active, model)
        if args.generate is not None and args.generate < 1:
            raise ValueError(f"expected at least one sequence for --generate, got {args.generate}")
        if args.trace and (not args.trace.parent.is_dir() or args.trace.is_dir()):
            raise ValueError(
                f"expected --trace to name a file in a folder that exists, got {str(args.trace)!r}. Make the folder."
            )
        self.job = Job(model, setup, cluster, args.batch_tokens, args.checkpointing, active)
        self.rows = compare(self.job, self._gpu_memory, _methods(setup))
        self._recommendation = recommendation(self.job, self.rows) if args.recommend else ""

    def to_json(self) -> dict[str, Any]:
        """Return the cluster and the predictions."""
        return time_report.time_json(self.job, self.rows)

    def show(self, console: Console) -> None:
        """Print the table and what else was asked for, and write the trace."""
        console.print(time_report.time_table(self.job, self.rows, self._gpu_memory))
        if self._args.generate:
            job = dataclasses.replace(self.job, tokens=self._args.generate)
            console.print(time_report.generation_table(job, GENERATION_METHODS))
        if self._recommendation:
            # No markup and no wrapping: the block is there to be copied.
            console.print(self._recommendation, markup=False, highlight=False, soft_wrap=True)

    def write_files(self) -> None:
        """Write the plot and the trace."""
        if self._args.plot:
            time_report.plot_times(self.job, self._args.plot)
        if self._args.trace:
            write_trace(self._args.trace, self.job, self._traced())

    def _traced(self) -> str:
        row: Row | None = recommended(self.rows, knows_changes=self.job.setup.changed_weights is not None)
        return row.method if row else "balanced"


def _cluster(args: argparse.Namespace, setup: Setup) -> Cluster:
    if args.cluster:
        return read_cluster(args.cluster).cluster(setup.world_size, setup.ranks_per_node)
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
    try:
        memory = parse_bytes(text)
    except ValueError:
        memory = 0
    if memory <= 0 or math.isinf(memory):
        raise ValueError(f"expected a size with its unit for --gpu-memory, such as 80GB, got {text!r}")
    return memory


def _active_share(text: str | None, model: ModelShape) -> float:
    if text is None:
        return 1.0
    count = parse_count(text)
    if not count or count > model.num_params:
        raise ValueError(
            f"expected a count of at most {model.num_params} parameters for --active, such as 37B, got {text!r}"
        )
    return count / model.num_params


def _methods(setup: Setup) -> tuple[str, ...]:
    """Return the methods to compare, the settings of the job among them where no preset has them."""
    plain = dataclasses.replace(setup.config, frozen_bits=None)
    known = [ZeroPPConfig.resolve({"preset": preset}) for preset in PRESETS]
    return method_names() if plain in known else (*method_names(), SETTINGS)
