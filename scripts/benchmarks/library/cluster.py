"""An emulated cluster on one Linux machine: Y nodes x N ranks, with a link between nodes as slow as you like.

Every node is a network namespace with one interface, `eth0`, joined to a bridge that lives in a namespace of its own.
`tc` limits each link in both directions. Ranks of a node talk over loopback, at memory speed; what goes to another node
crosses `eth0`, and the interface counters say how much that was. Nothing of this is a model of a network: it is the
kernel's own TCP over the kernel's own shaper, so acknowledgements, retransmissions and blocking are in the figures.

    enter_sandbox()                                    # once, first thing in main(); returns in the sandbox
    with Cluster(num_nodes=2, ranks_per_node=2) as cluster:
        cluster.set_link(rate="200mbit")
        with cluster.start("training_run:TrainingRun", settings) as ranks:
            results = ranks.call("measure", steps=5)   # the method, on every rank's object; results in rank order

[Note: nothing is left behind]
Cleaning up by hand fails exactly when it matters: after SIGKILL. So the whole program runs in private mount, PID and
network namespaces (`unshare`), and names of network namespaces live on a tmpfs inside. When the program ends, however
it ends, the kernel kills every process within and frees every interface. The machine's own network is never touched:
from inside, it cannot even be seen. Without root the same works in a user namespace, where the machine allows those.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

SANDBOX_MARK = "CLUSTER_SANDBOX"
SWITCH = "switch"
INTERFACE = "eth0"
NODE_SCRIPT = Path(__file__).with_name("cluster_node.py")
START_LIMIT_S = 180.0
UNLIMITED = "unlimited"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class ClusterError(RuntimeError):
    """A rank raised, died or did not answer; or the machine refuses network namespaces."""


# ---------------------------------------------------------------------------------------------------------- the sandbox


def why_impossible() -> str | None:
    """Why this machine cannot run the emulated cluster, or None when it can. Tries it, which takes milliseconds."""
    missing = [tool for tool in ("unshare", "ip", "tc", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux."
    probe = "mount -t tmpfs tmpfs /run && ip netns add probe && ip link add v0 type veth peer name v1 netns probe"
    trial = subprocess.run([*_unshare(), "sh", "-c", probe], capture_output=True, text=True)
    if trial.returncode == 0:
        return None
    reason = (trial.stderr.strip().splitlines() or ["unknown"])[-1]
    return f"the kernel refuses network namespaces ({reason}): run as root, or allow user namespaces."


def enter_sandbox() -> None:
    """Run this program once more inside private namespaces, and exit with its status. Returns at once when inside.

    See [Note: nothing is left behind].
    """
    if os.environ.get(SANDBOX_MARK):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    if reason := why_impossible():
        raise SystemExit(f"No emulated cluster on this machine: {reason}")
    sys.stdout.flush()
    command = [*_unshare(), sys.executable, *sys.argv]
    inside = subprocess.Popen(command, env=os.environ | {SANDBOX_MARK: "1"}, preexec_fn=_die_with_parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the inside too, which ends in an orderly way
    signal.signal(signal.SIGTERM, lambda *_: inside.kill())  # unshare itself ignores SIGTERM
    status = inside.wait()
    raise SystemExit(status if status >= 0 else 128 - status)


def _die_with_parent() -> None:
    """SIGKILL for this process when its parent ends, however that ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _unshare() -> list[str]:
    """The command prefix that gives a program its own mounts, processes and network, and kills all of it at the end."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


# ---------------------------------------------------------------------------------------------------------- the cluster


def bits_per_second(rate: str) -> float | None:
    """`200mbit` -> 2e8; None for `unlimited`.

    Raises:
        ValueError: the text is no rate.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"expected a rate such as 200mbit, 1gbit or {UNLIMITED}, got {rate!r}")
    return float(match[1]) * UNITS[match[2]]


