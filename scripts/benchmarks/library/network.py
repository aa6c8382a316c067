"""The network of the emulated cluster: one network namespace per node, joined by links of any speed.

Every node is a network namespace with one interface, ``eth0``. Its other end is a port of a bridge, which lives in a
namespace of its own, ``switch``:

    node0: eth0 ---- port0 --+
                             +-- bridge   (in the namespace "switch")
    node1: eth0 ---- port1 --+

Ranks of one node talk over loopback, at the speed of memory; everything for another node crosses ``eth0``. The kernel's
own TCP runs over the kernel's own traffic shaper, so acknowledgements, retransmissions and blocking are part of what is
measured. All functions here expect to run inside the sandbox (``sandbox.py``).

A link has a rate, such as ``200mbit``, and may have a latency too: with ``200mbit+1ms`` a frame arrives at another node 1 ms
later, and a ping takes 2 ms longer. The cables of a cluster with latencies are processes (``delay_line.py``), also those of a
link ``200mbit+0ms``. Links of one kind are compared with each other.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from library import delay_line

INTERFACE = "eth0"
UNLIMITED = "unlimited"

_SWITCH = "switch"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class ClusterError(RuntimeError):
    """A rank raised, died or did not answer in time, or the kernel refused a part of the network."""


class NodeLink(NamedTuple):
    """The link of every node.

    Attributes:
        bits: per second, each way; None without a limit.
        latency_ms: from one node to another, added to what the emulated network needs by itself; None for cables that add none.
    """

    bits: float | None
    latency_ms: float | None

    @classmethod
    def parse(cls, text: str) -> NodeLink:
        """Return the link that a text such as ``200mbit``, ``unlimited`` or ``1gbit+10ms`` describes.

        Raises:
            ValueError: the text describes no link.
        """
        match = re.fullmatch(rf"(?:{UNLIMITED}|(\d+(?:\.\d+)?)(kbit|mbit|gbit))(?:\+(\d+(?:\.\d+)?)ms)?", text)
        if match is None:
            raise ValueError(f"expected a link such as 200mbit, 1gbit+10ms or {UNLIMITED}, got {text!r}")
        bits = float(match[1]) * _UNITS[match[2]] if match[1] else None
        return cls(bits, float(match[3]) if match[3] else None)


def have_latencies(links: Iterable[str]) -> bool:
    """Return whether links have latencies.

    Raises:
        ValueError: some of them have.
    """
    having = {NodeLink.parse(link).latency_ms is not None for link in links}
    if len(having) > 1:
        raise ValueError(f"expected a latency for every link or for none (+0ms adds none), got {', '.join(links)}")
    return having == {True}


def build(num_nodes: int, delayed: bool = False) -> list[subprocess.Popen]:
    """Make the bridge, and for every node a namespace whose ``eth0`` ends in a port of the bridge.

    Args:
        num_nodes: nodes, at most 254: their addresses are those of one /24 network.
        delayed: whether links have latencies.

    Returns:
        The process of each node's cable, for ``set_link``; none where links have no latencies.

    Raises:
        ClusterError: a command failed; the message holds the command and what it printed.
    """
    _run("ip netns add", _SWITCH)
    _run(f"ip -n {_SWITCH} link add bridge type bridge")
    _run(f"ip -n {_SWITCH} link set bridge up")
    cables = []
    for node in range(num_nodes):
        name, port = namespace(node), _port(node)
        _run("ip netns add", name)
        if delayed:
            cables.append(_delayed_cable(node))
        else:
            _run(f"ip -n {_SWITCH} link add {port} type veth peer name {INTERFACE} netns {name}")
        _run(f"ip -n {_SWITCH} link set {port} master bridge up")
        _run(f"ip -n {name} addr add {address(node)}/24 dev {INTERFACE}")
        _run(f"ip -n {name} link set {INTERFACE} up")
        _run(f"ip -n {name} link set lo up")
    return cables


def set_link(node: int, text: str, cable: subprocess.Popen | None = None) -> None:
    """Limit a node's link in both directions, and set its latency.

    Args:
        node: its number.
        text: describes the link: see ``NodeLink.parse``.
        cable: of the node, where links have latencies.

    Raises:
        ClusterError: the kernel has no ``tbf``.
        ValueError: the text describes no link, or one that the cluster was not built for.
    """
    link = NodeLink.parse(text)
    # The kernel shapes what leaves an interface, not what arrives. What a node receives is therefore shaped
    # where it leaves the bridge, at the other end of the node's link.
    for where, interface in ((namespace(node), INTERFACE), (_SWITCH, _port(node))):
        _shape(where, interface, link.bits)
    if cable is not None:
        # A frame for another node goes through two cables.
        print((link.latency_ms or 0.0) / 2e3, file=cable.stdin, flush=True)
    elif link.latency_ms is not None:
        raise ValueError(f"the cluster was built without latencies, got the link {text}")


def namespace(node: int) -> str:
    """Return the name of the network namespace of a node."""
    return f"node{node}"


def address(node: int) -> str:
    """Return the address of a node's ``eth0``."""
    return f"10.77.0.{node + 1}"


