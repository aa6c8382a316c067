"""Tests on real ranks: several gloo processes per test, forked from a server that has imported everything once.

``run_ranks(function, world_size, *args)`` calls ``function(rank, *args)`` on every rank and returns the results in
rank order. The function must be defined at module level, because it travels by name. A rank that raises, dies or hangs
fails the test with the tracebacks of all ranks.

``started_ranks`` does not wait: the test stops, resumes or kills ranks while they run, and collects their results later.
``Scenarios`` runs many short tests in one start of the ranks.

Every rank is a new process, since FSDP2, process groups and Accelerate keep state that one test would leave to the next.
A process that imports PyTorch and Transformers takes seconds to start; a fork of one that has imported them does not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from rank_process import Announcement, Job, Raised, Result, announce, rank_main

__all__ = ["Failure", "RankError", "Scenarios", "StartedRank", "StartedRanks", "announce", "each_case", "expect_errors"]
__all__ += ["free_port", "run_ranks", "started_ranks"]

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "accelerate",
    "hf_zeropp",
    "hf_zeropp.integrations.trainer",
    "datasets",
]
LIMIT_S = 120.0
GRACE_S = 20.0  # time for the other ranks to notice and report, after one has failed

# A plain fork would copy pytest's own process in the middle of its work: PyTorch's threads would be missing in the copy, and
# locks that they hold would stay locked. The server has done nothing but import.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class Failure(NamedTuple):
    """A rank that raised, died or hung: its rank, the exception's type name and its message.

    A rank that ended without a result has the type name ``ProcessDied``, and its exit code in the message (-9 for
    SIGKILL); one that gave no result in time has ``TimeoutError``.
    """

    rank: int
    kind: str
    message: str


class RankError(AssertionError):
    """One or more ranks raised, died or hung.

    Args:
        report: the tracebacks.
        errors: the failures, in the order in which they were noticed.
        results: what the other ranks returned, by rank.
    """

    def __init__(self, report: str, errors: list[Failure], results: dict[int, Any] | None = None) -> None:
        super().__init__(report)
        self.errors = errors
        self.results = results or {}


def preload(*modules: str) -> None:
    """Import more modules in the server. Call it before the first rank is started."""
    _context.set_forkserver_preload([*PRELOAD, *modules])


# ------------------------------------------------------------------------------------------------------ running on ranks


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    init: bool = True,
    limit_s: float = LIMIT_S,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` processes of one gloo group.

    Args:
        function: a function of a module.
        world_size: number of ranks.
        args: further arguments, which can be pickled.
        env: environment variables of the ranks, beside those of this process.
        init: False leaves ``init_process_group`` to the function. Accelerate calls it itself.
        limit_s: seconds after which ranks that have not ended are killed.
        timeout_s: seconds after which a collective of the group fails on ranks that wait in it. Connecting the ranks
            must succeed in this time too, which takes seconds on a busy machine.

    Returns:
        The results of the function, in rank order.

    Raises:
        RankError: a rank raised, died or did not end in time.
    """
    with started_ranks(function, world_size, *args, env=env, init=init, timeout_s=timeout_s) as ranks:
        return ranks.collect(limit_s)


