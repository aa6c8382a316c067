"""The command ``hf-zeropp``: launch, tune, show what runs here, estimate a job, measure a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_zeropp import ops
from hf_zeropp.compat import TESTED
from hf_zeropp.config import ZeroPPConfig, is_enabled
from hf_zeropp.estimate import measured_cluster, memory_and_bytes, memory_report, step_time_report
from hf_zeropp.estimate.model_shape import ModelShape
from hf_zeropp.estimate.training_job import ASSUMED_LEARNING_RATE, OPTIMIZER_STATE_BYTES, Setup
from hf_zeropp.ops.frozen_format import FROZEN_BITS
from hf_zeropp.sizes import parse_count

# The modules of integrations are imported by the commands that need them: parts of Transformers take seconds to import,
# and ``env`` must run where they cannot be imported.

PACKAGE = "hf-zeropp"
PACKAGES = (PACKAGE, "torch", "accelerate", "transformers", "peft", "trl", "datasets", "safetensors")


def main(argv: list[str] | None = None) -> None:
    """Run the command line ``argv``, by default that of the process."""
    argv = sys.argv[1:] if argv is None else argv
    # ``launch`` and ``tune`` do not go through the parser. argparse would take the flags of Accelerate and of the script for
    # its own, and would refuse those that it does not know.
    if argv[:1] == ["launch"]:
        from hf_zeropp.integrations.launch.command import launch

        launch(argv[1:])
        return
    if argv[:1] == ["tune"]:
        from hf_zeropp.integrations.tune.command import tune

        tune(argv[1:])
        return
    args = _parser().parse_args(argv)
    commands = {
        "bench-network": measured_cluster.run_network,
        "env": run_env,
        "estimate": run_estimate,
    }
    commands[args.command](args)


def run_env(args: argparse.Namespace) -> None:
    """Print the table of ``hf-zeropp env``.

    Raises:
        SystemExit: the settings are wrong. A script that asks before it starts a job should not start it.
    """
    Console().print(environment_table())
    try:
        ZeroPPConfig.from_env()
        is_enabled()
    except ValueError as error:
        raise SystemExit(f"hf-zeropp env: {error}") from error


def run_estimate(args: argparse.Namespace) -> None:
    """Print a table, or JSON, of what every method holds and sends. It takes no process group and no weights.

    Raises:
        SystemExit: the model is unknown, or the setup does not fit together.
    """
    try:
        wants_times = step_time_report.wants_times(args)
        model = _model_shape(args.model, lora_rank=args.lora, num_adapter_params=args.trainable)
        setup = Setup(
            world_size=args.world,
            ranks_per_node=args.ranks_per_node,
            micro_steps=args.accumulation,
            optimizer=args.optimizer,
            config=_estimate_config(args, model),
            fp32_reduce=args.fp32_reduce,
            tensor_parallel=args.tensor_parallel,
            learning_rate=args.learning_rate,
        ).in_replicas(args.replicas)
        times = step_time_report.TimeEstimate(args, model, setup) if wants_times else None
        estimates = memory_and_bytes.estimate(model, times.setup if times else setup)
    # Every mistake of a user is a ValueError whose message says what to do. A traceback would hide it.
    except ValueError as error:
        raise SystemExit(f"hf-zeropp estimate: {error}") from error
    # JSON goes out by ``print``: rich wraps lines at the width of the terminal and colours them, and a program reads
    # this.
    if args.json:
        answer = memory_report.to_json(estimates, model, setup) | (times.to_json() if times else {})
        print(json.dumps(answer, indent=1))
    elif times:
        times.show(Console())
    else:
        Console().print(memory_report.table(estimates, model, setup))


def environment_table() -> Table:
    """Return a rich table of versions, kernels and settings, with the reason where something is missing."""
    table = Table(title="hf-zeropp env", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("python", platform.python_version())
    for package in PACKAGES:
        tested = f" (tested: {TESTED[package]})" if package in TESTED else ""
        table.add_row(package, f"{_version(package)}{tested}")
    kernels = ops.kernel_info()
    table.add_row("CPU kernels", f"{kernels.cpu} (available: {', '.join(kernels.available)})")
    table.add_row("CPU library", kernels.library or f"none: {kernels.reason}")
    table.add_row("CUDA kernels", "cuda" if kernels.cuda_reason is None else f"{kernels.cuda}: {kernels.cuda_reason}")
    table.add_row("CUDA library", kernels.cuda_library or "none")
    table.add_row("accelerator", _accelerator())
    # This command is what people run when something is wrong. So wrong settings are a row of it, and not its end.
    try:
        table.add_row("ZeRO++", "on" if is_enabled() else "off: ZEROPP_ENABLED=0")
        for name, value in ZeroPPConfig.from_env().to_dict().items():
            table.add_row(name, str(value))
    except ValueError as error:
        table.add_row("settings", Text(str(error), style="red"))
    return table


class _OneLineParser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, as all other mistakes are answered. ``--help`` shows the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="hf-zeropp",
        description="ZeRO++ for Hugging Face models on PyTorch FSDP2. Each command has its own --help.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"{PACKAGE} {_version(PACKAGE)}",
        help="Print the version of this package and exit.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        # This entry is for ``--help`` alone: ``main`` handles the command before the parser runs.
        "launch",
        add_help=False,
        help="Run a script under ZeRO++ by `accelerate launch`, with all its flags and a `zeropp_config:` block in its file.",
    )
    commands.add_parser(
        "tune",  # as above
        add_help=False,
        help="Try your own job under balanced, exact, half_model and min_traffic for a few steps, and say which is fastest.",
    )
    commands.add_parser(
        "env",
        help="Show the versions, the kernels that run here, and the settings in force.",
        description="Show the versions, the kernels that run on this machine, and the settings in force.",
    )
    _add_estimate(
        commands.add_parser(
            "estimate",
            help="Estimate memory per rank and bytes per step, beside other methods, before a job starts.",
            description="Estimate memory, bytes and, on a given cluster, the time of an optimizer step. Nothing is started.",
        )
    )
    network = commands.add_parser("bench-network", help=measured_cluster.HELP, description=measured_cluster.DESCRIPTION)
    measured_cluster.add_network_flags(network)
    return parser


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="The model: a parameter count (7B, 350M), or the hub name or path of a Hugging Face config."
    )
    parser.add_argument("--world", type=_positive, required=True, help="The number of ranks in all.")
    parser.add_argument(
        "--ranks-per-node", type=_positive, default=8, help="The number of ranks per node. The default is 8."
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        choices=OPTIMIZER_STATE_BYTES,
        help="The optimizer. The default is adamw.",
    )
    parser.add_argument(
        "--accumulation",
        type=_positive,
        default=1,
        help="The number of micro-steps per optimizer step. The default is 1.",
    )
    _add_frozen_base(parser)
    parser.add_argument(
        "--zeropp",
        help="A YAML or JSON file with settings. The default is the environment (ZEROPP_CONFIG_FILE among it), then the "
        "defaults.",
    )
    _add_job(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON, in bytes, instead of the table.")
    step_time_report.add_time_flags(parser)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas",
        type=_positive,
        default=1,
        help="The number of replicas of the model (HSDP), each over nodes of its own, to compare with one group of all ranks.",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=_positive,
        default=1,
        metavar="RANKS",
        help="The neighbouring ranks of a node that cut every layer between them. The default is 1.",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        help="The learning rate, on which it depends how many weights change in a step (qwz_mode exact), and which presets keep "
        f"the progress of training. The default is {ASSUMED_LEARNING_RATE}.",
    )
    parser.add_argument("--fp32-reduce", action="store_true", help="Reduce gradients in fp32 instead of bf16.")


def _add_frozen_base(parser: argparse.ArgumentParser) -> None:
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument(
        "--lora",
        type=_positive,
        metavar="RANK",
        help="Freeze the model and train LoRA adapters of this rank on all linear layers of its blocks, such as 16.",
    )
    adapters.add_argument(
        "--trainable",
        type=_count,
        metavar="COUNT",
        help="Freeze the model and train this many parameters beside it (other adapters), such as 20M.",
    )
    parser.add_argument(
        "--frozen-bits",
        type=int,
        choices=(16, *FROZEN_BITS),
        help="The bits in which this package stores frozen weights. The default is frozen_bits of the settings, or 16.",
    )


def _model_shape(source: str, *, lora_rank: int | None, num_adapter_params: int | None) -> ModelShape:
    # A misspelt count is not a name of a model. Asking the hub for it would take half a minute of retries without a network.
    is_count = source[:1].isdigit() and "/" not in source and not Path(source).exists()
    if is_count or parse_count(source) is not None:
        model = ModelShape.of_count(source)
        model = model if lora_rank is None else model.with_lora(lora_rank)
    else:
        from hf_zeropp.integrations.pretrained_shape import pretrained_shape

        model = pretrained_shape(source, lora_rank=lora_rank, freezes=num_adapter_params is not None)
    return model if num_adapter_params is None else model.with_adapters(num_adapter_params)


def _estimate_config(args: argparse.Namespace, model: ModelShape) -> ZeroPPConfig:
    """Return the settings of the file or the environment, with ``--frozen-bits`` over them."""
    config = ZeroPPConfig.resolve(args.zeropp)
    if args.frozen_bits is None:
        return config
    if not model.frozen_units:
        raise ValueError(
            f"--frozen-bits {args.frozen_bits} is for frozen weights, and all weights are trained here. Say what is trained "
            "instead: --lora 16 or --trainable 20M."
        )
    bits = args.frozen_bits if args.frozen_bits in FROZEN_BITS else None
    return dataclasses.replace(config, frozen_bits=bits, pack_embeddings=config.pack_embeddings and bits is not None)


def _count(text: str) -> int:
    count = parse_count(text)
    if not count:
        raise argparse.ArgumentTypeError(f"expected a count such as 20M, got {text!r}")
    return count


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}. Give 1 or more.")
    return int(text)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _accelerator() -> str:
    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return "none (CPU and gloo)"


if __name__ == "__main__":
    main()
