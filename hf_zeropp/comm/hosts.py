"""The hosts that ranks run on: are the ranks of a node really on one of them?

A node is N consecutive ranks. Launchers number ranks host by host, but a scheduler may deal them out in turns (SLURM's
``--distribution=cyclic``), and hosts may run different numbers of ranks. Exchanges "within the node" would then cross the
network, at every gather, and nothing would show it but the time. So ranks compare N and their hosts before they make groups.

They also compare where gloo would wait for them (``gloo_address.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from hf_zeropp.comm.exchange import exchange, ranks_by, words_of
from hf_zeropp.comm.gloo_address import INTERFACES, Address, connects, gloo_address
from hf_zeropp.comm.topology import detect_ranks_per_node

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine, as far as ranks tell machines apart.

    Attributes:
        name: its name, for people. Containers on one machine have names of their own.
        kernel: the id that the running kernel was given at boot, which its containers share; the name where there is none.
        network: the kernel, and the network namespace within it, which containers may have to themselves: ranks in one reach
            each other's loopback addresses.
        gloo: the address at which gloo would wait for other ranks; None where it finds none.
    """

    name: str
    kernel: str
    network: tuple[str, str]
    gloo: Address | None


def this_host() -> Host:
    """Return the machine that this process runs on."""
    name = kernel = socket.gethostname()
    namespace = ""
    with contextlib.suppress(OSError):  # not Linux
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    gloo = None
    with contextlib.suppress(OSError):  # the other ranks wait for this one to say what it can
        gloo = gloo_address()
    return Host(name, kernel, (kernel, namespace), gloo)


def agree_on_nodes(setting: int | str) -> int:
    """Return N as ``setting`` and the launcher say it on every rank. Collective over the world.

    Raises:
        ValueError: on every rank, if N is unknown on a rank, ranks differ in it, or nodes are not made of hosts.
    """
    ranks_per_node, error = 0, None
    try:
        ranks_per_node = detect_ranks_per_node(setting, dist.get_world_size())
    except ValueError as exception:  # the others must hear of it, or they would wait in the exchange for ever
        error = str(exception)
    views = exchange((ranks_per_node, error, setting, this_host()))
    for rank, (size, said, *_) in enumerate(views):
        if said is not None:
            raise ValueError(f"ZeRO++ cannot run: rank {rank} says: {said}")
        if size != views[0][0]:
            raise ValueError(
                f"Ranks must agree on ranks_per_node: rank 0 has {views[0][0]}, rank {rank} has {size}. Run the same number of "
                "ranks on every host, or set ranks_per_node to one number on all of them."
            )
    # The setting is rank 0's on all ranks, so all of them raise or none does. (The plan compares settings later.)
    check_hosts([host for *_, host in views], ranks_per_node, views[0][2])
    return ranks_per_node


def check_hosts(hosts: Sequence[Host], ranks_per_node: int, setting: int | str) -> None:
    """Raise if a node has ranks on two hosts; warn if that is what the settings ask for.

    Args:
        hosts: of all ranks, in rank order. Every rank must pass the same, so that all of them raise or none does.
        ranks_per_node: N.
        setting: where N comes from: "auto", or the number itself.

    Raises:
        ValueError: N was detected, and a node has ranks on two hosts.
    """
    for first in range(0, len(hosts), ranks_per_node):
        others = [rank for rank in range(first, first + ranks_per_node) if hosts[rank].kernel != hosts[first].kernel]
        if not others:
            continue
        said = f"ranks {first} and {others[0]} would share a node of {ranks_per_node} ranks"
        said += f", but run on different hosts ({hosts[first].name}, {hosts[others[0]].name})"
        if setting == "auto":
            raise ValueError(
                f"With ranks_per_node='auto' {said}: exchanges within the node would cross the network. Number the ranks host by "
                "host (SLURM: --distribution=block; MPI: --map-by slot), or set ranks_per_node yourself."
            )
        # Several hosts may well share a fast fabric (NVLink between the trays of a rack), so a number that the
        # configuration states is believed.
        if dist.get_rank() == 0:
            logger.warning(
                "With ranks_per_node=%s %s: what they exchange is counted as within the node.", setting, said
            )
        return


def check_gloo_connects(hosts: Sequence[Host], groups: Sequence[Sequence[int]]) -> None:
    """Raise where ranks of a group could not make it with gloo: they would wait for each other until its timeout.

    Args:
        hosts: of all ranks, in rank order. Every rank must pass the same, so that all of them raise or none does.
        groups: the ranks of each group that gloo is to make.

    Raises:
        ValueError: a rank would wait at a loopback address for ranks in another network.
    """
    if not any(host.gloo and host.gloo.is_loopback for host in hosts):
        return
    for ranks in groups:
        # Ranks in one network with one address fail or succeed together.
        places = ranks_by((rank, (hosts[rank].network, hosts[rank].gloo)) for rank in ranks)
        for (network, one), (other_network, other) in itertools.combinations(places, 2):
            if network != other_network and one is not None and other is not None and not connects(one, other):
                raise ValueError(_unreachable(hosts, ranks))


def _unreachable(hosts: Sequence[Host], ranks: Sequence[int]) -> str:
    at = ranks_by((rank, (hosts[rank].name, hosts[rank].gloo)) for rank in ranks)
    places = [
        f"{words_of(on)} ({name}) at {address}" for (name, address), on in at.items() if address and address.is_loopback
    ]
    return (
        f"Ranks agree by gloo on what they run next, and no rank of another host or container could connect to "
        f"{', '.join(places)}. Name the interface of their common network in {INTERFACES} (such as eth0) on every host, or let "
        "each host's name resolve to its address there (Debian's /etc/hosts has 127.0.1.1 for it)."
    )
