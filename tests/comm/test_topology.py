"""How many ranks make a node: as launchers, hosts and settings say it. That groups are right shows in test_two_hops.py."""

import os

import pytest
from harness import run_ranks

import hf_zeropp.comm.hosts as hosts_module
from hf_zeropp.comm.hosts import Host, agree_on_nodes
from hf_zeropp.comm.topology import detect_ranks_per_node, resolve_hpz_size


def nodes_of_every_case(rank: int) -> list[tuple[str, list[str]]]:
    return [nodes_of_hosts(rank, *case) for *case, _ in HOSTS]


def nodes_of_hosts(
    rank: int, hosts: str, setting: int | str | list, local_sizes: list[int | None]
) -> tuple[str, list[str]]:
    """Agree on nodes, on a rank that runs on ``hosts[rank]`` and was told a local size. Return the outcome and warnings."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if local_sizes[rank] is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(local_sizes[rank])
    messages: list[str] = []
    hosts_module.logger.warning = lambda message, *args: messages.append(message % args)
    # A host cannot be faked from outside of the process: its id is the kernel's.
    hosts_module.this_host = lambda: Host(f"host-{hosts[rank]}", hosts[rank], (hosts[rank], ""), None)
    try:
        return str(agree_on_nodes(setting[rank] if isinstance(setting, list) else setting)), messages
    except ValueError as error:
        return str(error), messages


# The host of each rank, the setting, local sizes, and the outcome.
HOSTS: list[tuple[str, int | str | list, list[int | None], str]] = [
    ("aabb", "auto", [2] * 4, "2"),
    ("aaaa", 2, [4] * 4, "2"),
    ("aaaa", "auto", [4] * 4, "4"),
    (
        "abab",
        "auto",
        [2] * 4,
        "ranks 0 and 1 would share a node of 2 ranks, but run on different hosts (host-a, host-b)",
    ),
    ("abab", ["auto", 2, 2, 2], [2] * 4, "ranks 0 and 1 would share a node of 2 ranks"),
    ("aabb", 4, [2] * 4, "4"),
    ("aaab", "auto", [3, 3, 3, 1], "rank 0 says: LOCAL_WORLD_SIZE=3 must divide the world of 4"),
    ("aabb", "auto", [2, 2, 2, None], "rank 3 says: ranks_per_node"),
    ("aabc", "auto", [2, 2, 1, 1], "rank 0 has 2, rank 2 has 1"),
]


def test_nodes_are_made_of_hosts() -> None:
    """All ranks get the same answer, and none waits for a rank that objects."""
    for (hosts, setting, _, outcome), *ranks in zip(HOSTS, *run_ranks(nodes_of_every_case, 4), strict=True):
        assert len({said for said, _ in ranks}) == 1 and outcome in ranks[0][0], (hosts, setting, ranks)
        spans_hosts = hosts == "aabb" and setting == 4
        assert [len(messages) for _, messages in ranks] == [int(spans_hosts), 0, 0, 0], (hosts, setting, ranks)


def test_local_sizes_that_are_no_ranks_of_a_node_are_refused(monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert detect_ranks_per_node("auto", 1) == 1  # without a launcher
    for text in ("0", "two"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE={text} must divide the world of 4"):
            detect_ranks_per_node("auto", 4)


def test_hpz_size_follows_nodes_or_says_why_not() -> None:
    assert resolve_hpz_size("node", 4, 8) == 4
    assert resolve_hpz_size(None, 4, 8) is None
    assert [resolve_hpz_size(size, 4, 8) for size in (1, 2, 4, 8)] == [1, 2, 4, 8]
    with pytest.raises(ValueError, match="hpz_size=4 must divide the 6 ranks of a node"):
        resolve_hpz_size(4, 6, 12)
    with pytest.raises(ValueError, match="hpz_size=3 must divide the world of 4"):
        resolve_hpz_size(3, 2, 4)
