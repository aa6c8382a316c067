"""Facts that matter on GPUs with NCCL, as far as a machine without one can show them."""

import logging
import os
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from happens_before import Operation, checked_world
from harness import run_ranks
from toy import POLICIES, loss_of, make_lm, shard, tokens_of, train

from hf_zeropp import ZeroPPCallback, ZeroPPPlugin, apply_zeropp
from hf_zeropp.comm import nccl
from hf_zeropp.comm.gloo_address import INTERFACES, INTERFACES_OF_NCCL
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.topology import broadcast_from_rank_0, get_topology, new_cpu_group, whole_world
from hf_zeropp.integrations.launch.unmodified import put_in_force


def calls_of_rank(rank: int, ranks_per_node: int, settings: dict) -> list[tuple[str, str, int]]:
    """Train, and return the collectives of this rank's communicators in the order in which it issued them."""
    calls = []
    for name in ("all_gather", "all_to_all"):
        original = getattr(Hop, name)

        def noted(hop, output, wire, sent=(), original=original, name=name):
            calls.append((hop.name, name, wire.numel()))
            return original(hop, output, wire, sent)

        setattr(Hop, name, noted)
    model = shard(make_lm())
    handle = apply_zeropp(model, {"ranks_per_node": ranks_per_node, **settings})
    train(model, torch.optim.AdamW(model.parameters()), rank, range(3), handle, micro_steps=2)
    return calls


@pytest.mark.thorough("default", "delta")
@pytest.mark.parametrize(
    "settings", [{}, {"qwz_mode": "delta", "qwz_bits": 4}, {"qwz_mode": "exact"}], ids=["default", "delta", "exact"]
)
def test_every_rank_issues_the_same_collectives_in_the_same_order(settings):
    """NCCL can be told to keep the order of calls, but not to find one that all ranks have in common."""
    ranks = run_ranks(calls_of_rank, 4, 2, settings | {"overlap": False, "shared_memory": False})
    assert len({name for name, *_ in ranks[0]}) >= 4  # both hops, gathers and reductions
    if settings.get("qwz_mode") == "exact":
        # Changed words are padded to the longest wire of the cross group, and its ranks alone must send as many bytes.
        assert ranks[0] == ranks[2] and ranks[1] == ranks[3]
        ranks = [[call[:2] for call in calls] for calls in ranks]
    assert all(calls == ranks[0] for calls in ranks)


def only_gpu_tensors_move(rank: int, folder: str) -> dict[str, str]:
    """Return, by collective, the error of a world whose backend moves CUDA tensors alone."""
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=2)
    buffer = nn.Linear(2, 2).weight.data
    actions = {"broadcast": lambda: broadcast_from_rank_0(buffer), "topology": lambda: get_topology(1, "cuda")}
    errors = {}
    for name, action in (actions | {"agreement": lambda: new_cpu_group(whole_world())}).items():
        try:
            action()
        except (AssertionError, RuntimeError) as error:
            errors[name] = str(error)
    dist.destroy_process_group()
    return errors


def test_no_cpu_tensor_goes_to_a_group_for_gpus(tmp_path):
    """On a machine without CUDA each gets as far as the copy to the GPU. PyTorch refuses CPU tensors with other words."""
    if torch.cuda.is_available():
        pytest.skip("the copy to the GPU succeeds here")
    for errors in run_ranks(only_gpu_tensors_move, 2, str(tmp_path)):
        assert set(errors) == {"broadcast", "topology", "agreement"}
        assert all("No backend type" not in error for error in errors.values()), errors
        assert all("CUDA" in error or "NVIDIA" in error for error in errors.values()), errors


def variables_behind(rank: int, way: str) -> tuple[str | None, str | None, bool]:
    """Return both variables, and whether the order is known to have come late."""
    if way == "launch":
        put_in_force()
    elif way == "plugin":
        ZeroPPPlugin()
    elif way == "callback":
        ZeroPPCallback()
    elif way == "plain FSDP2":
        apply_zeropp(shard(make_lm()))
    return os.environ.get(nccl.VARIABLE), os.environ.get(INTERFACES), nccl._came_late


@pytest.mark.parametrize("way", ["import", "launch", "plugin", "callback", "plain FSDP2"])
def test_the_variables_are_set_where_the_package_is_asked_for_anything(way):
    """An import alone sets none of them. A script on plain FSDP2 has a process group by then."""
    is_late = way == "plain FSDP2"
    expected = (None, None, False) if way == "import" else ("1", "lo", is_late)
    assert run_ranks(variables_behind, 1, way, env={INTERFACES_OF_NCCL: "=lo"}, init=is_late) == [expected]


