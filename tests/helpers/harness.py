"""Tests on real ranks: several gloo processes per test, forked from a server that has imported everything once.

A test calls ``run_ranks``. ``started_ranks`` does not wait: the test stops, resumes or kills ranks while they run, and collects
their results later. ``Scenarios`` runs many short tests in one start of the ranks.

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
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

from rank_process import Announcement, Failure, Job, Result, announce, crash_file, rank_main

if TYPE_CHECKING:
    import pytest

__all__ = ["Failure", "RankError", "Scenarios", "StartedRank", "StartedRanks", "announce", "each_case", "expect_errors"]
__all__ += ["each_refusal", "free_port", "run_ranks", "selected", "scenarios_of", "started_ranks"]

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",  # the models of Transformers are imported when they are used
    "accelerate",
    "hf_zeropp",
    "hf_zeropp.integrations.trainer",
    "datasets",
]
LIMIT_S = 120.0
GRACE_S = 20.0  # time for the other ranks to notice and report, after one has failed
SCENARIO_GRACE_S = 5.0  # the same between scenarios, where what the other ranks say is seldom of interest

# A plain fork would copy pytest's own process in the middle of its work: PyTorch's threads would be missing in the copy, and
# locks that they hold would stay locked. The server has done nothing but import.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class RankError(AssertionError):
    """One or more ranks raised, died or hung.

    Args:
        report: the tracebacks.
        errors: the failures, the first one first. Those behind it are often its consequences.
    """

    def __init__(self, report: str, errors: list[Failure]) -> None:
        super().__init__(report)
        self.errors = errors


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
    """Run ``function(rank, *args)`` on ``world_size`` processes of one gloo group, and return the results in rank order.

    Args:
        function: at module level, because it travels by name.
        world_size: number of ranks.
        args: further arguments, which can be pickled.
        env: environment variables of the ranks, beside those of this process.
        init: False leaves ``init_process_group`` to the function. Accelerate calls it itself.
        limit_s: seconds after which ranks that have not ended are killed.
        timeout_s: seconds after which a collective of the group fails on ranks that wait in it. Connecting the ranks
            must succeed in this time too, which takes seconds on a busy machine.

    Raises:
        RankError: a rank raised, died or did not end in time. It has the tracebacks of all ranks, that of the first first.
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
    """Start what ``run_ranks`` runs, with its arguments. Ranks that are alive at the end of the context are killed.

    Example:
        with started_ranks(train, 4, timeout_s=5) as ranks:
            ranks[2].wait_for("step 3")  # until the rank has called harness.announce("step 3")
            ranks[2].stop()
            with pytest.raises(RankError) as failure:
                ranks.collect(grace_s=2)  # rank 2 ends never, the others within 2 s of each other
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
    """Call ``check(case)`` for every case, up to the first that fails, and name that one.

    Ranks use it to go through many cases in one run. No case runs behind one that failed: the peers of the rank that failed
    may be in a collective of this case or of the next. The end of the rank releases them.
    """
    every = list(cases)
    for number, case in enumerate(every, start=1):
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"case {number} of {len(every)}, {case}: {error}") from error


def each_refusal(actions: dict[str, Callable[[], object]]) -> None:
    """Call every action, which must raise a ValueError that its key matches. Ranks use it as ``each_case``."""
    import pytest

    def check(pattern: str) -> None:
        with pytest.raises(ValueError, match=pattern):
            actions[pattern]()

    each_case(actions, check)


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values of a parameter in those tests of the fixture's file that this run of pytest has selected, each once."""
    of_file = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(item.callspec.params[parameter] for item in of_file if parameter in item.callspec.params))


