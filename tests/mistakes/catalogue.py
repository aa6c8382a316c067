"""Mistakes that users make: how each is made, who must say so, and the words that tell what is wrong and what to do.

The lists stand in ``settings_mistakes``, ``command_mistakes``, ``rank_mistakes`` and ``job_mistakes``. ``test_mistakes.py`` makes
those of them that take no launcher; ``scripts/mistakes.sh`` makes all, and writes ``scripts/results/mistakes.md``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

EVERY_RANK = "every rank"
BEFORE = "before any process starts"
ONE_RANK = "the rank that makes it"
WAITING = "the ranks that wait"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        name: what is wrong, as a user would tell it. It is the name of the test.
        make: makes it, and must raise. It is called in an empty working directory of its own; on ranks it is called with the
            rank, on all of them.
        words: parts of the message that must come: what was expected, what came, what to do.
        env: variables of the user's shell.
        said_by: who must raise.
    """

    name: str
    make: Callable[..., object]
    words: tuple[str, ...]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    said_by: str = BEFORE


class Outcome(NamedTuple):
    """The message of one mistake, and the seconds until it came."""

    message: str
    seconds: float


def outcome_of(make: Callable[[], object]) -> Outcome:
    """Make a mistake in this process. No error is an outcome too, with a message that no list expects."""
    errors, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            make()
        message = "no error"
    # argparse ends with the exit code 2, and has printed its message.
    except SystemExit as error:
        message = errors.getvalue() if isinstance(error.code, int) else str(error)
    except Exception as error:  # noqa: BLE001 - the test looks at its words
        message = f"{type(error).__name__}: {error}"
    return Outcome(message, time.perf_counter() - start)


def outcome_alone(mistake: Mistake, folder: Path) -> Outcome:
    """Make a mistake of one process in ``folder``, under the variables of its user and no others of this package."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ZEROPP_", "ACCELERATE_", "FSDP_"))}
    here = os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, kept | mistake.env, clear=True):
            return outcome_of(mistake.make)
    finally:
        os.chdir(here)
