"""The code base keeps its own rules: ruff is clean, files stay short."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("hf_zeropp", "ops", "scripts", "tests", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")
]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_is_clean(command: list[str]) -> None:
    folders = ["hf_zeropp", "scripts", "tests", "examples"]
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 500, f"{path.name} has {lines} lines: one idea per file, at most 500"
