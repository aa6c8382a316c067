"""An emulated cluster on one Linux machine: nodes of several ranks, joined by links of any speed.

    enter_sandbox()                                    # once, early in main(); see sandbox.py
    with Cluster(num_nodes=2, ranks_per_node=2) as cluster:
        cluster.set_link("200mbit")
        with cluster.start("library.training_run:run_of", *settings) as ranks:
            results = ranks.call("measure", 5, 1)      # calls the method on every rank; results in rank order

Processes, from the outside in:

- the *driver* is the study: it makes the cluster, calls methods on ranks, and writes results;
- a *node server* (``cluster_node.py``) runs in each node's network namespace. It imports PyTorch once;
- *ranks* are forked by their node's server, so that a new run starts in a second instead of ten. All ranks of a run form
  one group, and each holds one *served object*, whose methods the driver calls.

Ranks compute on CPU and talk over gloo, or all compute on one GPU and talk over NCCL (``one_gpu.py``).

Driver, servers and ranks talk over one Unix socket. Network namespaces do not separate Unix sockets, so these messages
neither wait for the slow links nor appear in their counters.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from library import network, one_gpu
from library.network import INTERFACE, UNLIMITED, ClusterError, address, namespace

DEVICE_VARIABLE = "CLUSTER_DEVICE"
"""The environment variable that tells nodes and ranks where to compute: ``cpu`` or ``cuda``."""

START_LIMIT_S = 180.0
CALL_LIMIT_S = 3600.0
BENCHMARKS = Path(__file__).resolve().parent.parent
"""The folder from which ``library`` is imported."""


class Cluster:
    """A number of nodes with a number of ranks each. A context manager: nodes start on entry, everything ends on exit.

    Args:
        num_nodes: nodes.
        ranks_per_node: ranks of each node, in every run.
        env: environment variables of the ranks, beside those of this process.
        device: ``cpu``, or ``cuda`` for ranks that share one GPU.
        delayed: whether the links that ``set_link`` will set have latencies.
    """

    def __init__(
        self,
        num_nodes: int,
        ranks_per_node: int,
        env: dict[str, str] | None = None,
        device: str = "cpu",
        delayed: bool = False,
    ) -> None:
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self._delayed = delayed
        self._cables: list[subprocess.Popen] = []
        self._env = (env or {}) | {DEVICE_VARIABLE: device} | (one_gpu.NCCL if device == "cuda" else {})
        self._servers: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        self._port = 29500

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/run"))  # the sandbox's own
            self._listener = stack.enter_context(Listener(os.path.join(folder, "socket"), "AF_UNIX"))
            stack.callback(self._tear_down)
            self._cables = network.build(self.num_nodes, self._delayed)
            self._start_nodes()
            self._stack = stack.pop_all()  # nothing above has raised: the end is left to ``__exit__``
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def set_link(self, link: str = UNLIMITED) -> None:
        """Set every node's link in both directions, also for runs that exist. See ``network.set_link``."""
        for node in range(self.num_nodes):
            network.set_link(node, link, self._cables[node] if self._cables else None)

    @contextlib.contextmanager
    def start(self, factory: str, *args: Any) -> Iterator[Ranks]:
        """Start one process per rank, and end them when the context ends. Several runs may exist at once.

        Args:
            factory: ``module:name`` of a callable. Each rank calls it with ``args``, and serves the object it returns.
            args: arguments that can be pickled.

        Yields:
            The ranks, after all of them have made their object.

        Raises:
            ClusterError: a rank raised, died or was not ready in time.
        """
        # Each run has a store of its own, so it needs a port of its own. The number also names the run.
        self._port = run = self._port + 1
        for node, connection in enumerate(self._connections):
            connection.send(("start", run, factory, args, self._rank_environment(node), self.ranks_per_node))
        ranks = Ranks(self._accept("rank", self.num_nodes * self.ranks_per_node))
        try:
            ranks.collect(START_LIMIT_S)  # each sends an answer when its object is made
            yield ranks
        finally:
            # Ranks end with their connections. The servers answer when theirs have, so that whatever comes next has the
            # machine's memory and processors again.
            ranks.close()
            for connection in self._connections:
                connection.send(("stop", run))
                connection.recv()

    def _start_nodes(self) -> None:
        python_path = os.pathsep.join(filter(None, [str(BENCHMARKS), (os.environ | self._env).get("PYTHONPATH")]))
        # ``ip netns exec`` enters the node's network namespace and mounts its ``/sys``. Processes stay in the sandbox otherwise.
        environment = os.environ | self._env | {"CLUSTER_SOCKET": self._listener.address, "PYTHONPATH": python_path}
        for node in range(self.num_nodes):
            command = f"ip netns exec {namespace(node)}".split()
            command += [sys.executable, "-m", "library.cluster_node", str(node)]
            self._servers.append(subprocess.Popen(command, env=environment))
        self._connections = self._accept("node", self.num_nodes)

    def _accept(self, role: str, count: int) -> list[Connection]:
        """Return the connections of ``count`` processes that announce themselves as (role, index), in index order."""
        connections: dict[int, Connection] = {}
        deadline = time.monotonic() + START_LIMIT_S
        while len(connections) < count:
            # ``accept`` has no timeout. Waiting for its socket first leaves time to look after servers that have ended.
            if not wait([self._listener._listener._socket], timeout=1.0):
                self._check_servers(deadline, role)
                continue
            connection = self._listener.accept()
            announced, index = connection.recv()
            assert announced == role, f"expected a {role} to connect, got a {announced}"
            connections[index] = connection
        return [connections[index] for index in range(count)]

    def _check_servers(self, deadline: float, role: str) -> None:
        ended = [node for node, server in enumerate(self._servers) if server.poll() is not None]
        if ended:
            raise ClusterError(f"nodes {ended} ended; their output is above")
        if time.monotonic() > deadline:
            raise ClusterError(f"not every {role} started within {START_LIMIT_S:.0f} s")

    def _rank_environment(self, node: int) -> dict[str, str]:
        return {
            "FIRST_RANK": str(node * self.ranks_per_node),
            "WORLD_SIZE": str(self.num_nodes * self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            # Rank 0 keeps the store of the process group, through which ranks find each other.
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(self._port),
            # Otherwise gloo takes the address to which the host's name resolves. All nodes have the same host name.
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }

    def _tear_down(self) -> None:
        """End in an orderly way. The sandbox ends everything if this does not run, and frees the network."""
        for connection in self._connections:
            connection.close()  # a node server ends with its connection
        for server in self._servers:
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        for cable in self._cables:
            cable.communicate()  # it ends with its standard input


class Ranks:
    """The ranks of one run, each with a served object whose methods can be called.

    Args:
        connections: one for each rank, in rank order.
    """

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the served object on every rank at once, and return the results as ``collect`` does."""
        for connection in self._connections:
            connection.send((method, args))
        return self.collect(CALL_LIMIT_S)

    def close(self) -> None:
        """Close the connections. Ranks end when theirs is closed."""
        for connection in self._connections:
            connection.close()

    def collect(self, limit_s: float) -> list[Any]:
        """Return the next answer of each rank, in rank order.

        Raises:
            ClusterError: a rank raised (its traceback is in the message), died or did not answer in so many seconds.
        """
        results: dict[int, Any] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + limit_s
        # Answers are taken as they come: a rank that died must be reported at once, also when an earlier one waits for it.
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ClusterError(f"ranks {sorted(pending.values())} did not answer within {limit_s:.0f} s")
            for connection in ready:
                rank = pending.pop(connection)
                results[rank] = _receive(connection, rank)
        return [results[rank] for rank in range(len(self._connections))]


def _receive(connection: Connection, rank: int) -> Any:
    try:
        succeeded, value = connection.recv()
    except (EOFError, ConnectionResetError):
        raise ClusterError(f"rank {rank} died") from None
    if not succeeded:
        raise ClusterError(f"rank {rank} raised:\n{value}")
    return value