class Cluster:
    """Y nodes x N ranks. A context manager: nodes start on entry, and everything ends on exit.

    Args:
        env: further environment variables of the ranks.
    """

    def __init__(self, num_nodes: int, ranks_per_node: int, env: dict[str, str] | None = None) -> None:
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self._env = env or {}
        self._servers: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        self._port = 29500

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def __enter__(self) -> Cluster:
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/run"))  # the sandbox's own
        self._listener = self._stack.enter_context(Listener(os.path.join(folder, "socket"), "AF_UNIX"))
        self._stack.callback(self._tear_down)
        self._build_network()
        self._start_nodes()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def set_link(self, rate: str = UNLIMITED, delay: str | None = None) -> None:
        """Limit every node's link, both ways. `delay` (such as 1ms) is added to each packet, in each direction.

        Raises:
            ClusterError: the kernel has no shaper (tbf), or none for delays (netem).
        """
        bits = bits_per_second(rate)
        for node in range(self.num_nodes):
            for namespace, interface in ((_node(node), INTERFACE), (SWITCH, f"port{node}")):
                _shape(namespace, interface, bits, delay)

    @contextlib.contextmanager
    def start(self, factory: str, *args: Any, env: dict[str, str] | None = None) -> Iterator[Ranks]:
        """Start one process per rank, in one gloo group, each with an object made by `factory(*args)`.

        Args:
            factory: `module:name` of a callable; the module lies beside this one or is importable.
            env: further environment variables of these ranks.
        """
        self._port = run = self._port + 1
        for node, connection in enumerate(self._connections):
            connection.send(
                ("start", run, factory, args, self._rank_environments(node) | (env or {}), self.ranks_per_node)
            )
        ranks = Ranks(self._accept("rank", self.world_size))
        try:
            ranks.wait_until_ready()
            yield ranks
        finally:
            ranks.close()
            for connection in self._connections:
                connection.send(("stop", run))
                connection.recv()

    def _build_network(self) -> None:
        _run("ip netns add", SWITCH)
        _run(f"ip -n {SWITCH} link add bridge type bridge")
        _run(f"ip -n {SWITCH} link set bridge up")
        for node in range(self.num_nodes):
            name, port = _node(node), f"port{node}"
            _run("ip netns add", name)
            _run(f"ip -n {SWITCH} link add {port} type veth peer name {INTERFACE} netns {name}")
            _run(f"ip -n {SWITCH} link set {port} master bridge up")
            _run(f"ip -n {name} addr add {_address(node)}/24 dev {INTERFACE}")
            _run(f"ip -n {name} link set {INTERFACE} up")
            _run(f"ip -n {name} link set lo up")

    def _start_nodes(self) -> None:
        """One server per node: it imports everything once and forks the ranks of each run."""
        environment = os.environ | self._env | {"CLUSTER_SOCKET": self._listener.address}
        for node in range(self.num_nodes):
            command = ["ip", "netns", "exec", _node(node), sys.executable, str(NODE_SCRIPT), str(node)]
            self._servers.append(subprocess.Popen(command, env=environment))
        self._connections = self._accept("node", self.num_nodes)

    def _accept(self, role: str, count: int) -> list[Connection]:
        """Connections of `count` processes that announce themselves as (role, index), in index order."""
        connections: dict[int, Connection] = {}
        deadline = time.monotonic() + START_LIMIT_S
        while len(connections) < count:
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

    def _rank_environments(self, node: int) -> dict[str, str]:
        return {
            "FIRST_RANK": str(node * self.ranks_per_node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def _tear_down(self) -> None:
        """Orderly end; the sandbox sees to the disorderly one."""
        for connection in self._connections:
            connection.close()  # a node server ends with its connection
        for server in self._servers:
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        for name in (*map(_node, range(self.num_nodes)), SWITCH):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Ranks:
    """The processes of one run, each with one object whose methods can be called."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        self._collect(limit_s)

    def call(self, method: str, *args: Any, limit_s: float = 3600.0, **kwargs: Any) -> list[Any]:
        """Call the method on every rank at once; the results in rank order.

        Raises:
            ClusterError: a rank raised (its traceback is the message), died or did not answer in time.
        """
        for connection in self._connections:
            connection.send((method, args, kwargs))
        return self._collect(limit_s)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _collect(self, limit_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + limit_s
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


def _node(node: int) -> str:
    return f"node{node}"


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _shape(namespace: str, interface: str, bits: float | None, delay: str | None) -> None:
    """Replace the interface's queueing discipline: netem for the delay outside, tbf for the rate within."""
    tc = f"tc -n {namespace} qdisc"
    subprocess.run(f"{tc} del dev {interface} root".split(), capture_output=True)
    try:
        if delay is not None:
            _run(f"{tc} add dev {interface} root handle 1: netem delay {delay} limit 100000")
        if bits is not None:
            place = "root" if delay is None else "parent 1:1"
            burst = max(256_000, int(bits / 8 / 200))  # what the link carries between two ticks of a 200 Hz clock
            _run(f"{tc} add dev {interface} {place} tbf rate {bits:.0f}bit burst {burst} latency 50ms")
    except ClusterError as error:
        raise ClusterError(f"{error}\nRates need the kernel's sch_tbf, delays its sch_netem.") from error


def _run(command: str, *arguments: str) -> None:
    words = [*command.split(), *arguments]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise ClusterError(f"`{' '.join(words)}` failed: {result.stderr.strip()}")
