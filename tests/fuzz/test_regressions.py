"""Programs that went wrong once, each in a file of ``regressions/``. The folder of a file says what it is about.

A file holds a case in its text form (see ``differential/cases.py``). The fuzz prints failing programs in this form.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from differential.cases import Case
from differential.pool import Worlds
from differential.rank import Job

FOLDER = Path(__file__).parent / "regressions"
# What is wrong still, and why. The marks are strict: they go when the package is right.
STILL_WRONG: dict[str, str] = {}


def programs() -> list:
    return [pytest.param(path, marks=marks(path), id=name_of(path)) for path in sorted(FOLDER.rglob("*.txt"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(FOLDER).with_suffix(""))


def marks(path: Path) -> list:
    reason = STILL_WRONG.get(name_of(path)) or STILL_WRONG.get(path.parent.name)
    return [pytest.mark.xfail(strict=True, reason=reason)] if reason else []


@pytest.fixture(scope="module")
def worlds():
    with Worlds(hang_s=2.0) as worlds:
        yield worlds


@pytest.mark.parametrize("path", programs())
def test_program(worlds, path):
    case = Case.parse(path.read_text())
    outcome = worlds[case.num_ranks].run(Job(case, ("ours", "plain")))
    symptom = outcome.oracle or outcome.ours
    assert symptom is None, f"{symptom.kind}: {symptom.detail}"


def test_marks_name_programs():
    names = {name_of(path) for path in FOLDER.rglob("*.txt")}
    assert STILL_WRONG.keys() <= names | {name.partition("/")[0] for name in names}
