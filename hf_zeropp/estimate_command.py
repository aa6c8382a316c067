"""The command ``hf-zeropp estimate``: its flags, the job that they describe, and what is printed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate import report
from hf_zeropp.estimate.cluster import ATTAINABLE_MFU, GPUS, Cluster, gpu_cluster
from hf_zeropp.estimate.comparison import compare, methods_of, recommendation
from hf_zeropp.estimate.memory_and_bytes import estimate
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.training_job import ASSUMED_LEARNING_RATE, OPTIMIZER_STATE_BYTES, Job, Setup
from hf_zeropp.measured_cluster import read_cluster
from hf_zeropp.ops.frozen_format import FROZEN_BITS
from hf_zeropp.sizes import parse_bytes, parse_count, parse_rate

DEFAULT_TOKENS = 2048
_TIME_FLAGS = (
    "gpu", "network", "cluster", "batch_tokens", "checkpointing", "mfu", "active", "gpu_memory", "recommend"
)  # fmt: skip


def run_estimate(args: argparse.Namespace) -> None:
    """Print a table, or JSON, of what every method holds, sends and takes. It takes no process group and no weights.

    Raises:
        SystemExit: the model is unknown, or the arguments do not fit together.
    """
    try:
        model = _model_shape(args.model, args.lora)
        setup = _setup(args, model)
        job = _job(args, model, setup)
        rows = [] if job is None else compare(job, methods_of(setup))
        advice = recommendation(job, rows) if job is not None and args.recommend else ""
    # Every mistake of a user is a ValueError whose message says what to do. A traceback would hide it.
    except ValueError as error:
        raise SystemExit(f"hf-zeropp estimate: {error}") from error
    # JSON goes out by ``print``: rich wraps lines at the width of the terminal and colours them, and a program reads
    # this.
    if args.json:
        setup = setup if job is None else job.setup
        answer = report.memory_to_json(estimate(model, setup), model, setup)
        answer |= {} if job is None else report.times_to_json(job, rows)
        print(json.dumps(answer | ({"recommendation": advice} if advice else {}), indent=1))
    elif job is None:
        Console().print(report.memory_table(estimate(model, setup), model, setup))
    else:
        Console().print(report.time_table(job, rows))
        # No markup and no wrapping: the block is there to be copied.
        Console().print(advice, markup=False, highlight=False, soft_wrap=True, end="")


# ---- The flags.


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``estimate``."""
    add = parser.add_argument
    add("model", help="The model: a parameter count (7B, 350M), or the hub name or path of a Hugging Face config.")
    add("--world", type=positive, required=True, help="The number of ranks in all.")
    add("--ranks-per-node", type=positive, default=8, help="The number of ranks per node. The default is 8.")
    add("--optimizer", default="adamw", choices=OPTIMIZER_STATE_BYTES, help="The optimizer. The default is adamw.")
    add("--accumulation", type=positive, default=1, help="The number of micro-steps per optimizer step, by default 1.")
    add(
        "--lora",
        type=positive,
        metavar="RANK",
        help="Freeze the model and train LoRA adapters of this rank on all linear layers of its blocks, such as 16.",
    )
    add(
        "--frozen-bits",
        type=int,
        choices=(16, *FROZEN_BITS),
        help="The bits in which this package stores frozen weights. The default is frozen_bits of the settings, or 16.",
    )
    add(
        "--zeropp",
        help="A YAML or JSON file with settings. The default is the environment (ZEROPP_CONFIG_FILE among it), then the "
        "defaults.",
    )
    add(
        "--learning-rate",
        type=float,
        default=ASSUMED_LEARNING_RATE,
        help="The learning rate, on which it depends how many weights change in a step (qwz_mode exact), and which presets keep "
        f"the progress of training. The default is {ASSUMED_LEARNING_RATE}.",
    )
    add("--fp32-reduce", action="store_true", help="Reduce gradients in fp32 instead of bf16.")
    add("--json", action="store_true", help="Print JSON, in bytes, instead of the table.")
    _add_time_flags(parser)