def bits_per_second(link: str) -> float | None:
    """Return the rate of a link: ``200mbit`` and ``200mbit+1ms`` have 2e8, ``unlimited`` has None.

    Raises:
        ValueError: the text describes no link.
    """
    return NodeLink.parse(link).bits


def speed(link: str) -> tuple[float, float]:
    """Return a key that sorts links: by bits per second, infinite for ``unlimited``, then by latency, the longest first."""
    bits, latency_ms = NodeLink.parse(link)
    return bits or math.inf, -(latency_ms or 0.0)


def rate_text(link: str) -> str:
    """Return how plots and tables name a link: ``200mbit`` is 200 Mbit/s, ``1gbit+10ms`` is 1 Gbit/s + 10 ms."""
    bits, latency_ms = NodeLink.parse(link)
    latency = "" if latency_ms is None else f" + {latency_ms:g} ms"
    if bits is None:
        return f"no limit{latency}"
    return (f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s") + latency


def link_bytes() -> dict[str, int]:
    """Read the counters of this node's link. Ranks call it; they run inside their node's namespace.

    ``/sys/class/net`` shows the interfaces of the network namespace in which ``/sys`` was mounted, and ``ip netns exec``
    mounts it anew for the node. The counters run from the start of the interface and are shared by the ranks of the
    node, so a measurement is the difference of two readings, with all ranks at a barrier at both. Whole frames are
    counted: payload, headers and the acknowledgements of the other direction. Frames between namespaces are not cut
    to 1500 bytes (the kernel leaves segmentation to a network card, and there is none), so headers are a few tenths of a
    per cent of the payload, less than on a wire.

    Returns:
        ``tx``: bytes sent so far; ``rx``: bytes received so far.
    """
    statistics = Path(f"/sys/class/net/{INTERFACE}/statistics")
    return {way: int((statistics / f"{way}_bytes").read_text()) for way in ("tx", "rx")}


def _delayed_cable(node: int) -> subprocess.Popen:
    """Start the process that is a node's cable, and give each of its ends to whom it belongs."""
    port, far = _port(node), f"far{node}"
    command = ["ip", "netns", "exec", _SWITCH, sys.executable, delay_line.__file__, port, far]
    cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cable.stdout is not None
    if cable.stdout.readline() != "ready\n":
        raise ClusterError(
            "a link with a latency needs /dev/net/tun and real-time priority (root has both); why it failed is above"
        )
    for interface in (port, far):
        _run(f"ip -n {_SWITCH} link set {interface} mtu {delay_line.MTU}")
    _run(f"ip -n {_SWITCH} link set {far} netns {namespace(node)} name {INTERFACE}")
    return cable


def _port(node: int) -> str:
    return f"port{node}"


def _shape(where: str, interface: str, bits: float | None) -> None:
    """Replace the queueing discipline of an interface by ``tbf``, or by none for no limit."""
    tc = f"tc -n {where} qdisc"
    subprocess.run(f"{tc} del dev {interface} root".split(), capture_output=True)
    if bits is None:
        return
    # ``tbf`` sends while it has tokens, and holds at most ``burst`` bytes of them. They must last from one tick
    # of the kernel's clock to the next (200 a second assumed), or the link would be slower than asked; and
    # they must cover several of the largest frames, of 64 KB. A larger burst would pass without being limited.
    burst = max(256_000, int(bits / 8 / 200))
    try:
        _run(f"{tc} add dev {interface} root tbf rate {bits:.0f}bit burst {burst} latency 50ms")
    except ClusterError as error:
        raise ClusterError(f"{error}\nRates need the kernel's sch_tbf.") from error


def _run(command: str, *arguments: str) -> None:
    words = [*command.split(), *arguments]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise ClusterError(f"`{' '.join(words)}` failed: {result.stderr.strip()}")
