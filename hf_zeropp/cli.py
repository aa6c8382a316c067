"""``hf-zeropp launch | env``: start a job with ZeRO++ settings; say what runs on this machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from importlib import metadata
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
    if argv[:1] == ["launch"]:  # every flag after it is Accelerate's or the script's, unparsed
        launch(argv[1:])
        return
    parser.parse_args(argv)
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
    table.add_row("CUDA library", kernels.cuda_library or "none: GPU tensors use the PyTorch reference")
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
