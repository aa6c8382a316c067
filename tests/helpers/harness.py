"""Real multi-process runs for tests: W gloo ranks, each a fresh process, forked from a server that imported all once.

``run_ranks(function, world_size, *args)`` calls ``function(rank, *args)`` on every rank and returns the results in
rank order. The function must be defined at module level (it travels by name). A rank that raises, dies or hangs fails
the test with every rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

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
GRACE_S = 20.0  # after a rank failed, what its peers get to notice
# Settings of the shell that runs the tests must not reach the ranks; ZEROPP_KERNELS picks the kernels under test.
FOREIGN_PREFIXES = ("ZEROPP_", "FSDP_", "ACCELERATE_", "HF_ACCELERATE_")
KEPT_VARIABLES = frozenset({"ZEROPP_KERNELS"})

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class RankError(AssertionError):
    """One or more ranks raised, died or hung. ``errors`` holds (rank, exception type name, message)."""

    def __init__(self, report: str, errors: list[tuple[int, str, str]]) -> None:
        super().__init__(report)
        self.errors = errors


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    init: bool = True,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` processes of one gloo group and return what they returned.

    Args:
        env: further environment variables of the ranks.
        init: False leaves ``init_process_group`` to the function (Accelerate does it).
        limit_s: seconds until ranks that have not ended are killed.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(function, rank, world_size, args, env or {}, init, folder, port) for rank in range(world_size)]
        return _collect(ranks, limit_s)


def expect_errors(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[str]:
    """Run and expect every rank to raise; return ``"Type: message"`` in rank order."""
    try:
        results = run_ranks(function, world_size, *args, **kwargs)
    except RankError as error:
        assert len(error.errors) == world_size, f"expected an error on all {world_size} ranks:\n{error}"
        return [f"{kind}: {message}" for _, kind, message in sorted(error.errors)]
    raise AssertionError(f"expected every rank to raise, got {results}")


def each_case(cases: Iterable[Any], check: Callable[[Any], None]) -> None:
    """Call ``check(case)`` for every case and fail once, naming all that failed.

    For ranks that go through many cases in one run. An assertion must stand behind the collectives of its case: the
    rank that fails goes on with the next case, as its peers do.
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

    A scenario is a function ``(rank, *args)`` of a module. All of them run one after the other in the same processes,
    each in its own try block; ``check(name)`` fails if that one raised, and returns what it returned.

        SCENARIOS = Scenarios(4, [freezing, clipping])

        @SCENARIOS.parametrize
        def test_features(scenario):
            SCENARIOS.check(scenario)

    A scenario that raises on some ranks only, in between collectives, spoils those behind it.
    """

    def __init__(self, world_size: int, functions: Iterable[Callable[..., Any]], *args: Any, **kwargs: Any) -> None:
        self.world_size = world_size
        self.functions = {function.__name__: function for function in functions}
        self._args = args
        self._kwargs = kwargs
        self._outcomes: list[dict[str, tuple[bool, Any]]] | None = None

    def parametrize(self, test: Callable[..., None]) -> Callable[..., None]:
        import pytest

        return pytest.mark.parametrize("scenario", list(self.functions))(test)

    def check(self, name: str) -> list[Any]:
        """What the scenario returned, in rank order."""
        if self._outcomes is None:
            functions = list(self.functions.values())
            self._outcomes = run_ranks(_run_scenarios, self.world_size, functions, *self._args, **self._kwargs)
        failures = {rank: told[name][1] for rank, told in enumerate(self._outcomes) if not told[name][0]}
        assert not failures, f"{name} failed on ranks {sorted(failures)}:\n" + "\n".join(sorted(set(failures.values())))
        return [told[name][1] for told in self._outcomes]


def _run_scenarios(rank: int, functions: list[Callable[..., Any]], *args: Any) -> dict[str, tuple[bool, Any]]:
    outcomes = {}
    for function in functions:
        try:
            outcomes[function.__name__] = (True, function(rank, *args))
        except Exception:  # noqa: BLE001 - the parent shows it
            outcomes[function.__name__] = (False, traceback.format_exc())
    return outcomes


def _start(function, rank, world_size, args, env, init, folder, port):
    receiver, sender = _context.Pipe(duplex=False)
    variables = _rank_environment(rank, world_size, port) | env
    process = _context.Process(
        target=_rank_main, args=(sender, function, rank, world_size, args, variables, init, folder), daemon=True
    )
    process.start()
    sender.close()
    return process, receiver


def free_port() -> int:
    """A TCP port nobody listens on now, for a store that ranks make themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _rank_main(sender, function, rank, world_size, args, variables, init, folder) -> None:
    for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES) and name not in KEPT_VARIABLES]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(0)
        if init:
            store = dist.FileStore(os.path.join(folder, "store"), world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
            )
        result = function(rank, *args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        sender.send_bytes(pickle.dumps((True, result)))  # tensors by value: the rank is gone when they are read
    except BaseException as error:  # noqa: BLE001 - the parent shows it
        failure = type(error).__name__, str(error), traceback.format_exc()
        sender.send_bytes(pickle.dumps((False, failure)))
    finally:
        sender.close()


def _collect(ranks, limit_s: float) -> list[Any]:
    results, failures = {}, []
    deadline = time.monotonic() + limit_s
    pending = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures += [(rank, "TimeoutError", f"no result after {limit_s:.0f} s", "") for rank in pending.values()]
            break
        for receiver in ready:
            rank = pending.pop(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except (EOFError, ConnectionResetError):
                succeeded, value = False, ("ProcessDied", f"exit code {_exit_code(ranks[rank][0])}", "")
            if succeeded:
                results[rank] = value
            else:
                failures.append((rank, *value))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    _stop(ranks, kill=bool(failures))
    if failures:
        raise RankError(_report(failures), [failure[:3] for failure in failures])
    return [results[rank] for rank in range(len(ranks))]


def _report(failures: list[tuple[int, str, str, str]]) -> str:
    """Each distinct traceback once, with the ranks it came from."""
    ranks_of: dict[tuple[str, str, str], list[int]] = {}
    for rank, *failure in failures:
        ranks_of.setdefault(tuple(failure), []).append(rank)
    return "\n".join(
        f"[ranks {ranks}] {kind}: {message}\n{trace}" for (kind, message, trace), ranks in ranks_of.items()
    )


def _exit_code(process) -> int | None:
    process.join(5)
    return process.exitcode


def _stop(ranks, kill: bool) -> None:
    for process, receiver in ranks:
        if kill:
            process.kill()
        process.join(20)
        receiver.close()
