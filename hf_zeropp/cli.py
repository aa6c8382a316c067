"""The command ``hf-zeropp``: launch, tune, show what runs here, estimate a job, measure a cluster."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_zeropp import estimate_command, measured_cluster, ops
from hf_zeropp.compat import TESTED
from hf_zeropp.config import ZeroPPConfig, is_enabled

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
        "estimate": estimate_command.run_estimate,
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
        help="Run your own job under balanced, exact, half_model and min_traffic, and say which is fastest.",
    )
    commands.add_parser(
        "env",
        help="Show the versions, the kernels that run here, and the settings in force.",
        description="Show the versions, the kernels that run on this machine, and the settings in force.",
    )
    estimate_command.add_flags(
        commands.add_parser(
            "estimate",
            help="Estimate memory per rank and bytes per step, beside other methods, before a job starts.",
            description="Estimate memory, bytes and, on a given cluster, the time of an optimizer step. Nothing is started.",
        )
    )
    _add_network(
        commands.add_parser(
            "bench-network",
            help="Measure the network, the links within nodes and the computation, for estimate --cluster.",
            description=f"Measure this cluster under the launcher of your job, for estimate --cluster: {measured_cluster.RUN}",
        )
    )
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="The YAML file to write, for estimate --cluster.")
    parser.add_argument(
        "--ranks-per-node",
        type=estimate_command.positive,
        help="The number of ranks per node, also to emulate nodes on one machine. The default is what the launcher exports.",
    )


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
