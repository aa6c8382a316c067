"""One node of the emulated cluster (see cluster.py): imports once, then forks the ranks of each run.

Started by `Cluster` inside the node's network namespace, as `cluster_node.py <node index>`. Talks to the driver over a
Unix socket, which network namespaces do not separate. Ends when the driver does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from multiprocessing import current_process, get_context
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "accelerate", "hf_zeropp")
GROUP_TIMEOUT_S = 1800
LINK_STATISTICS = Path("/sys/class/net/eth0/statistics")

_fork = get_context("fork")


def link_bytes() -> dict[str, int]:
    """What this node's link has carried so far: frames with all their headers, acknowledgements too."""
    return {way: int((LINK_STATISTICS / f"{way}_bytes").read_text()) for way in ("tx", "rx")}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business
    for module in PRELOAD:
        importlib.import_module(module)
    connection = _connect("node", int(sys.argv[1]))
    runs: dict[int, list[Any]] = {}
    while message := _next(connection):
        verb, run, *details = message
        if verb == "start":
            runs[run] = [_start_rank(index, *details) for index in range(details[-1])]
        else:
            _stop(runs.pop(run))
            connection.send("stopped")
    for processes in runs.values():
        _stop(processes)


def _connect(role: str, index: int) -> Connection:
    connection = Client(os.environ["CLUSTER_SOCKET"], "AF_UNIX")
    connection.send((role, index))
    return connection


def _next(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _start_rank(local_rank: int, factory: str, args: tuple, environment: dict[str, str], num_ranks: int) -> Any:
    rank = int(environment["FIRST_RANK"]) + local_rank
    variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    process = _fork.Process(target=_serve_rank, args=(rank, factory, args, variables), daemon=True)
    process.start()
    return process


def _stop(processes: list[Any]) -> None:
    """Ranks end by themselves when the driver closes their connection; those that hang are killed."""
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _serve_rank(rank: int, factory: str, args: tuple, variables: dict[str, str]) -> None:
    """Build the object, then call its methods as the driver asks."""
    os.environ.update(variables)
    current_process()._config["daemon"] = False  # a rank may have helper processes of its own
    connection = _connect("rank", rank)
    try:
        _initialize(rank)
        module, name = factory.split(":")
        served = getattr(importlib.import_module(module), name)(*args)
        connection.send((True, None))
        while message := _next(connection):
            method, positional, keywords = message
            connection.send((True, getattr(served, method)(*positional, **keywords)))
    except BaseException:  # noqa: BLE001 - the driver shows it
        with contextlib.suppress(OSError):  # unless it shows another rank's already
            connection.send((False, traceback.format_exc()))
    os._exit(0)  # peers may be gone already: no orderly farewell


def _initialize(rank: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, timeout=timedelta(seconds=GROUP_TIMEOUT_S))


if __name__ == "__main__":
    # Ranks import `cluster_node` by this name too: one module, not two.
    sys.modules["cluster_node"] = sys.modules["__main__"]
    main()
