"""``hf-zeropp launch``: Accelerate's launcher, with settings in its config file, for scripts that need not know this package.

``accelerate launch`` rejects top-level keys that it does not know, and exports only its own. So the ``zeropp_config:`` block
is taken out of the file here and travels as a file of its own, which the variable ``ZEROPP_CONFIG_FILE`` names and every
rank reads. Wrong settings, and mistakes that nobody would tell of later (``checks.py``), end the command with one line before
anything starts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command, launch_command_parser

from hf_zeropp.config import BLOCK, ENV_CONFIG_FILE, ZeroPPConfig, is_enabled
from hf_zeropp.files import MAX_SETTINGS_BYTES, parse_settings, read_text
from hf_zeropp.integrations.launch.checks import check_job, check_keys

RUNNER = "hf_zeropp.run"

DESCRIPTION = (
    "Run a script under ZeRO++ on FSDP2. The script needs no change: every model that Accelerate or a Trainer shards runs under "
    "ZeRO++, with the settings in the `zeropp_config:` block of the config file (a mapping, or the name of a preset such as "
    "`balanced`), or in ZEROPP_CONFIG_FILE and ZEROPP_<SETTING> variables, else with the defaults. ZEROPP_ENABLED=0 runs the "
    "same job on stock FSDP2. `hf-zeropp env` shows the settings in force. All flags are those of `accelerate launch`. The "
    "script may also be `-m` and a module, or a command of TRL such as `trl sft`."
)

MMAP_THRESHOLD = 2**20
"""Bytes from which memory of CPU ranks goes back to the system when it is freed.

FSDP2 allocates a unit when it is gathered and frees it after use, in turn with activations that stay until backward. By default
glibc raises its threshold to 32 MB as such memory is freed, and keeps what follows in its heap, where activations cut the holes
that gathers leave. A rank then holds twice what it uses. scripts/results/frozen.md has figures, and those of other thresholds.
The threshold belongs to the process and not to a library, so it is the launcher that sets it.
"""


def launch(flags: list[str]) -> None:
    """Run ``accelerate launch`` with ``flags``, after exporting the ``zeropp_config:`` block of its config file.

    Args:
        flags: everything behind ``hf-zeropp launch``: Accelerate's flags, the script (or ``-m`` and a module, or ``trl`` and one
            of its commands), and the script's arguments.

    Raises:
        SystemExit: the config file, the settings or the job are wrong. They are read once here, so that not every rank says so.
    """
    # Ranks read the files of this folder when they start. ``launch_command`` returns when all ranks have ended, and
    # only then the folder is deleted.
    with tempfile.TemporaryDirectory(prefix="hf-zeropp-") as folder:
        try:
            launch_command(_prepare(flags, folder))
        # A rank that fails raises an error of another type, so this is a mistake in the flags or in the file.
        except ValueError as error:
            raise SystemExit(f"hf-zeropp launch: {error}") from error


def _prepare(flags: list[str], folder: str) -> argparse.Namespace:
    """Return the arguments for Accelerate's launcher, with the environment of the ranks exported.

    Raises:
        ValueError: something in them is wrong.
    """
    parser = launch_command_parser()
    parser.prog, parser.description = "hf-zeropp launch", DESCRIPTION
    args = parser.parse_args(flags)
    file = {}
    if (path := config_file_of(args)) is not None:
        file = read_launch_config(path)
        check_keys(path, file)
        _export_cpu(file)
        if BLOCK in file:
            _export_zeropp(path, file.pop(BLOCK), folder)
            # Accelerate opens the file again in ``launch_command``, and rejects one with our block. It gets a copy without it.
            args.config_file = _write_yaml(file, folder, "accelerate.yaml")
    ZeroPPConfig.from_env()
    if is_enabled():
        check_job(args, file)
    _run_through_the_package(args)
    return args


def config_file_of(args: argparse.Namespace) -> str | None:
    """Return the config file that Accelerate would read: the flag's, or the one that ``accelerate config`` writes."""
    is_default = os.path.isfile(default_config_file) and not args.cpu
    return args.config_file or (default_config_file if is_default else None)


def read_launch_config(path: str) -> dict[str, Any]:
    """Return the content of a config file of Accelerate's.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    try:
        settings = parse_settings(read_text(Path(path), MAX_SETTINGS_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the config file {path!r}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path!r} must hold an Accelerate config (`key: value` lines), got: {settings!r}")
    return settings


def _export_zeropp(path: str, block: Any, folder: str) -> None:
    """Export the ``zeropp_config:`` block of a file: settings, a preset's name, or a file's path.

    Raises:
        ValueError: the block is none of these, its settings are wrong, or settings are given in another place too.
    """
    block = {} if block is None else block  # an empty block means the defaults
    # Overwriting the variable would drop settings that the user gave, and nothing in the output would show it.
    if other := os.environ.get(ENV_CONFIG_FILE):
        raise ValueError(
            f"both {ENV_CONFIG_FILE}={other} and the {BLOCK}: block in {path!r} are given. Drop one of them."
        )
    try:
        ZeroPPConfig.resolve(block)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {BLOCK}: block in {path!r}: {error}") from error
    os.environ[ENV_CONFIG_FILE] = block if isinstance(block, str) else _write_yaml(block, folder, "zeropp.yaml")


def _export_cpu(settings: dict[str, Any]) -> None:
    """Export what ranks on CPU need, and Accelerate's launcher exports for plain CPU jobs alone, or not at all."""
    if not settings.get("use_cpu"):
        return
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if "glibc.malloc.mmap_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):  # the newer name of the same setting
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(MMAP_THRESHOLD))


def _run_through_the_package(args: argparse.Namespace) -> None:
    """Let the ranks run ``hf_zeropp.run`` with the script, and not the script itself."""
    if args.no_python:  # a program of another kind imports this package by itself, or not at all
        return
    script, rest = args.training_script, args.training_script_args
    # ``trl`` is a launcher itself, and would start ranks that know nothing of this one's.
    if script == "trl" and rest and not args.module and not os.path.exists(script):
        script, rest, args.module = f"trl.scripts.{rest[0].replace('-', '_')}", rest[1:], True
    args.training_script_args = [*(["-m"] if args.module else []), script, *rest]
    args.training_script, args.module = RUNNER, True


def _write_yaml(settings: Any, folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        yaml.safe_dump(settings, file)
    return path
