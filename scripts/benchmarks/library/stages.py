"""Programs that run with limits of time, each for itself: one that hangs or dies costs its own result only.

Whatever was found by then is in a folder: a log of each stage, ``summary.md``, and all of it packed in ``all.tgz``. A stage that
takes too long is asked where it is (every Python process of it prints its stacks), and killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil

from library.pages import Grid
from library.study import ROOT

TAIL_LINES = 15
ARCHIVE_BYTES = 15_000_000
"""What does not fit in the archive is left out of it, the largest files first."""
BETWEEN_STACKS_S = 0.03
GRACE_S = 2.0
"""Behind the stacks of a stage that takes too long. It is killed then."""


class Stage(NamedTuple):
    """One program.

    Attributes:
        name: of its log.
        command: arguments behind the interpreter.
        limit_s: seconds after which it is ended, if those of its round are not over before.
        environment: further variables.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """The end of a stage.

    Attributes:
        stage: its name.
        result: "passed", "failed" or "timed out".
        seconds: it took.
        detail: the last lines of the log, before the stacks if it was ended.
    """

    stage: str
    result: str
    seconds: float
    detail: str


Lane = Sequence[Stage]
"""Stages that run one after the other."""


class Round(NamedTuple):
    """Lanes that run side by side.

    Attributes:
        limit_s: seconds after which all stages of the round are ended. What one of them leaves is there for those behind it.
        lanes: of the round.
    """

    limit_s: float
    lanes: Sequence[Lane]


def run_rounds(rounds: Sequence[Round], output: Path, title: str) -> list[Outcome]:
    """Run rounds one after the other, and return how all stages ended.

    Args:
        rounds: the stages.
        output: folder for logs and results, which exists.
        title: of the table.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # stages that are ended would leave files of gigabytes
    report = _Report(output, title)
    for limit_s, lanes in rounds:
        ends_at = time.monotonic() + limit_s

        def run_lane(lane: Lane, ends_at: float = ends_at) -> None:
            for stage in lane:
                report.add(_run(stage, output, ends_at))

        with ThreadPoolExecutor(len(lanes)) as threads:
            list(threads.map(run_lane, lanes))
    return report.outcomes


def grid_of(outcomes: Sequence[Outcome], title: str) -> Grid:
    """Return the table of stages."""
    rows = [[one.stage, one.result, f"{one.seconds:.0f}"] for one in outcomes]
    return Grid(title, ("stage", "result", "seconds"), rows)


def _run(stage: Stage, output: Path, ends_at: float) -> Outcome:
    """Run a stage, with its output in a log, until ``ends_at`` of the monotonic clock at the latest."""
    started = time.monotonic()
    log = output / f"{stage.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *stage.command],
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **stage.environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all processes of a stage that hangs can be ended together
        )
        try:
            result = "passed" if process.wait(max(0.0, min(stage.limit_s, ends_at - started))) == 0 else "failed"
        except subprocess.TimeoutExpired:
            result = "timed out"
            _abort(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # what is left: of a stage that hangs, or of one of which a rank died
        process.wait()
    said = log.read_text(errors="replace").partition("Fatal Python error")[0]
    lines = [line for line in said.splitlines() if line.strip()]
    return Outcome(stage.name, result, time.monotonic() - started, "\n".join(lines[-TAIL_LINES:]))


def _abort(process: subprocess.Popen) -> None:
    """Let each process of a stage print the stacks of its threads (PYTHONFAULTHANDLER), and end."""
    # One after the other, the youngest first: their lines would mix otherwise, and the end of the first ends the others.
    for one in sorted(psutil.process_iter(), key=lambda one: -one.pid):
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(one.pid) == process.pid:
                one.send_signal(signal.SIGABRT)
                time.sleep(BETWEEN_STACKS_S)


class _Report:
    """What the stages found so far, on disk after each of them: whatever ends the program leaves what it has."""

    def __init__(self, output: Path, title: str) -> None:
        self.outcomes: list[Outcome] = []
        self._output = output
        self._title = title
        self._lock = threading.Lock()

    def add(self, outcome: Outcome) -> None:
        """Write an outcome, and pack everything anew."""
        with self._lock:
            print(f"{outcome.stage}: {outcome.result} in {outcome.seconds:.0f} s", flush=True)
            self.outcomes.append(outcome)
            details = [f"## {one.stage}: {one.result}\n\n```\n{one.detail}\n```\n" for one in self.outcomes]
            table = grid_of(self.outcomes, self._title).markdown()
            (self._output / "summary.md").write_text("\n".join(["# Stages\n", table, "", *details]))
            record = {"title": self._title, "stages": [one._asdict() for one in self.outcomes]}
            (self._output / "summary.json").write_text(json.dumps(record, indent=2))
            self._pack()

    def _pack(self) -> None:
        """Pack the smallest files first, up to the size of an archive."""
        archive, partial = self._output / "all.tgz", self._output / "all.partial"
        files = [path for path in self._output.rglob("*") if path.is_file() and path not in (archive, partial)]
        packed_bytes = 0
        with tarfile.open(partial, "w:gz") as packed:
            for path in sorted(files, key=lambda path: path.stat().st_size):
                packed_bytes += path.stat().st_size  # before they are compressed
                if packed_bytes < ARCHIVE_BYTES:
                    packed.add(path, path.relative_to(self._output))
        partial.replace(archive)
