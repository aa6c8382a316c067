"""A hop that fails, or that brings damaged words, is named with its unit and its ranks, and so is a rank that does not come."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankError, expect_errors, run_ranks, started_ranks
from toy import EXACT, POLICIES, backward, make_lm, shard, train

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.comm import agreement, two_hop_gather
from hf_zeropp.comm.hop import Hop
from hf_zeropp.fsdp.weights.copy import State
from hf_zeropp.fsdp.weights.freshness import Change
from hf_zeropp.ops import changes_format
from hf_zeropp.traffic import GATHER_CROSS, GATHER_NODE, REDUCE_CROSS, REDUCE_NODE

TIMEOUT_S = 10.0
CONFIG = EXACT | {"hpz_size": "node", "qwz_intra_bits": None, "ranks_per_node": 2}


def new_model(**settings: Any) -> tuple[torch.nn.Module, ZeroPPHandle]:
    model = shard(make_lm())
    return model, apply_zeropp(model, CONFIG | settings)


def errors_of_the_others(function: Callable[..., Any], *args: Any, dead: int, **kwargs: Any) -> dict[int, str]:
    """Run ``function``, in which rank ``dead`` ends or hangs. Return what the others raised, by rank."""
    with pytest.raises(RankError) as failure, started_ranks(function, 4, *args, timeout_s=TIMEOUT_S, **kwargs) as ranks:
        ranks.collect(grace_s=4 * TIMEOUT_S)
    return {one.rank: f"{one.kind}: {one.message}" for one in failure.value.errors if one.rank != dead}


# Hops.


def dies_in_a_hop(rank: int, name: str, overlap: bool) -> None:
    """Rank 3 dies when it is to start the first hop of that name for the second time."""
    model, _ = new_model(overlap=overlap)
    start, calls = Hop._start, []

    def dying(hop: Hop, *args: Any) -> Any:
        if rank == 3 and hop.name == name:
            calls.append(1)
            if len(calls) == 2:
                os._exit(1)
        return start(hop, *args)

    Hop._start = dying  # type: ignore[method-assign]
    backward(model, rank)
    backward(model, rank)


@pytest.mark.thorough("*blocking", "gather, within*", "reduce, across*")
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize(
    "name, before, unit, ranks",
    [
        (GATHER_CROSS, "(root)", "blocks.0", [1, 3]),
        (GATHER_NODE, "(root)", "blocks.0", [2, 3]),
        (REDUCE_CROSS, "blocks.1", "blocks.0", [1, 3]),
        (REDUCE_NODE, "blocks.1", "blocks.0", [2, 3]),
    ],
)
def test_an_error_names_unit_and_hop_and_ranks(name, before, unit, ranks, overlap):
    peer = ranks[0]
    error = errors_of_the_others(dies_in_a_hop, name, overlap, dead=3)[peer]
    # Bytes of the hop before may be on their way when the rank dies.
    named = {f"HopError: Unit {one}" for one in ((before, unit) if overlap else (unit,))}
    assert error.split(": the hop")[0] in named, error
    assert f": the hop {name!r} of ranks {ranks} failed on rank {peer}" in error


def ignores_the_agreement(rank: int) -> None:
    """A planted fault: rank 1 believes that the second block is fresh, whatever the others say."""
    model, handle = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, rank, (0,))
    copy = handle.gathers[2].copy
    agree = copy.agree

    def agree_and_forget(change: Change) -> None:
        agree(change)
        copy.state = State.FRESH

    if rank == 1:
        copy.agree = agree_and_forget  # type: ignore[method-assign]
    train(model, optimizer, rank, (1,))


@pytest.mark.thorough
def test_the_check_names_a_rank_that_goes_its_own_way():
    for error in expect_errors(ignores_the_agreement, 4, env={"ZEROPP_CHECK": "1"}, timeout_s=30.0):
        assert "unit blocks.1 differs: ranks [0, 2, 3]: due for STEPPED; rank 1: due for NONE" in error


# Agreements.


def data_ends_earlier(rank: int, then: str) -> None:
    """Rank 2 has one batch less than the others."""
    model, _ = new_model()
    for _ in range(1 if rank == 2 else 2):
        backward(model, rank)
    if rank == 2 and then == "leaves":
        os._exit(0)
    dist.barrier()  # of a checkpoint, say


@pytest.mark.thorough("goes on")
@pytest.mark.parametrize("then", ["leaves", "goes on"])
def test_a_rank_without_data_is_named(then):
    errors = errors_of_the_others(data_ends_earlier, then, dead=2)
    # A rank that leaves may take along what it had to say at the end of its last backward pass.
    about = "run a forward pass of the model (" if then == "goes on" else ""
    for rank in (0, 1, 3):
        assert f"Rank {rank} is about to {about}" in errors[rank]
        assert "its data ended before that of the others?" in errors[rank]
        # When rank 2 leaves, its connections break, and a rank may notice that before the others have sent it their statements.
        # It then names them beside rank 2.
        [missing] = re.findall(r"(?:rank|ranks) (.*?) (?:is|are) not there", errors[rank])
        named = {int(number) for number in re.findall(r"\d+", missing)}
        assert named == {2} if then == "goes on" else 2 in named, errors[rank]


def waits_long(rank: int) -> list[str]:
    logged: list[str] = []
    agreement.logger.warning = lambda message, *args: logged.append(message % args)  # type: ignore[method-assign]
    agreement.PATIENCE = agreement.PATIENCE / 60
    model, _ = new_model()
    backward(model, rank)
    logged.clear()
    if rank == 2:
        time.sleep(3)
    backward(model, rank)
    return logged


@pytest.mark.thorough
def test_a_long_wait_is_logged_and_goes_on():
    logged = run_ranks(waits_long, 4)
    assert all(any("rank 2 is not there" in line for line in logged[rank]) for rank in (0, 1, 3))
    assert logged[2] == []


# Changed words that arrive damaged: an error at once on a CPU, and at the next crossing where the host did not wait.

CHANGED_WORDS = {
    "ranks_per_node": 2,
    "qgz_bits": None,
    "qgz_intra_bits": None,
    "shared_memory": False,
    "qwz_mode": "exact",
}
DAMAGED_CALL = 4  # one of three units in the second crossing of changed words


def train_with_a_damaged_wire(rank: int, waits: bool) -> None:
    """Damage one wire on its way to rank 3. Without ``waits`` the host does not look at the result, as on a GPU."""
    calls = []

    def apply_changes(wire, sizes, base, offsets):
        calls.append(base)
        if rank == 3 and len(calls) == DAMAGED_CALL:
            wire[offsets[0] : offsets[0] + 2] = 0x5A
        if waits:
            return changes_format.apply_changes(wire, sizes, base, offsets)
        return changes_format._apply_changes(wire, offsets, sizes, base)[0]

    with mock.patch.object(two_hop_gather.ops, "apply_changes", apply_changes):
        model = shard(make_lm(), POLICIES["bf16"])
        apply_zeropp(model, CHANGED_WORDS)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank, range(5))


@pytest.mark.thorough("at the next crossing")
@pytest.mark.parametrize("waits", [True, False], ids=["at once", "at the next crossing"])
def test_training_stops_and_names_unit_and_ranks(waits):
    error = expect_errors(train_with_a_damaged_wire, 4, waits)[3]
    assert "unit (root) that rank 3 received from ranks [1, 3]" in error, error
    assert "apply_changes" in error and "slice 0 of 2" in error, error
