"""The node group and the cross group of every rank, for several worlds and every node size."""

import os

import pytest
import torch.distributed as dist
from harness import run_ranks

import hf_zeropp.comm.hosts as hosts_module
from hf_zeropp.comm.hosts import Host, agree_on_nodes
from hf_zeropp.comm.topology import detect_ranks_per_node, get_topology, resolve_hpz_size

DIVISORS = {2: [1, 2], 3: [1, 3], 4: [1, 2, 4], 6: [1, 2, 3, 6]}


def groups_of_rank(rank: int, world_size: int) -> list[tuple[int, list[int], list[int]]]:
    found = []
    for ranks_per_node in DIVISORS[world_size]:
        topology = get_topology(ranks_per_node, "cpu")
        assert get_topology(ranks_per_node, "cpu") is topology
        assert (topology.rank, topology.num_ranks) == (rank, world_size)
        node = dist.get_process_group_ranks(topology.node_group)
        cross = dist.get_process_group_ranks(topology.cross_group)
        found.append((ranks_per_node, node, cross))
    return found


@pytest.mark.thorough("6", "3")
@pytest.mark.parametrize("world_size", DIVISORS)
def test_rank_r_is_y_times_n_plus_x(world_size: int) -> None:
    for rank, found in enumerate(run_ranks(groups_of_rank, world_size, world_size)):
        for ranks_per_node, node, cross in found:
            y, x = divmod(rank, ranks_per_node)
            assert node == [y * ranks_per_node + i for i in range(ranks_per_node)]
            assert cross == [i * ranks_per_node + x for i in range(world_size // ranks_per_node)]


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


def test_one_rank_without_a_launcher_is_one_node(monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert detect_ranks_per_node("auto", 1) == 1


@pytest.mark.parametrize("text", ["0", "two"])
def test_a_size_that_is_no_number_of_ranks_is_refused(monkeypatch, text: str) -> None:
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