class Scenarios:
    """Many short tests in one start of the ranks.

    A scenario is a function ``(rank, *args)`` of a module, such as ``scenario_clipping``. All scenarios that this run of pytest
    has selected run one after the other in the same processes, up to the first that raises on a rank; ``check("clipping")``
    returns the results of that one, or fails.

        SCENARIOS = Scenarios(4, scenarios_of(__name__))

        @SCENARIOS.parametrize
        def test_features(scenario):
            SCENARIOS.check(scenario)

    A rank on which a scenario raised ends with it: otherwise its next collectives would meet those that its peers still wait in.
    Its end closes its connections, which releases the peers in gloo, and the test ends those that wait for something else. What
    the peers raise then is shown behind the first cause, and scenarios that did not end on all ranks fail with its name.

    Args:
        world_size: number of ranks.
        functions: the scenarios, in the order in which they run.
        args: further arguments, for all of them.
        kwargs: as for ``run_ranks``.
    """

    def __init__(self, world_size: int, functions: Iterable[Callable[..., Any]], *args: Any, **kwargs: Any) -> None:
        self.world_size = world_size
        self.functions = {function.__name__.removeprefix(_PREFIX): function for function in functions}
        self._args = args
        self._kwargs = kwargs
        self._selected: list[str] = []
        self._ran: _Ran | None = None

    def parametrize(self, test: Callable[..., None]) -> Callable[..., None]:
        """Decorate a test with a parameter ``scenario``, which takes the name of every scenario."""
        import pytest

        test.scenarios = self
        return pytest.mark.parametrize("scenario", list(self.functions))(test)

    @staticmethod
    def parametrize_ways(ways: dict[str, Scenarios]) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorate a test with parameters ``scenario`` and ``way``, which take the scenarios of every way."""
        import pytest

        cases = [(name, way) for way, scenarios in ways.items() for name in scenarios.functions]

        def decorate(test: Callable[..., None]) -> Callable[..., None]:
            test.scenarios = ways
            return pytest.mark.parametrize(("scenario", "way"), cases)(test)

        return decorate

    def select(self, name: str) -> None:
        """Run this scenario, and no other but those that are selected as well."""
        self._selected.append(name)

    def check(self, name: str) -> list[Any]:
        """Return a scenario's results in rank order. Fail if it raised on a rank, or did not run to its end on all ranks.

        The first call runs all scenarios, or those that are selected.
        """
        self._ran = self._ran or self._run()
        results, failures = self._ran
        if len(results[name]) == self.world_size:
            return [results[name][rank] for rank in range(self.world_size)]
        first = failures[0]
        # The first scenario that the rank did not end is the one in which it raised or died.
        failed = next(other for other in results if first.rank not in results[other])
        cause = f"{failed} failed on rank {first.rank}: {first.kind}: {first.message}"
        assert name == failed, f"{name} did not run to its end on all ranks: {cause}"
        consequences = f"\nthen on other ranks:\n{_report(failures[1:])}" if failures[1:] else ""
        raise AssertionError(f"{name} failed first on rank {first.rank}:\n{_report(failures[:1])}{consequences}")

    def _run(self) -> _Ran:
        options = dict(self._kwargs)
        limit_s = options.pop("limit_s", LIMIT_S)
        functions = {
            name: self.functions[name] for name in self.functions if not self._selected or name in self._selected
        }
        error: RankError | None = None
        with started_ranks(_run_scenarios, self.world_size, functions, *self._args, **options) as ranks:
            try:
                ranks.collect(limit_s, SCENARIO_GRACE_S)
            except RankError as raised:
                error = raised
            told = {rank.rank: rank.announced for rank in ranks}
        results = {
            name: {rank: texts[_ENDED + name] for rank, texts in told.items() if _ENDED + name in texts}
            for name in functions
        }
        if error is not None and all(error.errors[0].rank in ended for ended in results.values()):
            raise error  # the rank failed behind its last scenario
        return _Ran(results, ranks.failures())


class _Ran(NamedTuple):
    """How all scenarios ended: the results by name and rank, and what ranks raised, the first failure first."""

    results: dict[str, dict[int, Any]]
    failures: list[Failure]


_PREFIX = "scenario_"
_ENDED = "scenario ended: "


def scenarios_of(module: str) -> list[Callable[..., Any]]:
    """Return the scenarios of a module, in their order: its functions whose names begin with ``scenario_``."""
    return [function for name, function in vars(sys.modules[module]).items() if name.startswith(_PREFIX)]


def _run_scenarios(rank: int, functions: dict[str, Callable[..., Any]], *args: Any) -> None:
    for name, function in functions.items():
        announce(_ENDED + name, function(rank, *args))


def free_port() -> int:
    """Return a TCP port on which no process listens now, for a store that ranks make themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------------- ranks as the test sees them


