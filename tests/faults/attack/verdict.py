"""One fault from its start to its end: the struck run, the last whole checkpoint, the resumed run, what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from harness import RankError, StartedRanks, started_ranks

from attack import jobs
from attack.fault import HARMLESS, WORLD_SIZE, Fault
from attack.jobs import End, Order
from attack.place import heal, processes_left, shared_memory_files, small_disk, temporary_files
from attack.strike import STRUCK
from hf_zeropp.integrations.resume import why_not_whole

TIMEOUT_S = 20.0
"""The timeout of the ranks' process groups."""
MARGIN_S = 25.0
"""Time beyond it in which all ranks must have ended: some wait for one exchange after another, and the machine is busy."""
CONNECT_S = 5 * TIMEOUT_S
"""Time that gloo gives a peer while ranks make a process group."""
RUN_S = 120.0
PAUSE_S = 2.0
_starting = threading.Lock()  # the fork server takes one request at a time
# Words by which an error names the cause: its own, or a peer's.
_CAUSE = re.compile(
    r"Errno|os error|No space|[Tt]oo many open|cannot be shared|[Tt]imed? ?out|by peer|"
    r"[Cc]onnection (closed|reset|refused)|bytes are free|Bad file|exit code -9",
)


@dataclasses.dataclass
class Verdict:
    """The consequences of one fault. An empty text or list means that all was as expected.

    Attributes:
        fault: the fault.
        where: file and function of the strike; "" if the point was not reached.
        went_on: whether the run ended as if nothing had happened.
        seconds: from the strike to the end of the last rank.
        causes: the errors of the ranks, each once.
        ended: what is wrong with how ranks ended.
        resumed: what is wrong with the checkpoint, or with the bits of the run that resumed from it.
        left: what was left behind.
    """

    fault: Fault
    where: str = ""
    went_on: bool = False
    seconds: float = 0.0
    causes: list[str] = dataclasses.field(default_factory=list)
    ended: str = ""
    resumed: str = ""
    left: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether everything was as expected."""
        return bool(self.where) and not (self.ended or self.resumed or self.left)

    def __str__(self) -> str:
        said = [f"  {cause}" for cause in self.causes]
        wrong = [("  struck: the point was not reached" if not self.where else "")]
        wrong += [f"  {name}: {text}" for name, text in (("ended", self.ended), ("resumed", self.resumed)) if text]
        wrong += [f"  left behind: {name}" for name in self.left]
        moment = f"  struck in {self.where}, ended after {self.seconds:.1f} s" if self.where else ""
        return "\n".join(line for line in [str(self.fault), moment, *wrong, *said] if line)


def judge(fault: Fault, models: str) -> Verdict:
    """Let a fault happen, and look at everything that follows."""
    unbroken = reference(fault, models)
    calls = unbroken[fault.rank].counts.get(fault.point, 0)
    verdict = Verdict(fault)
    with tempfile.TemporaryDirectory(prefix="fault_") as name:
        order = Order(fault, name, models, strikes_at=1 + int(fault.fraction * calls))
        (Path(name) / "tmp").mkdir()
        before = shared_memory_files()
        with small_disk(order.disk):
            _strike(order, verdict, unbroken)
            heal(order.disk)
            if not verdict.went_on:
                _resume(order, verdict)
            elif fault.point in ("sharded save", "full save"):
                reason = why_not_whole(order.disk / "run" / f"checkpoint-{jobs.STEPS}")
                verdict.resumed = f"it went on, but its last checkpoint is not whole: {reason}" if reason else ""
            verdict.left += temporary_files(Path(name))
        verdict.left += sorted(shared_memory_files() - before)
    return verdict


def limit_of(fault: Fault) -> float:
    """Return the seconds within which all ranks must have ended."""
    if fault.blow in HARMLESS:
        return RUN_S
    makes_groups = fault.point in ("installing", "sharing memory", "packed loading")
    return (CONNECT_S if makes_groups else TIMEOUT_S) + MARGIN_S


def reference(fault: Fault, models: str, *, resumes: bool = False) -> list[End]:
    """Return the ends of an unbroken run of a fault's job, by rank.

    Args:
        fault: whose job.
        models: where its models are.
        resumes: whether the run that has ended is started again from its last checkpoint. The Trainer then makes one step more.
    """
    job = dataclasses.replace(fault, seed=0, blow="", point="", fraction=0.0, spare=0, rank=0)
    return _reference(job, models, resumes)


@functools.cache
def _reference(job: Fault, models: str, resumes: bool) -> list[End]:
    with tempfile.TemporaryDirectory(prefix="unbroken_") as name:
        (Path(name) / "tmp").mkdir()
        ends = _run(Order(job, name, models))
        return _run(Order(job, name, models, resumes=True)) if resumes else ends


def _run(order: Order) -> list[End]:
    with _started(order, timeout_s=60.0) as ranks:
        return ranks.collect(RUN_S)


@contextlib.contextmanager
def _started(order: Order, timeout_s: float) -> Iterator[StartedRanks]:
    with contextlib.ExitStack() as stack:
        with _starting:
            job = started_ranks(jobs.run, WORLD_SIZE, order, timeout_s=timeout_s)
            ranks = stack.enter_context(job)
        yield ranks


def _strike(order: Order, verdict: Verdict, unbroken: list[End]) -> None:
    """Run the job until all ranks have ended, and note how."""
    fault = order.fault
    with _started(order, TIMEOUT_S) as ranks:
        pids = {rank.pid for rank in ranks}
        late = _wait(ranks, order, verdict)
        ended_s = time.monotonic()
        for rank in late:
            os.kill(ranks[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
            ranks[rank].kill()
        if verdict.where and fault.blow == "stop":  # a launcher does the same when another rank has ended
            ranks[fault.rank].kill()
        try:
            ends = ranks.collect(limit_s=5.0, grace_s=5.0)
            verdict.went_on = True
            verdict.ended = "" if _same(ends, unbroken) else "it went on to other bits"
        except RankError as error:
            _note_errors(error, late, order, verdict)
    note = Path(order.folder, STRUCK)
    if note.exists() and note.stat().st_size:
        struck = json.loads(note.read_text())
        verdict.where, verdict.seconds = struck["where"], ended_s - struck["time"]
    verdict.left += processes_left(pids)


def _wait(ranks: StartedRanks, order: Order, verdict: Verdict) -> list[int]:
    """Wait for all ranks but one that is stopped for ever. Returns those that have not ended in time."""
    note, fault = Path(order.folder, STRUCK), order.fault
    deadline, is_paused = time.monotonic() + RUN_S, fault.blow == "pause"
    waiting = {rank.rank for rank in ranks}
    while waiting and time.monotonic() < deadline:
        waiting -= {rank for rank in waiting if ranks[rank].has_ended(0.02)}
        if not verdict.where and note.exists() and note.stat().st_size:
            struck = json.loads(note.read_text())
            verdict.where = struck["where"]
            deadline = struck["time"] + limit_of(fault)
            if fault.blow == "stop":
                waiting -= {fault.rank}
        if verdict.where and is_paused and time.monotonic() > struck["time"] + PAUSE_S:
            ranks[fault.rank].resume()
            is_paused = False
    return sorted(waiting)


def _note_errors(error: RankError, late: list[int], order: Order, verdict: Verdict) -> None:
    fault = verdict.fault
    messages = {failure.rank: f"{failure.kind}: {failure.message}" for failure in error.errors}
    died = {failure.rank for failure in error.errors if failure.kind == "ProcessDied"}
    died -= {fault.rank} if fault.blow in ("kill", "stop") else set()
    messages |= {rank: f"{messages[rank]}: {_last_words(order, rank)}" for rank in died}
    verdict.causes = sorted({f"rank {rank}: {' '.join(text.split())[:600]}" for rank, text in messages.items()})
    problems = [f"rank {rank} did not end within {limit_of(fault):.0f} s of the strike" for rank in late]
    problems += [f"rank {rank} gave no cause" for rank, text in messages.items() if not _CAUSE.search(text)]
    if fault.blow in HARMLESS:
        problems.append("it did not go on")
    verdict.ended = "; ".join(problems)


def _last_words(order: Order, rank: int) -> str:
    """Return what a rank printed at its end that hung or died: a stack, or what C++ says before it aborts."""
    text = jobs.output_of(order.folder, rank).read_text(errors="replace")
    starts = [text.rfind(words) for words in ("terminate called", "Stack (most recent call first)")]
    return text[max(*starts, 0) :][:1000]


def _resume(order: Order, verdict: Verdict) -> None:
    """Start the job again in the same folder, from the last whole checkpoint if there is one."""
    steps = range(jobs.SAVE_STEPS, jobs.STEPS + 1, jobs.SAVE_STEPS)
    whole = [step for step in steps if why_not_whole(order.disk / "run" / f"checkpoint-{step}") is None]
    try:
        ends = _run(order._replace(strikes_at=None, resumes=bool(whole)))
    except RankError as error:
        verdict.resumed = f"from {whole}: {str(error)[-1500:]}"
        return
    unbroken = reference(order.fault, order.models, resumes=jobs.STEPS in whole)
    if not _same(ends, unbroken):
        verdict.resumed = f"from {whole}: other losses or weights than those of the unbroken run: {ends} and {unbroken}"


def _same(ends: list[End], unbroken: list[End]) -> bool:
    return [end[:2] for end in ends] == [end[:2] for end in unbroken]
