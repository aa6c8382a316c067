"""A few faults in every run of the suite, always the same ones; scripts/faults.sh runs other ones, and more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attack.fault import CELLS, draw
from attack.place import why_impossible

pytestmark = pytest.mark.thorough

WHY_IMPOSSIBLE = why_impossible()
CHOSEN = (("kill", "sharded save"), ("full disk", "sharded save"))


def seed_of(cell: tuple[str, str]) -> int:
    """The first seed of a blow at a point with the plainest job. Faults of one job share its unbroken run."""
    seeds = range(CELLS.index(cell), 100 * len(CELLS), len(CELLS))
    return next(seed for seed in seeds if draw(seed).job == "values" and draw(seed).keep == 1)


@pytest.mark.skipif(WHY_IMPOSSIBLE is not None, reason=f"no private disks: {WHY_IMPOSSIBLE}")
def test_faults_end_in_time_and_resume_to_the_same_bits_and_leave_nothing():
    seeds = [str(seed_of(cell)) for cell in CHOSEN]
    command = [sys.executable, str(Path(__file__).with_name("faults.py")), "--only", *seeds]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    count = len(CHOSEN)
    assert f"| **all** |  | {count} | {count} | {count} | 0 | {count} | {count} |" in result.stdout
