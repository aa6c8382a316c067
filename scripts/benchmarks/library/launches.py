"""Training programs that run as they are, under ``hf-zeropp launch``, in four CPU processes as two nodes of two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from library.study import ROOT, rank_environment

CONFIG = "cpu_2_nodes_x_2_ranks.yaml"


def launch(
    command: list[str],
    settings: dict[str, Any] | None,
    folder: Path,
    *,
    config: str = CONFIG,
    changes: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    """Run a program to its end, and return all that it printed.

    Args:
        command: the program and its flags.
        settings: of this package; None for stock FSDP2.
        folder: where the program runs, and the config file lies.
        config: a file in ``examples/configs``. Of its settings of this package, ``frozen_bits`` is kept.
        changes: of the config file's other entries. Sections are merged.
        environment: further variables.

    Raises:
        RuntimeError: the program failed; the message holds the end of its output.
    """
    accelerate = yaml.safe_load((ROOT / "examples/configs" / config).read_text())
    kept = {key: accelerate["zeropp_config"][key] for key in ("frozen_bits",) if key in accelerate["zeropp_config"]}
    for key, value in (changes or {}).items():
        accelerate[key] = accelerate[key] | value if isinstance(value, dict) else value
    accelerate["zeropp_config"] = {"ranks_per_node": 2, **kept, **(settings or {})}
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(accelerate))
    variables = os.environ | rank_environment(threads=1) | {"COLUMNS": "200"} | (environment or {})
    ended = subprocess.run(
        [sys.executable, "-m", "hf_zeropp.cli", "launch", "--config_file", str(path), *command],
        env=variables | ({"ZEROPP_ENABLED": "0"} if settings is None else {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = ended.stdout + ended.stderr
    if ended.returncode:
        raise RuntimeError(f"{command} with {settings} ended with {ended.returncode}:\n{printed[-6000:]}")
    return printed
