"""Where gloo waits for other ranks: on the interface that NCCL was given, and never where ranks of other hosts cannot connect."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from toy import make_lm, shard, train

import hf_zeropp.plan as plan_module
from hf_zeropp import apply_zeropp
from hf_zeropp.comm import gloo_address
from hf_zeropp.comm.gloo_address import INTERFACES, INTERFACES_OF_NCCL, names_for_nccl, take_interface_of_nccl
from hf_zeropp.comm.hosts import Host, check_gloo_connects, this_host

TESTS = Path(__file__).parent.parent
BENCHMARKS = TESTS.parent / "scripts/benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from library import network, sandbox  # noqa: E402

WHY_IMPOSSIBLE = sandbox.why_impossible() if sys.platform == "linux" else "this is not Linux."


# ---- The interface that NCCL was given.

NAMES = ["lo", "docker0", "eth0", "eth1", "eth10", "ib0"]


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth1,ib0", ["eth1", "ib0"]),
        ("ib,eth0", ["eth0", "ib0"]),
        ("eth0:4000,ib", ["eth0", "ib0"]),
        ("^docker,lo", ["eth0", "eth1", "eth10", "ib0"]),
        ("^=eth1,docker0,lo", ["eth0", "eth10", "ib0"]),
        ("wlan", []),
    ],
)
def test_names_are_selected_as_nccl_does(value: str, selected: list[str]) -> None:
    assert names_for_nccl(value, NAMES) == selected


@pytest.mark.parametrize(
    ("environ", "taken"),
    [
        ({INTERFACES_OF_NCCL: "eth"}, "eth1"),  # eth0 is down
        ({INTERFACES_OF_NCCL: "=eth0"}, None),
        ({INTERFACES_OF_NCCL: "ib"}, None),  # it has an address for the link alone
        ({INTERFACES_OF_NCCL: "^docker"}, "eth1"),  # though the loopback interface comes first
        ({INTERFACES_OF_NCCL: "=lo"}, "lo"),
        ({INTERFACES_OF_NCCL: "wlan"}, None),
        ({INTERFACES_OF_NCCL: "e"}, None),  # NCCL ignores it
        ({}, None),
        ({INTERFACES_OF_NCCL: "eth", INTERFACES: "ib0"}, "ib0"),
        ({INTERFACES_OF_NCCL: "eth", INTERFACES: ""}, ""),
    ],
)
def test_gloo_takes_the_first_that_is_up_and_has_an_address(environ, taken, monkeypatch: pytest.MonkeyPatch) -> None:
    one, up = namedtuple("one", "family address"), namedtuple("up", "isup")
    addresses = {
        "lo": [one(socket.AF_INET, "127.0.0.1"), one(socket.AF_INET6, "::1")],
        "eth0": [one(socket.AF_INET, "10.0.0.2")],
        "eth1": [one(socket.AF_INET, "10.0.1.2"), one(socket.AF_INET6, "fe80::1%eth1"), one(socket.AF_PACKET, "00:01")],
        "ib0": [one(socket.AF_INET6, "fe80::2%ib0")],
        "eth2": [one(socket.AF_PACKET, "00:02")],
    }
    monkeypatch.setattr(gloo_address.psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(
        gloo_address.psutil, "net_if_stats", lambda: {name: up(name != "eth0") for name in [*addresses, "bond0"]}
    )
    before = dict(environ)
    take_interface_of_nccl(environ)
    assert environ == before | ({} if taken is None else {INTERFACES: taken})


# ---- The address that gloo chooses.


def resolved(*addresses: str) -> list[tuple]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]


def test_gloo_waits_at_the_first_address_of_the_hosts_name_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of PyTorch's createDefaultDevice. 192.0.2.0/24 is nobody's."""

    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror("Name or service not known")

    for found, chosen in ((("192.0.2.99", "127.0.1.1", "127.0.0.1"), "127.0.1.1"), (("192.0.2.99",), "127.0.0.1")):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: resolved(*found))
        assert str(gloo_address.gloo_address({})) == chosen
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert str(gloo_address.gloo_address({})) == "127.0.0.1"
    assert str(gloo_address.gloo_address({INTERFACES: "lo,eth0"})) == "127.0.0.1"
    assert gloo_address.gloo_address({INTERFACES: "nonesuch"}) is None


def host(name: str, address: str | None, network: str = "") -> Host:
    return Host(name, name, (name, network), address and ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([host("a", "127.0.1.1"), host("a", "127.0.1.1")], None),
        ([host("a", "10.0.0.1"), host("b", "10.0.0.2")], None),
        ([host("a", None), host("b", "127.0.1.1")], None),  # gloo itself raises
        ([host("a", "127.0.1.1"), host("b", "127.0.1.1")], "rank 0 (a) at 127.0.1.1, rank 1 (b) at 127.0.1.1"),
        # The rank with the greater address connects to the other one.
        ([host("a", "127.0.1.1"), host("b", "10.0.0.2")], None),
        ([host("a", "127.0.1.1")] * 2 + [host("b", "192.168.0.2")], "ranks [0, 1] (a) at 127.0.1.1."),
        ([host("a", "::1"), host("b", "fd00::2")], "rank 0 (a) at ::1."),
        ([host("a", "::1"), host("b", "10.0.0.2")], None),  # gloo itself raises
        ([host("a", "127.0.1.1", "net:[1]"), host("a", "127.0.1.1", "net:[2]")], "ranks [0, 1] (a) at 127.0.1.1."),
    ],
)
def test_ranks_that_cannot_connect_are_named(hosts: list[Host], said: str | None) -> None:
    if said is None:
        check_gloo_connects(hosts, [range(len(hosts))])
        return
    with pytest.raises(ValueError, match="Name the interface of their common network in GLOO_SOCKET_IFNAME") as raised:
        check_gloo_connects(hosts, [range(len(hosts))])
    assert said in str(raised.value)
    check_gloo_connects(hosts, [[rank] for rank in range(len(hosts))])