def _add_time_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("step time", "Predicted with --gpu and --network, or with --cluster.").add_argument
    add("--gpu", choices=GPUS, help="The GPU of every rank. For another one, measure: hf-zeropp bench-network.")
    add("--network", type=checked(parse_rate), help="The network of one node in each direction, such as 100gbit.")
    add("--cluster", type=Path, help="A file of hf-zeropp bench-network, in place of --gpu and --network.")
    add("--batch-tokens", type=positive, help=f"The tokens per rank and micro-step. The default is {DEFAULT_TOKENS}.")
    add("--checkpointing", action="store_true", help="Recompute activations in the backward pass.")
    add(
        "--mfu",
        type=float,
        help=f"The share of the GPU's peak that training attains without communication. The default is {ATTAINABLE_MFU}, an "
        "assumption.",
    )
    add(
        "--active",
        help="The parameters that one token meets in a mixture of experts, such as 37B. By default its config says.",
    )
    add("--gpu-memory", type=checked(parse_bytes), help="The memory of a GPU, such as 80GB. By default the GPU's own.")
    add("--recommend", action="store_true", help="Print what to paste, and why.")


def positive(text: str) -> int:
    """Parse an int from 1 on, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}. Give 1 or more.")
    return int(text)


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that parses for argparse, which hides the message of any other error."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


# ---- What they describe.


def _model_shape(source: str, lora_rank: int | None) -> ModelShape:
    # A misspelt count is not a name of a model. Asking the hub for it would take half a minute of retries without a network.
    is_count = source[:1].isdigit() and "/" not in source and not Path(source).exists()
    if is_count or parse_count(source) is not None:
        model = ModelShape.of_count(source)
        return model if lora_rank is None else model.with_lora(lora_rank)
    # Parts of Transformers take seconds to import.
    from hf_zeropp.integrations.pretrained_shape import pretrained_shape

    return pretrained_shape(source, lora_rank=lora_rank)


def _setup(args: argparse.Namespace, model: ModelShape) -> Setup:
    """Return how the model is trained.

    Raises:
        ValueError: the arguments do not fit together.
    """
    return Setup(
        world_size=args.world,
        ranks_per_node=args.ranks_per_node,
        micro_steps=args.accumulation,
        optimizer=args.optimizer,
        config=_config(args, model),
        fp32_reduce=args.fp32_reduce,
        learning_rate=args.learning_rate,
    )


def _config(args: argparse.Namespace, model: ModelShape) -> ZeroPPConfig:
    """Return the settings of the file or the environment, with ``--frozen-bits`` over them."""
    config = ZeroPPConfig.resolve(args.zeropp)
    if args.frozen_bits is None:
        return config
    if not model.frozen_units:
        raise ValueError(
            f"--frozen-bits {args.frozen_bits} is for frozen weights, and all weights are trained here. Say what is trained "
            "instead: --lora 16."
        )
    bits = args.frozen_bits if args.frozen_bits in FROZEN_BITS else None
    return dataclasses.replace(config, frozen_bits=bits, pack_embeddings=config.pack_embeddings and bits is not None)


def _job(args: argparse.Namespace, model: ModelShape, setup: Setup) -> Job | None:
    """Return the job whose step is predicted; None where the arguments ask for no times.

    Raises:
        ValueError: they name no cluster or two, or an argument is wrong.
    """
    given = [name for name in _TIME_FLAGS if getattr(args, name) not in (None, False)]
    if not given:
        return None
    named = {"cluster", "gpu", "network", "mfu"}.intersection(given)
    if named != {"cluster"} and named - {"mfu"} != {"gpu", "network"}:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(
            f"expected --gpu and --network, or --cluster alone, which holds all, got {flags}. Say --gpu h100 --network 100gbit, "
            "for example."
        )
    if args.active is not None:
        model = dataclasses.replace(model, active=_active_share(args.active, model))
    return Job(model, setup, _cluster(args), args.batch_tokens or DEFAULT_TOKENS, args.checkpointing)


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster:
        cluster = read_cluster(args.cluster)
        if cluster.ranks_per_node != args.ranks_per_node:
            raise ValueError(
                f"expected a file measured with {args.ranks_per_node} ranks per node, got one with {cluster.ranks_per_node}: it "
                f"is of another cluster. Say --ranks-per-node {cluster.ranks_per_node}, or run hf-zeropp bench-network here."
            )
        # Other numbers of such nodes are what an estimate is for. What one node sends and receives stays the same.
        cluster = dataclasses.replace(cluster, world_size=args.world)
    else:
        mfu = ATTAINABLE_MFU if args.mfu is None else args.mfu
        cluster = gpu_cluster(GPUS[args.gpu], args.world, args.ranks_per_node, args.network, mfu=mfu)
    if args.gpu_memory is None:
        return cluster
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=args.gpu_memory))


def _active_share(text: str, model: ModelShape) -> float:
    count = parse_count(text)
    if not count or count > model.num_params:
        raise ValueError(
            f"expected a count of at most {model.num_params} parameters for --active, such as 37B, got {text!r}"
        )
    return count / model.num_params
