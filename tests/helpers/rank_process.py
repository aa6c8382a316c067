"""The process of one rank that ``harness.py`` starts, and the messages that it sends to the test."""

from __future__ import annotations

import faulthandler
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

# Settings in the shell that runs the tests must not reach the ranks. ZEROPP_KERNELS may: it picks the kernels to test.
FOREIGN_PREFIXES = ("ZEROPP_", "FSDP_", "ACCELERATE_", "HF_ACCELERATE_")
KEPT_VARIABLES = frozenset({"ZEROPP_KERNELS"})


class Job(NamedTuple):
    """A function to run on ranks, and the surroundings in which it runs: see ``harness.run_ranks``.

    Attributes:
        folder: for the store of the process group, and for ``crash_file``.
        port: for a store that the function makes itself.
    """

    function: Callable[..., Any]
    world_size: int
    args: tuple
    env: dict[str, str]
    init: bool
    timeout_s: float
    folder: str
    port: int


class Announcement(NamedTuple):
    """A message of a rank that goes on: a text that tests wait for, and what it has to say about it."""

    text: str
    value: Any = None


class Result(NamedTuple):
    """The last message of a rank whose function returned."""

    value: Any


class Failure(NamedTuple):
    """The last message of a rank whose function raised, or what the test notes about one that died or hung.

    A rank that ended without a result has the kind ``ProcessDied``, and its exit code in the message (-9 for SIGKILL); one that
    gave no result in time has ``TimeoutError``.

    Attributes:
        kind: the exception's type name.
        at_s: when, on the clock that all processes of a machine share (``time.monotonic``). Ranks that fail since another
            one failed do so later.
    """

    rank: int
    kind: str
    message: str
    trace: str
    at_s: float


_to_test: Connection | None = None
"""In a rank, the connection to the test."""


def crash_file(job: Job, rank: int) -> Path:
    """Return the file in which a rank leaves the stacks of its threads when a signal such as SIGSEGV ends it."""
    return Path(job.folder, f"crash-{rank}.txt")


def announce(text: str, value: Any = None) -> None:
    """Tell the test how far this rank is. Ranks call it; the test calls ``StartedRank.wait_for`` with the same text."""
    assert _to_test is not None, "announce() was called outside of a rank"
    _to_test.send_bytes(pickle.dumps(Announcement(text, value)))


def rank_main(sender: Connection, job: Job, rank: int) -> None:
    """Run a rank: its environment, its process group, the function, and the last message to the test."""
    global _to_test
    _to_test = sender
    # A crash in compiled code ends the process without an exception. The file keeps where its threads were.
    faulthandler.enable(crash_file(job, rank).open("w"))
    _set_environment(job, rank)
    try:
        # ``sender.send`` would pass tensors as shared memory, which ends with this process. Plain pickle copies them.
        message = pickle.dumps(Result(_call(job, rank)))
    except BaseException as error:  # noqa: BLE001 - the test shows it
        failure = Failure(rank, type(error).__name__, str(error), traceback.format_exc(), time.monotonic())
        message = pickle.dumps(failure)
    sender.send_bytes(message)
    sender.close()


def _call(job: Job, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if job.init:
        store = dist.FileStore(os.path.join(job.folder, "store"), job.world_size)
        timeout = timedelta(seconds=job.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    result = job.function(rank, *job.args)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early breaks the connections of those that are still at work
        dist.destroy_process_group()
    return result


def _set_environment(job: Job, rank: int) -> None:
    for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES) and name not in KEPT_VARIABLES]:
        del os.environ[name]
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_WORLD_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job.port),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        | job.env
    )
