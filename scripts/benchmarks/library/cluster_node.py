"""The server of one node of the emulated cluster (see ``cluster.py``): it imports once, then forks ranks.

``Cluster`` starts it inside the node's network namespace, as ``python -m library.cluster_node <node index>``. It ends
when the driver closes its connection, which happens at the latest when the driver ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing import current_process, get_context
from multiprocessing.connection import Client, Connection
from typing import Any

from library import one_gpu
from library.cluster import DEVICE_VARIABLE

PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "accelerate", "hf_zeropp")
GROUP_TIMEOUT = {"gloo": timedelta(minutes=30), "nccl": timedelta(minutes=2)}
"""The time that one collective may take. On a CPU with a slow link a single step of a large model takes minutes."""

_fork = get_context("fork")


def main() -> None:
    """Serve until the driver closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C, and closes the connection
    for module in PRELOAD:
        importlib.import_module(module)
    connection = _connect("node", int(sys.argv[1]))
    runs: dict[int, list[Any]] = {}
    while message := _next(connection):
        verb, run, *details = message
        if verb == "start":
            *start, num_ranks = details
            importlib.import_module(start[0].partition(":")[0])  # once here, and not in every rank
            runs[run] = [_start_rank(index, *start) for index in range(num_ranks)]
        else:
            _stop(runs.pop(run))
            connection.send("stopped")
    for processes in runs.values():
        _stop(processes)


def _connect(role: str, index: int) -> Connection:
    """Connect to the driver, and announce this process as a node or a rank with an index."""
    connection = Client(os.environ["CLUSTER_SOCKET"], "AF_UNIX")
    connection.send((role, index))
    return connection


def _next(connection: Connection) -> Any:
    """Return the driver's next message, or None after it has closed the connection."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _start_rank(local_rank: int, factory: str, args: tuple, environment: dict[str, str]) -> Any:
    rank = int(environment["FIRST_RANK"]) + local_rank
    variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    if os.environ[DEVICE_VARIABLE] == "cuda":
        variables |= one_gpu.rank_variables(rank)
    process = _fork.Process(target=_serve_rank, args=(rank, factory, args, variables), daemon=True)
    process.start()
    return process


def _stop(processes: list[Any]) -> None:
    """Wait for ranks, which end when the driver closes their connections, and kill those that do not."""
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _serve_rank(rank: int, factory: str, args: tuple, variables: dict[str, str]) -> None:
    """Make the served object, then call its methods as the driver asks, until the connection is closed."""
    os.environ.update(variables)
    # ``multiprocessing`` lets no daemon start processes, and offers no other way to lift that. A compiler may need some.
    current_process()._config["daemon"] = False
    connection = _connect("rank", rank)
    try:
        _initialize(rank)
        module, name = factory.split(":")
        served = getattr(importlib.import_module(module), name)(*args)
        connection.send((True, None))
        while message := _next(connection):
            method, arguments = message
            connection.send((True, getattr(served, method)(*arguments)))
    except BaseException:  # noqa: BLE001 - the driver shows it
        # The driver may have closed the connection already, after the traceback of another rank.
        with contextlib.suppress(OSError):
            connection.send((False, traceback.format_exc()))
    # This skips the interpreter's own exit, in which the process group may wait for peers that are gone.
    os._exit(0)


def _initialize(rank: int) -> None:
    import torch
    import torch.distributed as dist

    from hf_zeropp.comm.backend_variables import set_backend_variables

    set_backend_variables()  # as hf-zeropp launch does
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    backend = "gloo"
    if os.environ[DEVICE_VARIABLE] == "cuda":
        torch.cuda.set_device(0)
        backend = "nccl"
    dist.init_process_group(backend, rank=rank, timeout=GROUP_TIMEOUT[backend])


if __name__ == "__main__":
    main()
