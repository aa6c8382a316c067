"""The code base keeps its own rules: lint, format and types are clean, files stay short."""

import os
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


def test_lint_format_and_types() -> None:
    """Every push runs the tests, so every push runs scripts/check.sh."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", "scripts/check.sh"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 500, f"{path.name} has {lines} lines: one idea per file, at most 500"
