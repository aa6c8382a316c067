"""Worlds of long-lived worker processes, and the watchdog over them.

A world runs one case after another. It is replaced by fresh processes only after a case in which a rank raised or hung. A
hang is a case in which the main threads of all ranks sleep for ``hang_s`` seconds without waking once: a rank that merely waits
for a processor does not sleep, so a loaded machine causes no false alarm. The ranks' stacks tell where they stood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
from multiprocessing.connection import wait
from typing import Any

from differential.compare import Difference
from differential.hazards import Refusal, refusal
from differential.rank import BETWEEN_CASES, SIDES, Job, Report, main

# The fork server imports these once. Without the last three every rank would import them in its first case, which takes a
# second of processor time each.
PRELOAD = ["differential.rank", "torch._dynamo", "torch._inductor", "fsspec.core"]
NOT_OF_STOCK = ("raises CrossedTwiceError",)
VALUES = ("loss", "grad", "weight", "norm")
START_S = 120.0
SAMPLE_S = 0.25
HANG_S = 5.0
GRACE_S = 1.0  # for the peers of a rank that raised
COLLECTIVE_TIMEOUT_S = 60.0  # the watchdog is quicker
# What ranks say whose peers went away, or ran another collective: it tells nothing of the cause.
_OF_PEERS = re.compile(r"Timed out|Connection closed|Connection reset|Broken pipe|onnection refused|op\.preamble", re.I)
_start_lock = threading.Lock()  # the fork server takes one request at a time


@dataclasses.dataclass(frozen=True)
class Symptom:
    """A failure of one side.

    Attributes:
        kind: "loss", "grad", "weight" or "norm" (it differs from the oracle), "raises" and a type, "dies", "hang", "silence".
        detail: for a person; it does not take part in comparisons of symptoms.
    """

    kind: str
    detail: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The failures of a case: of the two sides that are compared with the oracle, and of the oracle itself. None: no failure."""

    ours: Symptom | None = None
    stock: Symptom | None = None
    oracle: Symptom | None = None


