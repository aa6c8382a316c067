"""``hf-zeropp launch | env | estimate | export``: start a job; say what runs on this machine; say what a job will take;
write a merged model."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from hf_zeropp.config import ENV_CONFIG_FILE, ZeroPPConfig

PACKAGES = ("hf-zeropp", "torch", "accelerate", "transformers", "peft", "trl", "datasets", "safetensors")


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="hf-zeropp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "launch",
        add_help=False,
        help="`accelerate launch` (all its flags) for a config file with a `zeropp_config:` block",
    )
    commands.add_parser("env", help="versions, the kernels that run here, and the settings in force")
    _add_estimate(commands.add_parser("estimate", help="memory per rank and bytes per step, beside other methods"))
    _add_export(commands.add_parser("export", help="merge an adapter into its base and write 16-bit safetensors"))
    if argv[:1] == ["launch"]:  # every flag after it is Accelerate's or the script's, unparsed
        launch(argv[1:])
        return
    args = parser.parse_args(argv)
    if args.command == "estimate":
        run_estimate(args)
    elif args.command == "export":
        run_export(args)
    else:
        Console().print(environment_table())


def launch(flags: list[str]) -> None:
    """Take ``zeropp_config:`` out of the Accelerate config, export it, and delegate every flag.

    Accelerate rejects unknown top-level keys and exports only its own, so the block travels as a file that
    ``ZEROPP_CONFIG_FILE`` names. N CPU processes under FSDP also need ACCELERATE_USE_CPU, which Accelerate's launcher
    sets for plain CPU jobs only.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    with tempfile.TemporaryDirectory(prefix="hf-zeropp-") as folder:
        parser = launch_command_parser()
        args = parser.parse_args(flags)
        if args.config_file is not None:
            settings = _read_launch_config(args.config_file)
            _export_zeropp(settings.pop("zeropp_config", None), folder)
            _export_cpu(settings)
            args = parser.parse_args(_with_config_file(flags, _write_yaml(settings, folder, "accelerate.yaml")))
        ZeroPPConfig.from_env()  # a mistake shows here, once, not on every rank
        launch_command(args)


def run_export(args: argparse.Namespace) -> None:
    import torch

    from hf_zeropp.integrations.export import export

    try:
        folder = export(
            args.output,
            args.model,
            args.adapter,
            dtype=getattr(torch, args.dtype),
            max_shard_size=args.max_shard_size,
        )
    except ValueError as error:
        raise SystemExit(f"hf-zeropp export: {error}") from error
    Console().print(f"Wrote {folder}", soft_wrap=True)


def run_estimate(args: argparse.Namespace) -> None:
    """A table, or JSON, of what every method holds and sends. No process group, no weights."""
    from hf_zeropp.estimate import methods as estimate

    try:
        model = estimate.ModelShape.of(args.model, args.trainable)
        setup = estimate.Setup(
            world_size=args.world,
            ranks_per_node=args.ranks_per_node,
            micro_steps=args.accumulation,
            optimizer=args.optimizer,
            config=ZeroPPConfig.resolve(args.zeropp),
            fp32_reduce=args.fp32_reduce,
        )
        estimates = estimate.estimate(model, setup)
    except ValueError as error:
        raise SystemExit(f"hf-zeropp estimate: {error}") from error
    if args.json:
        print(json.dumps(estimate.to_json(estimates, model, setup), indent=1))
    else:
        Console().print(estimate.table(estimates, model, setup))
    if args.plot:
        estimate.plot(estimates, args.plot)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="the base, 16-bit or packed; default: what the adapter's config names")
    parser.add_argument("--adapter", help="a PEFT adapter folder; without it, a packed base is only decoded")
    parser.add_argument("--output", required=True, help="a folder that is empty or does not exist")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--max-shard-size", default="2GB", help="bytes of a safetensors file, such as 5GB")


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    from hf_zeropp.estimate.methods import OPTIMIZER_STATE_BYTES

    parser.add_argument("model", help="a parameter count (7B, 350M), or a hub name or path of a Hugging Face config")
    parser.add_argument("--world", type=int, required=True, help="ranks in all")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZER_STATE_BYTES)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps per optimizer step")
    parser.add_argument(
        "--trainable", type=_count, help="train this many parameters beside the frozen model (LoRA): 20M"
    )
    parser.add_argument("--zeropp", help="YAML or JSON file with settings; default: the environment, else the defaults")
    parser.add_argument("--fp32-reduce", action="store_true", help="gradients are reduced in fp32 instead of bf16")
    parser.add_argument("--json", action="store_true", help="bytes, instead of the table")
    parser.add_argument("--plot", type=Path, help="also write a plot (needs matplotlib)")


def _count(text: str) -> int:
    from hf_zeropp.sizes import parse_count

    count = parse_count(text)
    if count is None:
        raise argparse.ArgumentTypeError(f"expected a count such as 20M, got {text!r}")
    return count


def environment_table() -> Table:
    """Versions, kernels and settings, with the reason where something is missing."""
    from hf_zeropp import ops

    table = Table(title="hf-zeropp env", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("python", platform.python_version())
    for package in PACKAGES:
        table.add_row(package, _version(package))
    kernels = ops.kernel_info()
    table.add_row("CPU kernels", f"{kernels.cpu} (available: {', '.join(kernels.available)})")
    table.add_row("CPU library", kernels.library or f"none: {kernels.reason}")
    table.add_row("CUDA kernels", "cuda" if kernels.cuda_reason is None else f"reference: {kernels.cuda_reason}")
    table.add_row("CUDA library", kernels.cuda_library or "none")
    table.add_row("accelerator", _accelerator())
    try:
        config = ZeroPPConfig.from_env()
        for name, value in config.to_dict().items():
            table.add_row(name, str(value))
    except ValueError as error:
        table.add_row("settings", f"[red]{error}[/red]")
    return table


def _read_launch_config(path: str) -> dict[str, Any]:
    try:
        with open(path) as file:
            settings = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"hf-zeropp launch: cannot read the config file {path!r}: {error}") from error
    if not isinstance(settings, dict):
        raise SystemExit(f"hf-zeropp launch: {path!r} must hold an Accelerate config (`key: value` lines).")
    return settings


def _export_zeropp(block: Any, folder: str) -> None:
    if block is None:
        return
    if os.environ.get(ENV_CONFIG_FILE):
        raise SystemExit(
            f"hf-zeropp launch: both {ENV_CONFIG_FILE} and a zeropp_config: block are given. Drop one of them."
        )
    os.environ[ENV_CONFIG_FILE] = block if isinstance(block, str) else _write_yaml(block, folder, "zeropp.yaml")


def _export_cpu(settings: dict[str, Any]) -> None:
    if settings.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _write_yaml(settings: Any, folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        yaml.safe_dump(settings, file)
    return path


def _with_config_file(flags: list[str], path: str) -> list[str]:
    """The flags with the value of --config_file (either spelling, either form) replaced."""
    names = ("--config_file", "--config-file")
    flags = list(flags)
    for i, flag in enumerate(flags):
        if flag in names:
            flags[i + 1] = path
            return flags
        if flag.startswith(tuple(f"{name}=" for name in names)):
            flags[i] = f"{names[0]}={path}"
            return flags
    raise AssertionError("launch() calls this only when --config_file was parsed")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _accelerator() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return "none (CPU and gloo)"


if __name__ == "__main__":
    main()
