"""Facts that matter on GPUs with NCCL, as far as a machine without one can show them."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import run_ranks
from toy import backward, make_lm, shard

from hf_zeropp import apply_zeropp
from hf_zeropp.comm import nccl
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.topology import broadcast_from_rank_0, get_topology, new_cpu_group, whole_world


def calls_of_rank(rank: int, ranks_per_node: int, settings: dict) -> list[tuple[str, str, int]]:
    """Train, and return the collectives of this rank's communicators in the order in which it issued them."""
    calls = []
    for name in ("all_gather", "all_to_all"):
        original = getattr(Hop, name)

        def noted(hop, output, wire, original=original, name=name):
            calls.append((hop.name, name, wire.numel()))
            return original(hop, output, wire)

        setattr(Hop, name, noted)
    model = shard(make_lm())
    handle = apply_zeropp(model, {"ranks_per_node": ranks_per_node, **settings})
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        for micro_step in range(2):
            handle.set_last_micro_step(micro_step == 1)
            backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return calls


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": False},
        {"overlap": False, "qgz_chunks": 3, "qwz_mode": "delta", "qwz_bits": 4},
        {"overlap": False, "qwz_mode": "exact"},
    ],
    ids=["default", "all", "exact"],
)
def test_every_rank_issues_the_same_collectives_in_the_same_order(settings):
    """NCCL can be told to keep the order of calls, but not to find one that all ranks have in common."""
    ranks = run_ranks(calls_of_rank, 4, 2, settings | {"shared_memory": False})
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


def test_the_order_is_asked_for_in_time(monkeypatch):
    environ = {}
    nccl.order_launches(environ)
    assert environ == {nccl.VARIABLE: "1"}
    chosen = {nccl.VARIABLE: "0"}
    nccl.order_launches(chosen)
    assert chosen == {nccl.VARIABLE: "0"}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    late = {}
    nccl.order_launches(late)
    assert late == {}


@pytest.mark.parametrize(
    ("version", "environ", "words"),
    [
        ((2, 25, 1), {nccl.VARIABLE: "1"}, "NCCL 2.25.1 may start"),
        ((2, 26, 2), {}, "NCCL_LAUNCH_ORDER_IMPLICIT is not set"),
        ((2, 26, 2), {nccl.VARIABLE: "0"}, "NCCL_LAUNCH_ORDER_IMPLICIT is 0"),
        ((2, 29, 1), {nccl.VARIABLE: "1"}, None),
    ],
)
def test_a_missing_order_is_told(caplog, monkeypatch, version, environ, words):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    with caplog.at_level(logging.WARNING):
        nccl.warn_of_any_order("cuda", environ)
        nccl.warn_of_any_order("cpu", {})
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])
