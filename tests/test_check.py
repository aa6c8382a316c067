"""Lint, format, types and the rules of style hold. Every push runs the suite, so every push runs scripts/check.sh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_rank

ROOT = Path(__file__).parent.parent


def test_lint_format_types_and_style() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", "scripts/check.sh"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