class World:
    """``size`` processes of one gloo group.

    Args:
        hang_s: seconds of sleep after which a case counts as hanging.
    """

    def __init__(self, size: int, hang_s: float) -> None:
        self.size = size
        self.hang_s = hang_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def run(self, job: Job) -> Outcome:
        """Run a case on all ranks. Where our side fails and stock was not run, or could not be, it runs alone behind it."""
        outcome = self._run(job)
        awaited = refusal(job.case)
        # Stock mixes gradients or hangs where an error is due, and it has no cross hops: neither excuses our side.
        if (awaited is not None and awaited.is_due) or (outcome.ours is not None and outcome.ours.kind in NOT_OF_STOCK):
            return outcome
        if outcome.ours is None or ("stock" in job.sides and outcome.ours.kind in VALUES):
            return outcome
        stock = self._run(dataclasses.replace(job, sides=("plain", "stock"), plant=None))
        return Outcome(outcome.ours, stock.stock, stock.oracle)

    def stop(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._processes:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections = [], []

    def _run(self, job: Job) -> Outcome:
        if not self._processes:
            self._start()
        message = pickle.dumps(job)
        for connection in self._connections:
            connection.send_bytes(message)
        reports = self._collect()
        if all(report is not None and report.error is None for report in reports):
            return Outcome(_symptom(reports, "ours"), _symptom(reports, "stock"))
        if _all_refuse(reports, refusal(job.case)):
            self.stop()
            return Outcome()
        side, symptom = self._what_broke(reports)
        self.stop()
        return Outcome(**{"oracle" if side == "plain" else side: symptom})

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="zeropp_fuzz_")
        self._progress = self._context.RawArray("i", [BETWEEN_CASES] * self.size)
        pipes = [self._context.Pipe() for _ in range(self.size)]
        self._connections = [ours for ours, _ in pipes]
        for rank, (_, theirs) in enumerate(pipes):
            args = (rank, self.size, theirs, self._progress, self._folder, COLLECTIVE_TIMEOUT_S)
            process = self._context.Process(target=main, args=args, daemon=True)
            with _start_lock:
                process.start()
            theirs.close()
            self._processes.append(process)
        for connection in self._connections:
            if not connection.poll(START_S):
                raise TimeoutError(f"A world of {self.size} ranks did not start within {START_S:.0f} s.")
            connection.recv_bytes()

    def _collect(self) -> list[Report | None]:
        """A report of every rank; None for those that died, hang, or wait for one that raised."""
        reports: list[Report | None] = [None] * self.size
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        seen, moved = None, time.monotonic()
        while pending:
            for connection in wait(list(pending), timeout=SAMPLE_S):
                rank = pending.pop(connection)
                with contextlib.suppress(EOFError, ConnectionError):
                    reports[rank] = pickle.loads(connection.recv_bytes())
            # A rank that computes, or waits for a processor, gives None or another number of wakings at every look.
            now = [_wakings(self._processes[rank].pid) for rank in sorted(pending.values())]
            if now != seen or None in now:
                seen, moved = now, time.monotonic()
            ended = set(range(self.size)) - set(pending.values())
            has_broken = any(reports[rank] is None or reports[rank].error for rank in ended)
            if time.monotonic() - moved > (GRACE_S if has_broken else self.hang_s):
                break
        return reports

    def _what_broke(self, reports: list[Report | None]) -> tuple[str, Symptom]:
        """The side that ran, and what to say of it."""
        raised = [report for report in reports if report is not None and report.error is not None]
        causes = [report for report in raised if not _OF_PEERS.search(str(report.error_kind))]
        places = [report.stood for report in raised if report.stood]
        places += [(SIDES[place // 1000], place % 1000) for place in self._progress if place >= 0]
        side = next((side for side in SIDES if any(name == side for name, _ in places)), "stock")
        where = f"ranks at {sorted(set(places))}"
        if causes:
            kind = f"raises {str(causes[0].error_kind).partition(':')[0]}"
            return side, Symptom(kind, f"{where}, {len(causes)} raised: {causes[0].error_kind}\n{causes[0].error}")
        dead = {rank: code for rank, process in enumerate(self._processes) if (code := process.exitcode) is not None}
        if dead:
            return side, Symptom("dies", f"{where}, exit codes by rank: {dead}")
        silent = [rank for rank, report in enumerate(reports) if report is None]
        lines = [f"rank {rank}: {stack}" for rank, stack in self._stacks(silent).items()]
        lines += [f"a rank at {report.stood}: {report.error_kind}" for report in raised]
        return side, Symptom("hang", "\n".join([where, *lines]))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return, by rank, the functions of the package and of FSDP2 that run now, innermost first."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        stacks = {}
        for rank in ranks:
            with open(os.path.join(self._folder, f"stack{rank}")) as file:
                frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', file.read())
            ours = [f"{os.path.basename(path)}:{line} {name}" for path, line, name in frames if "zeropp" in path]
            stacks[rank] = " < ".join(ours[:6]) or "?"
        return stacks


class Worlds(dict[int, World]):
    """Worlds by size. Each starts when it is first asked for, and stops at the end of the context.

    Args:
        hang_s: as for ``World``.
    """

    def __init__(self, hang_s: float = HANG_S) -> None:
        super().__init__()
        self._hang_s = hang_s

    def __missing__(self, size: int) -> World:
        self[size] = World(size, self._hang_s)
        return self[size]

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *args: Any) -> None:
        for world in self.values():
            world.stop()


def _all_refuse(reports: list[Report | None], awaited: Refusal | None) -> bool:
    """Whether every rank raised where an error is right, and at least one of them with more than a lost connection."""
    if awaited is None:
        return False
    errors = [report for report in reports if report is not None and report.error is not None and report.stood]
    places = [report.stood for report in errors]
    is_right = all(side == "ours" and awaited.first <= index <= awaited.last for side, index in places if side)
    return (
        len(errors) == len(reports) and is_right and any(not _OF_PEERS.search(str(each.error_kind)) for each in errors)
    )


def _wakings(pid: int) -> str | None:
    """How often the main thread of a process was given a processor so far; None while it has or wants one."""
    try:
        with open(f"/proc/{pid}/task/{pid}/status") as file:
            status = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    is_asleep = "\nState:\tS" in status
    return status[status.index("voluntary_ctxt_switches") :] if is_asleep else None


def _symptom(reports: list[Report | None], side: str) -> Symptom | None:
    """The earliest difference that any rank saw."""
    found = [(rank, report.differences.get(side)) for rank, report in enumerate(reports) if report is not None]
    seen: list[tuple[int, Difference]] = [(rank, difference) for rank, difference in found if difference is not None]
    if not seen:
        return None
    rank, first = min(seen, key=lambda pair: (pair[1].operation, -pair[1].share))
    return Symptom(first.kind, f"rank {rank}, {first}")