def outcomes_on_hosts_that_resolve_to_loopback(rank: int) -> list[str]:
    """Train one node, two nodes with ZeRO++ switched off, and two nodes. Return for each that it trained, or the error."""
    own = this_host()
    # One machine plays two: each rank's namespace is the name of its host.
    network = (own.kernel, f"host-{rank // 2}")
    plan_module.this_host = lambda: Host(*network[::-1], network, ipaddress.ip_address("127.0.1.1"))
    outcomes = []
    for ranks_per_node, enabled in ((4, "1"), (2, "0"), (2, "1")):
        os.environ["ZEROPP_ENABLED"] = enabled
        model = shard(make_lm())
        try:
            handle = apply_zeropp(model, {"ranks_per_node": ranks_per_node})
        except ValueError as error:
            outcomes.append(str(error))
        else:
            loss = train(model, torch.optim.SGD(model.parameters()), rank, range(1), handle)[0]
            outcomes.append(f"loss {loss > 0}")
    return outcomes


def test_all_ranks_raise_where_this_package_would_make_a_group() -> None:
    by_rank = run_ranks(outcomes_on_hosts_that_resolve_to_loopback, 4)
    assert by_rank == by_rank[:1] * 4
    *trained, refused = by_rank[0]
    assert trained == ["loss True"] * 2
    assert "ranks [0, 1] (host-0) at 127.0.1.1, ranks [2, 3] (host-1) at 127.0.1.1" in refused


# ---- Network namespaces: two hosts whose name resolves to 127.0.1.1, with NCCL_SOCKET_IFNAME alone set.

DRIVER = """
import json, socket, subprocess, sys
sys.path.insert(0, {benchmarks!r})
from library.cluster import Cluster
from library.sandbox import enter_sandbox
enter_sandbox()

class WithoutGloosVariable(Cluster):
    def _rank_environment(self, node):
        variables = super()._rank_environment(node)
        del variables["GLOO_SOCKET_IFNAME"]
        return variables

open("/run/hosts", "w").write(f"127.0.1.1 {{socket.gethostname()}}\\n")
subprocess.run("mount --bind /run/hosts /etc/hosts".split(), check=True)  # in the sandbox alone
with WithoutGloosVariable(2, 1, {{"NCCL_SOCKET_IFNAME": "eth", "PYTHONPATH": {path!r}}}) as cluster:
    with cluster.start("test_gloo_address:TwoHosts") as ranks:
        for call in ("train", "apply_without_the_interface", "one_of_them_at_an_address_of_the_network"):
            print(json.dumps(ranks.call(call)), flush=True)
"""


class TwoHosts:
    """Served on the two ranks, each on a host of its own."""

    def train(self) -> tuple[str, int, float]:
        """Return gloo's interface, the bytes that crossed it while the model trained, and a loss."""
        before = network.link_bytes()["tx"]
        model = shard(make_lm(hidden=64, inner=64))
        handle = apply_zeropp(model)
        losses = train(model, torch.optim.SGD(model.parameters()), int(os.environ["RANK"]), range(3), handle)
        return os.environ[INTERFACES], network.link_bytes()["tx"] - before, losses[-1]

    def apply_without_the_interface(self) -> tuple[str, float]:
        """Return the error, and the seconds that it took, where neither variable is set."""
        del os.environ[INTERFACES], os.environ[INTERFACES_OF_NCCL]
        began = time.monotonic()
        try:
            apply_zeropp(shard(make_lm()))
        except ValueError as error:
            return str(error), time.monotonic() - began
        return "no error", time.monotonic() - began

    def one_of_them_at_an_address_of_the_network(self) -> tuple[str, float]:
        """Return a loss where the host of rank 1 is right: 10.77.0.2 is less than 127.0.1.1, so gloo connects."""
        if os.environ["RANK"] == "1":
            Path("/run/hosts1").write_text(f"{network.address(1)} {socket.gethostname()}\n")
            subprocess.run("mount --bind /run/hosts1 /etc/hosts".split(), check=True)
        model = shard(make_lm())
        handle = apply_zeropp(model)
        losses = train(model, torch.optim.SGD(model.parameters()), int(os.environ["RANK"]), range(1), handle)
        return str(gloo_address.gloo_address()), losses[-1]


@pytest.mark.thorough
@pytest.mark.skipif(WHY_IMPOSSIBLE is not None, reason=f"no network namespaces: {WHY_IMPOSSIBLE}")
def test_two_hosts_in_network_namespaces(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    path = os.pathsep.join(map(str, (TESTS / "comm", TESTS / "helpers", TESTS)))
    script.write_text(DRIVER.format(benchmarks=str(BENCHMARKS), path=path))
    environment = {name: value for name, value in os.environ.items() if name != INTERFACES} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trained, refused, mixed = map(json.loads, done.stdout.splitlines())
    assert all(name == "eth0" and crossed > 20_000 and loss > 0 for name, crossed, loss in trained), trained
    assert len({said for said, _ in refused}) == 1 and all(seconds < 10 for _, seconds in refused), refused
    assert f"ranks [0, 1] ({socket.gethostname()}) at 127.0.1.1" in refused[0][0]
    assert [address for address, _ in mixed] == ["127.0.1.1", "10.77.0.2"] and all(loss > 0 for _, loss in mixed)