@contextlib.contextmanager
def started_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    init: bool = True,
    timeout_s: float = 60.0,
) -> Iterator[StartedRanks]:
    """Start what ``run_ranks`` runs, without waiting for it. Ranks that are alive at the end of the context are killed.

        with started_ranks(train, 4, timeout_s=5) as ranks:
            ranks[2].wait_for("step 3")  # until the rank has called harness.announce("step 3")
            ranks[2].stop()
            with pytest.raises(RankError) as failure:
                ranks.collect(grace_s=2)  # rank 2 ends never, the others within 2 s of each other

    Args:
        function: as for ``run_ranks``.
        world_size: as for ``run_ranks``.
        args: as for ``run_ranks``.
        env: as for ``run_ranks``.
        init: as for ``run_ranks``.
        timeout_s: as for ``run_ranks``.

    Yields:
        The ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Job(function, world_size, args, env or {}, init, timeout_s, folder, free_port())
        ranks = StartedRanks([StartedRank(job, rank) for rank in range(world_size)])
        try:
            yield ranks
        finally:
            ranks.end()


def expect_errors(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[str]:
    """Run a function that must raise on every rank, and return ``"Type: message"`` in rank order."""
    try:
        results = run_ranks(function, world_size, *args, **kwargs)
    except RankError as error:
        assert len(error.errors) == world_size, f"expected an error on all {world_size} ranks:\n{error}"
        return [f"{failure.kind}: {failure.message}" for failure in sorted(error.errors)]
    raise AssertionError(f"expected every rank to raise, got {results}")


def each_case(cases: Iterable[Any], check: Callable[[Any], None]) -> None:
    """Call ``check(case)`` for every case and fail once, naming all cases that failed.

    Ranks use it to go through many cases in one run. In ``check``, assertions must come after the collectives of the
    case: a rank that fails goes on with the next case, and so do its peers, which must not wait for it in this one.
    """
    failures = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, f"{len(failures)} cases failed:\n" + "\n".join(failures[:20])


class Scenarios:
    """Many short tests in one start of the ranks.

    A scenario is a function ``(rank, *args)`` of a module. All scenarios run one after the other in the same processes,
    each in a try block of its own; ``check(name)`` fails if that one raised, and returns its results.

        SCENARIOS = Scenarios(4, [freezing, clipping])

        @SCENARIOS.parametrize
        def test_features(scenario):
            SCENARIOS.check(scenario)

    A scenario that raises on some ranks only, between collectives, makes the following ones fail as well.

    Args:
        world_size: number of ranks.
        functions: the scenarios, in the order in which they run.
        args: further arguments, for all of them.
        kwargs: as for ``run_ranks``.
    """

    def __init__(self, world_size: int, functions: Iterable[Callable[..., Any]], *args: Any, **kwargs: Any) -> None:
        self.world_size = world_size
        self.functions = {function.__name__: function for function in functions}
        self._args = args
        self._kwargs = kwargs
        self._outcomes: list[dict[str, _Outcome]] | None = None

    def parametrize(self, test: Callable[..., None]) -> Callable[..., None]:
        """Decorate a test with a parameter ``scenario``, which takes the name of every scenario."""
        import pytest

        return pytest.mark.parametrize("scenario", list(self.functions))(test)

    def check(self, name: str) -> list[Any]:
        """Fail if a scenario raised on a rank, otherwise return its results in rank order.

        The first call runs all scenarios.
        """
        if self._outcomes is None:
            functions = list(self.functions.values())
            self._outcomes = run_ranks(_run_scenarios, self.world_size, functions, *self._args, **self._kwargs)
        outcomes = [rank_outcomes[name] for rank_outcomes in self._outcomes]
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome.trace]
        traces = sorted({outcome.trace for outcome in outcomes if outcome.trace})
        assert not failed, f"{name} failed on ranks {failed}:\n" + "\n".join(traces)
        return [outcome.result for outcome in outcomes]


class _Outcome(NamedTuple):
    """The end of a scenario on one rank: its result, or a traceback."""

    result: Any = None
    trace: str = ""


def _run_scenarios(rank: int, functions: list[Callable[..., Any]], *args: Any) -> dict[str, _Outcome]:
    outcomes = {}
    for function in functions:
        try:
            outcomes[function.__name__] = _Outcome(result=function(rank, *args))
        except Exception:  # noqa: BLE001 - the test shows it
            outcomes[function.__name__] = _Outcome(trace=traceback.format_exc())
    return outcomes


def free_port() -> int:
    """Return a TCP port on which nobody listens now, for a store that ranks make themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------------- ranks as the test sees them


