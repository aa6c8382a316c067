"""The network of the emulated cluster: one network namespace per node, joined by links of any speed.

Every node is a network namespace with one interface, ``eth0``. Its other end is a port of a bridge, which lives in a
namespace of its own, ``switch``:

    node0: eth0 ---- port0 --+
                             +-- bridge   (in the namespace "switch")
    node1: eth0 ---- port1 --+

Ranks of one node talk over loopback, at the speed of memory; everything for another node crosses ``eth0``. The kernel's
own TCP runs over the kernel's own traffic shaper, so acknowledgements, retransmissions and blocking are part of what is
measured. All functions here expect to run inside the sandbox (``sandbox.py``).
"""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

INTERFACE = "eth0"
UNLIMITED = "unlimited"

_SWITCH = "switch"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class ClusterError(RuntimeError):
    """A rank raised, died or did not answer in time, or the kernel refused a part of the network."""


def build(num_nodes: int) -> None:
    """Make the bridge, and for every node a namespace whose ``eth0`` ends in a port of the bridge.

    Args:
        num_nodes: nodes, at most 254: their addresses are those of one /24 network.

    Raises:
        ClusterError: a command failed; the message holds the command and what it printed.
    """
    _run("ip netns add", _SWITCH)
    _run(f"ip -n {_SWITCH} link add bridge type bridge")
    _run(f"ip -n {_SWITCH} link set bridge up")
    for node in range(num_nodes):
        name, port = namespace(node), _port(node)
        _run("ip netns add", name)
        _run(f"ip -n {_SWITCH} link add {port} type veth peer name {INTERFACE} netns {name}")
        _run(f"ip -n {_SWITCH} link set {port} master bridge up")
        _run(f"ip -n {name} addr add {address(node)}/24 dev {INTERFACE}")
        _run(f"ip -n {name} link set {INTERFACE} up")
        _run(f"ip -n {name} link set lo up")


def set_link(node: int, rate: str) -> None:
    """Limit a node's link in both directions.

    Args:
        node: its number.
        rate: such as ``200mbit``; see ``bits_per_second``.

    Raises:
        ClusterError: the kernel has no ``tbf``.
        ValueError: ``rate`` is not a rate.
    """
    bits = bits_per_second(rate)
    # The kernel shapes what leaves an interface, not what arrives. What a node receives is therefore shaped
    # where it leaves the bridge, at the other end of the node's link.
    for where, interface in ((namespace(node), INTERFACE), (_SWITCH, _port(node))):
        _shape(where, interface, bits)


def namespace(node: int) -> str:
    """Return the name of the network namespace of a node."""
    return f"node{node}"


def address(node: int) -> str:
    """Return the address of a node's ``eth0``."""
    return f"10.77.0.{node + 1}"


def bits_per_second(rate: str) -> float | None:
    """Parse a rate: ``200mbit`` is 2e8, ``unlimited`` is None.

    Raises:
        ValueError: the text is not a rate.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"expected a rate such as 200mbit, 1gbit or {UNLIMITED}, got {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


def speed(rate: str) -> float:
    """Return a rate in bits per second, infinite for ``unlimited``: a key that sorts rates."""
    return bits_per_second(rate) or math.inf


def rate_text(rate: str) -> str:
    """Return how plots and tables name a rate: ``200mbit`` is 200 Mbit/s."""
    bits = bits_per_second(rate)
    if bits is None:
        return "no limit"
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


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
