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
NAMES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.txt"))
# What is wrong still, and why. The marks are strict: they go when the package is right.
STILL_WRONG: dict[str, str] = {}
assert STILL_WRONG.keys() <= set(NAMES)


@pytest.fixture(scope="module")
def worlds():
    with Worlds(hang_s=2.0) as worlds:
        yield worlds


@pytest.mark.parametrize("name", NAMES)
def test_program(worlds, name, request):
    if name in STILL_WRONG:
        request.applymarker(pytest.mark.xfail(strict=True, reason=STILL_WRONG[name]))
    case = Case.parse((FOLDER / f"{name}.txt").read_text())
    outcome = worlds[case.num_ranks].run(Job(case, ("ours", "plain")))
    symptom = outcome.oracle or outcome.ours
    assert symptom is None, f"{symptom.kind}: {symptom.detail}"