class StartedRank:
    """One rank that runs, as the process of the test sees it.

    Args:
        job: the function and its surroundings.
        rank: which of its ranks.

    Attributes:
        rank: the rank.
        process: its process.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self._receiver, sender = _context.Pipe(duplex=False)
        self._announced: set[str] = set()
        self._end: Result | Raised | None = None
        self.process = _context.Process(target=rank_main, args=(sender, job, rank), daemon=True)
        self.process.start()
        # With this copy closed, the end of the rank's process closes the pipe, and reading from it raises EOFError.
        sender.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def stop(self) -> None:
        """Stop the process with SIGSTOP. It keeps its connections, and answers nobody: peers see it hang."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped process go on, with SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL, stopped or not. The kernel closes its connections: peers see it die."""
        os.kill(self.pid, signal.SIGKILL)

    def wait_for(self, text: str, limit_s: float = LIMIT_S) -> None:
        """Wait until the rank has called ``announce(text)``.

        Raises:
            AssertionError: it ended before, or did not do so in time.
        """
        deadline = time.monotonic() + limit_s
        while text not in self._announced:
            assert self._end is None, f"rank {self.rank} ended without announcing {text!r}: {self._end}"
            is_ready = self._receiver.poll(max(0.0, deadline - time.monotonic()))
            assert is_ready, f"rank {self.rank} did not announce {text!r} within {limit_s:.0f} s"
            self._read()

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Say whether the rank has returned, raised or died, or does so within the time."""
        deadline = time.monotonic() + within_s
        while self._end is None and self._receiver.poll(max(0.0, deadline - time.monotonic())):
            self._read()
        return self._end is not None

    def _read(self) -> None:
        """Take in one message of the rank, or its death."""
        try:
            message = pickle.loads(self._receiver.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(60)  # a busy machine may take long to end a process that was killed
            message = Raised("ProcessDied", f"exit code {self.process.exitcode}", "")
        if isinstance(message, Announcement):
            self._announced.add(message.text)
        else:
            self._end = message


class StartedRanks:
    """The ranks of one ``started_ranks``, by rank: ``ranks[2].stop()``."""

    def __init__(self, ranks: list[StartedRank]) -> None:
        self._ranks = ranks

    def __getitem__(self, rank: int) -> StartedRank:
        return self._ranks[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[StartedRank]:
        return iter(self._ranks)

    def collect(self, limit_s: float = LIMIT_S, grace_s: float = GRACE_S) -> list[Any]:
        """Wait until all ranks have ended.

        Args:
            limit_s: seconds until ranks that have not ended count as failed.
            grace_s: the same, from the first failure on. Peers of a killed rank may need the ``timeout_s`` of the group to
                notice, and a stopped rank keeps the test waiting for this long.

        Returns:
            The results of the function, in rank order.

        Raises:
            RankError: a rank raised, died or did not end in time.
        """
        # Ranks are read in the order in which they answer: the failure of one explains why others hang.
        deadline = time.monotonic() + limit_s
        while running := {rank._receiver: rank for rank in self if rank._end is None}:
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in running.values():
                    rank._end = Raised("TimeoutError", f"no result after {limit_s:.0f} s", "")
            for receiver in ready:
                rank = running[receiver]
                rank._read()
                if isinstance(rank._end, Raised):
                    deadline = min(deadline, time.monotonic() + grace_s)
        return self._results()

    def end(self) -> None:
        """Kill the ranks that are alive; those that have returned a result may end by themselves."""
        for rank in self:
            if not isinstance(rank._end, Result):
                rank.process.kill()
        # All are killed before the first is waited for: a rank that is at its exit may be waiting for another.
        for rank in self:
            rank.process.join(20)
            rank.process.kill()  # in case it hangs at its exit
            rank._receiver.close()

    def _results(self) -> list[Any]:
        failures = [(rank.rank, rank._end) for rank in self if isinstance(rank._end, Raised)]
        results = {rank.rank: rank._end.value for rank in self if isinstance(rank._end, Result)}
        if failures:
            errors = [Failure(rank, raised.kind, raised.message) for rank, raised in failures]
            raise RankError(_report(failures), errors, results)
        return list(results.values())


def _report(failures: list[tuple[int, Raised]]) -> str:
    """Return each distinct traceback once, with the ranks from which it came."""
    ranks_of: dict[Raised, list[int]] = {}
    for rank, raised in failures:
        ranks_of.setdefault(raised, []).append(rank)
    return "\n".join(
        f"[ranks {ranks}] {raised.kind}: {raised.message}\n{raised.trace}" for raised, ranks in ranks_of.items()
    )