class StartedRank:
    """One rank that runs, as the process of the test sees it.

    Attributes:
        announced: what it has announced so far: the texts, and the values with them.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self._receiver, sender = _context.Pipe(duplex=False)
        self.announced: dict[str, Any] = {}
        self._end: Result | Failure | None = None
        self._crash_file = crash_file(job, rank)
        self.process = _context.Process(target=rank_main, args=(sender, job, rank), daemon=True)
        self.process.start()
        # With this copy closed, the end of the rank's process closes the pipe, and reading from it raises EOFError.
        sender.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """Stop the process with SIGSTOP. It keeps its connections and does not answer: peers see it hang."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped process go on, with SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL, stopped or not. The kernel closes its connections: peers see it die."""
        os.kill(self.pid, signal.SIGKILL)

    def wait_for(self, text: str) -> None:
        """Wait until the rank has called ``announce(text)``.

        Raises:
            AssertionError: it ended before, or did not do so in time.
        """
        deadline = time.monotonic() + LIMIT_S
        while text not in self.announced:
            assert self._end is None, f"rank {self.rank} ended without announcing {text!r}: {self._end}"
            is_ready = self._receiver.poll(max(0.0, deadline - time.monotonic()))
            assert is_ready, f"rank {self.rank} did not announce {text!r} within {LIMIT_S:.0f} s"
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
            stacks = self._crash_file.read_text() if self._crash_file.exists() else ""
            code = self.process.exitcode
            message = Failure(self.rank, "ProcessDied", f"exit code {code}", stacks, time.monotonic())
        if isinstance(message, Announcement):
            self.announced[message.text] = message.value
        else:
            self._end = message


class StartedRanks(list[StartedRank]):
    """The ranks of one ``started_ranks``, by rank: ``ranks[2].stop()``."""

    def collect(self, limit_s: float = LIMIT_S, grace_s: float = GRACE_S) -> list[Any]:
        """Wait until all ranks have ended.

        Args:
            limit_s: seconds until ranks that have not ended count as failed.
            grace_s: the same, from the first failure on. Peers of a killed rank may need the ``timeout_s`` of the group to
                notice, and a stopped rank keeps the test waiting for this long.

        Returns and raises what ``run_ranks`` does.
        """
        # Ranks are read in the order in which they answer: the failure of one explains why others hang.
        deadline = time.monotonic() + limit_s
        while running := {rank._receiver: rank for rank in self if rank._end is None}:
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in running.values():
                    message = f"no result after {limit_s:.0f} s"
                    rank._end = Failure(rank.rank, "TimeoutError", message, "", time.monotonic())
            for receiver in ready:
                rank = running[receiver]
                rank._read()
                if isinstance(rank._end, Failure):
                    deadline = min(deadline, time.monotonic() + grace_s)
        if failures := self.failures():
            raise RankError(_report(failures), failures)
        return [rank._end.value for rank in self]

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

    def failures(self) -> list[Failure]:
        """Return how ranks failed, the first one first.

        A rank that died did so before its death was noticed, and for no fault of the others: it comes before those that raised.
        """
        failures = [rank._end for rank in self if isinstance(rank._end, Failure)]
        return sorted(failures, key=lambda failure: (failure.kind != "ProcessDied", failure.at_s))


def _report(failures: list[Failure]) -> str:
    """Return each distinct traceback once, with the ranks from which it came."""
    ranks_of: dict[tuple[str, str, str], list[int]] = {}
    for rank, kind, message, trace, _ in failures:
        ranks_of.setdefault((kind, message, trace), []).append(rank)
    return "\n".join(
        f"[ranks {sorted(ranks)}] {kind}: {message}\n{trace}" for (kind, message, trace), ranks in ranks_of.items()
    )