@pytest.mark.parametrize(
    ("hip", "before", "has_group", "behind", "came_late"),
    [
        (None, {}, False, {nccl.VARIABLE: "1"}, False),
        (None, {}, True, {nccl.VARIABLE: "1"}, True),
        (None, {nccl.VARIABLE: "0"}, False, {nccl.VARIABLE: "0"}, False),
        (None, {nccl.VARIABLE: "1"}, True, {nccl.VARIABLE: "1"}, False),
        # On ROCm ranks crash by it: [Note: one thread launches]. A value that somebody has chosen stays.
        ("7.1.52802", {}, True, {}, False),
        ("7.1.52802", {nccl.VARIABLE: "1"}, True, {nccl.VARIABLE: "1"}, False),
    ],
)
def test_the_order_is_asked_for_in_time(monkeypatch, hip, before, has_group, behind, came_late):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(nccl, "_came_late", False)
    monkeypatch.setattr(dist, "is_initialized", lambda: has_group)
    environ = dict(before)
    nccl.order_launches(environ)
    assert environ == behind and nccl._came_late == came_late


@pytest.mark.parametrize(
    ("version", "environ", "came_late", "hip", "words"),
    [
        ((2, 25, 1), {nccl.VARIABLE: "1"}, False, None, "NCCL 2.25.1 may start"),
        ((2, 25, 1), {}, False, "7.1.52802", None),
        ((2, 26, 2), {}, False, None, "NCCL_LAUNCH_ORDER_IMPLICIT is not set"),
        ((2, 26, 2), {nccl.VARIABLE: "0"}, False, None, "NCCL_LAUNCH_ORDER_IMPLICIT is 0"),
        ((2, 29, 1), {nccl.VARIABLE: "1"}, True, None, "was set after the process group was made"),
        ((2, 29, 1), {nccl.VARIABLE: "1"}, False, None, None),
    ],
)
def test_an_order_that_is_missing_or_came_too_late_is_told(
    caplog, monkeypatch, version, environ, came_late, hip, words
):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(nccl, "_came_late", came_late)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    with caplog.at_level(logging.WARNING):
        nccl.warn_of_any_order("cuda", environ)
        nccl.warn_of_any_order("cpu", {})
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])


KINDS = {
    "_allgather_base_": "gather",
    "allgather_into_tensor_coalesced_": "gather",  # native node hops
    "alltoall_base_": "reduction",
    "reduce_scatter_tensor_coalesced_": "reduction",  # native node hops
}


def all_unordered_pairs(rank: int, settings: dict) -> set[frozenset[str]]:
    """Return the pairs with secondary shards, and without."""
    return unordered_pairs(settings) | unordered_pairs(settings | {"hpz_size": None})


def unordered_pairs(settings: dict) -> set[frozenset[str]]:
    """Train under the happens-before checker; return the kinds of collectives of two communicators that nothing orders."""
    collectives, sizes = [], {2: "cross", 8: "node"}

    def observe(operation: Operation) -> None:
        name = operation.func._overloadpacket.__name__
        if operation.func.namespace == "c10d" and name in KINDS:
            group = dist.ProcessGroup.unbox(operation.arguments["process_group"])
            if group.size() in sizes:  # torch 2.15 exchanges objects of the world by one of these collectives
                collectives.append((f"a {sizes[group.size()]} hop of a {KINDS[name]}", operation))

    with checked_world(16, observe):
        model = shard(make_lm(depth=3), POLICIES["bf16"])
        handle = apply_zeropp(model, {"ranks_per_node": 8, **settings})
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for step in range(3):
            for micro_step in range(2):
                handle.set_last_micro_step(micro_step == 1)
                loss_of(model, tokens_of(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = set()
    for index, (second, later) in enumerate(collectives):
        for first, earlier in collectives[:index]:
            is_before = later.clock.get(earlier.stream, 0) >= earlier.clock[earlier.stream]
            if not is_before and first.split()[1] != second.split()[1]:
                pairs.add(frozenset((first, second)))
    return pairs


def documented_pairs() -> set[frozenset[str]]:
    """Return the pairs that the module names."""
    lines = [re.match(r"- (a [^;,.]*)", line) for line in nccl.__doc__.splitlines()]
    return {frozenset(line[1].replace("another", "a").split(" beside ")) for line in lines if line}


@pytest.mark.parametrize("overlap", [True, False])
def test_pairs_that_may_run_together_are_those_that_the_module_names(overlap):
    """Hops on one stream run beside those of the other direction alone."""
    [found] = run_ranks(all_unordered_pairs, 1, {"overlap": overlap}, init=False)
    named = documented_pairs()
    assert len(named) == 4
    assert found == {pair for pair in named if overlap or len({hop.split()[-1] for hop in pair}) == 2}
