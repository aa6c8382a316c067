"""``hf-zeropp launch``: Accelerate's launcher for config files that also hold settings of this package.

``accelerate launch`` rejects top-level keys that it does not know, and exports only its own. So the ``zeropp_config:`` block
is taken out of the file here and travels as a file of its own, which the variable ``ZEROPP_CONFIG_FILE`` names and every
rank reads. All flags are Accelerate's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.launch import launch_command, launch_command_parser

from hf_zeropp.config import ENV_CONFIG_FILE, ZeroPPConfig
from hf_zeropp.files import MAX_SETTINGS_BYTES, parse_settings, read_text


def launch(flags: list[str]) -> None:
    """Run ``accelerate launch`` with ``flags``, after exporting the ``zeropp_config:`` block of its config file.

    Args:
        flags: everything behind ``hf-zeropp launch``: Accelerate's flags, the script, and the script's arguments.

    Raises:
        SystemExit: the config file cannot be read, or settings are given in two places.
        ValueError: the settings are wrong. They are read once here, so that not every rank says so.
    """
    # Ranks read the files of this folder when they start. ``launch_command`` returns when all ranks have ended, and
    # only then the folder is deleted.
    with tempfile.TemporaryDirectory(prefix="hf-zeropp-") as folder:
        parser = launch_command_parser()
        args = parser.parse_args(flags)
        if args.config_file is not None:
            settings = _read_launch_config(args.config_file)
            _export_zeropp(settings.pop("zeropp_config", None), folder)
            _export_cpu(settings)
            # Accelerate opens ``config_file`` again in ``launch_command``, and rejects a file with our block. So the
            # flags are parsed a second time, with a copy of the file that lacks the block.
            args = parser.parse_args(with_config_file(flags, _write_yaml(settings, folder, "accelerate.yaml")))
        ZeroPPConfig.from_env()
        launch_command(args)


def with_config_file(flags: list[str], path: str) -> list[str]:
    """Return the flags with the value of ``--config_file`` replaced, in either spelling and either form."""
    names = ("--config_file", "--config-file")
    # The first match is the launcher's flag. The script's arguments follow it, and may hold a flag of the same name.
    flags = list(flags)
    for index, flag in enumerate(flags):
        if flag in names:
            flags[index + 1] = path
            return flags
        if flag.startswith(tuple(f"{name}=" for name in names)):
            flags[index] = f"{names[0]}={path}"
            return flags
    raise AssertionError("launch() calls this only when --config_file was parsed")


def _read_launch_config(path: str) -> dict[str, Any]:
    try:
        settings = parse_settings(read_text(Path(path), MAX_SETTINGS_BYTES))
    except (OSError, ValueError) as error:
        raise SystemExit(f"hf-zeropp launch: cannot read the config file {path!r}: {error}") from error
    if not isinstance(settings, dict):
        raise SystemExit(f"hf-zeropp launch: {path!r} must hold an Accelerate config (`key: value` lines).")
    return settings


def _export_zeropp(block: Any, folder: str) -> None:
    """Export the ``zeropp_config:`` block: a mapping of settings, or the path of a file that holds them."""
    if block is None:
        return
    # Overwriting the variable would drop settings that the user gave, and nothing in the output would show it.
    if os.environ.get(ENV_CONFIG_FILE):
        raise SystemExit(
            f"hf-zeropp launch: both {ENV_CONFIG_FILE} and a zeropp_config: block are given. Drop one of them."
        )
    os.environ[ENV_CONFIG_FILE] = block if isinstance(block, str) else _write_yaml(block, folder, "zeropp.yaml")


def _export_cpu(settings: dict[str, Any]) -> None:
    """Export ``use_cpu``, which Accelerate's launcher does for plain CPU jobs but not for FSDP on CPU."""
    if settings.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _write_yaml(settings: Any, folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    with open(path, "w") as file:
        yaml.safe_dump(settings, file)
    return path
