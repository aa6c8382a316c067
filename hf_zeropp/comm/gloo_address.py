"""The address at which gloo waits for the other ranks of a group.

Agreements of the ranks run on groups of gloo's, also where the world is NCCL's (``topology.new_cpu_group``). gloo takes the
interfaces in ``GLOO_SOCKET_IFNAME``, or else the first address to which the host's own name resolves. Two things go wrong there:

- A cluster's scripts set ``NCCL_SOCKET_IFNAME`` alone. So gloo's variable gets its default from it (``backend_variables.py``).
- A host's name may resolve to a loopback address (Debian writes ``127.0.1.1`` into ``/etc/hosts``). A rank of another host is
  refused there, and the rank that waits for it does so for five times the group's timeout. So ranks tell each other their
  addresses before they make such a group, and all of them raise where it would not come about (``hosts.check_gloo_connects``).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping

import psutil

INTERFACES = "GLOO_SOCKET_IFNAME"
INTERFACES_OF_NCCL = "NCCL_SOCKET_IFNAME"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def take_interface_of_nccl(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo take the first interface that NCCL would take by its variable, unless gloo's own variable is set."""
    named = environ.get(INTERFACES_OF_NCCL, "")
    if INTERFACES in environ or len(named) < 2:  # NCCL ignores shorter ones
        return
    stats = psutil.net_if_stats()
    # gloo binds the first address of an interface. One for the link alone says nothing without the name of the other end's.
    able = {
        name: addresses[0]
        for name, addresses in _addresses().items()
        if addresses and not addresses[0].is_link_local and name in stats and stats[name].isup
    }
    matching = names_for_nccl(named, able)
    # A list of what to leave out leaves the loopback interface in, which comes first on every host.
    if best := sorted(matching, key=lambda name: able[name].is_loopback):
        environ[INTERFACES] = best[0]


def names_for_nccl(value: str, names: Iterable[str]) -> list[str]:
    """Return those of the interfaces that a value of ``NCCL_SOCKET_IFNAME`` selects.

    Args:
        value: prefixes of names, separated by commas; names behind a leading ``=``; what to leave out behind a leading ``^``.
        names: of the interfaces.
    """
    excludes, value = value.startswith("^"), value.removeprefix("^")
    is_exact, value = value.startswith("="), value.removeprefix("=")
    # A port may follow a colon.
    parts = [part for part in (each.partition(":")[0] for each in value.split(",")) if part]

    def matches(name: str) -> bool:
        return not parts or any(name == part if is_exact else name.startswith(part) for part in parts)

    return [name for name in names if matches(name) != excludes]


def gloo_address(environ: Mapping[str, str] = os.environ) -> Address | None:
    """Return the address at which gloo would wait in a group that is made now; None where it would find none and raise."""
    named = environ.get(INTERFACES, "")
    if len(named) > 1:  # gloo ignores shorter ones
        return next(iter(_addresses().get(named.partition(",")[0], [])), None)
    try:
        found = socket.getaddrinfo(socket.gethostname().encode(), None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        found = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return ipaddress.ip_address(str(address[0]))
    return ipaddress.ip_address("127.0.0.1")  # what PyTorch falls back to


def connects(one: Address, other: Address) -> bool:
    """Return whether ranks in different networks that wait at these addresses meet.

    The rank with the greater address connects to the other one (gloo's ``Device::isInitiator``), which alone has to be reached.
    """
    if one.version != other.version:
        return True  # gloo itself raises at once
    return not min(one, other, key=lambda address: address.packed).is_loopback


def _addresses() -> dict[str, list[Address]]:
    """Return the addresses of each interface, in the order in which gloo looks at them."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [ipaddress.ip_address(one.address) for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
