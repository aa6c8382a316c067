"""``ZEROPP_CHECK=1`` compares copies with the masters in every mode, and names the rank that is wrong.

Right copies pass in test_exact.py and in test_native_gathers.py, which run under the check.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from harness import expect_errors, run_ranks
from toy import POLICIES, make_lm, shard, tokens_of, train

from hf_zeropp import apply_zeropp
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.secondary_check import WrongCopies

CHECK = {"ZEROPP_CHECK": "1"}
NODES = {"ranks_per_node": 2, "qgz_bits": None, "qgz_intra_bits": None}
MODES = {
    "values": NODES,
    "unquantized": NODES | {"qwz_bits": None},
    "delta": NODES | {"qwz_mode": "delta", "qwz_bits": 4},
    "delta on INT8": NODES | {"qwz_mode": "delta", "qwz_bits": 2, "hpz_bits": 8},
    "exact": NODES | {"qwz_mode": "exact"},
    "copies on one rank": NODES | {"hpz_size": 1},
    "through sockets": NODES | {"shared_memory": False},
}
UNIT = "blocks.1"


@contextmanager
def yesterdays_shard() -> Iterator[None]:
    """Encode the weights of a unit as they were at the call before."""

    def late(original: Callable) -> Callable:
        calls = []

        def encoded(unit: Unit, dtype: torch.dtype) -> Any:
            if unit.name != UNIT:
                return original(unit, dtype)
            calls.append(copy.deepcopy(original(unit, dtype)))
            return calls[-2 if calls[1:] else -1]

        return encoded

    with (
        mock.patch.object(Unit, "flat_shard", late(Unit.flat_shard)),
        mock.patch.object(Unit, "shards_to_encode", late(Unit.shards_to_encode)),
    ):
        yield


def steps(model: nn.Module, rank: int, count: int = 3) -> None:
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, range(count))
    model(tokens_of(rank))


def one_rank_encodes_old_weights(rank: int, settings: dict) -> None:
    model = shard(make_lm(), POLICIES["bf16"])
    apply_zeropp(model, settings)
    with yesterdays_shard() if rank == 1 else nullcontext():
        steps(model, rank)


@pytest.mark.thorough("[!e]*")
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_encodes_old_weights_is_named(mode):
    run_ranks(one_rank_encodes_old_weights, 4, MODES[mode])  # without the check nothing tells
    holders = "ranks [0, 1, 2, 3]" if mode == "copies on one rank" else "ranks [1, 3]"
    for error in expect_errors(one_rank_encodes_old_weights, 4, MODES[mode], env=CHECK):
        assert f"of unit {UNIT} differ from the masters" in error, error
        assert f"rank 1 sent other weights than its masters hold, to {holders} (seen" in error, error


def damaged_and_mended(rank: int) -> None:
    """One bit flips in one rank's copy. Behind the error ``invalidate`` on any rank brings whole weights to all."""
    for mode in ("delta", "exact"):
        model = shard(make_lm(), POLICIES["bf16"])
        handle = apply_zeropp(model, MODES[mode])
        steps(model, rank)
        if rank == 3:
            handle.gathers[2].copy.secondary.own[100] ^= 1
        with pytest.raises(WrongCopies, match=f"of unit {UNIT} differ"):
            steps(model, rank)
        if rank == 0:
            handle.invalidate()
        model.zero_grad()
        steps(model, rank)


def test_copies_that_differ_are_mended_by_invalidate():
    run_ranks(damaged_and_mended, 4, env=CHECK)


def nodes_use_different_layers(rank: int) -> None:
    for mode in ("values", "delta", "exact"):
        model = shard(make_lm(depth=3), POLICIES["bf16"])
        apply_zeropp(model, MODES[mode])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model.path = [0, 1, 2]
            train(model, optimizer, rank, range(1))
            model.path = [2] if rank < 2 else [1, 0]
            with torch.no_grad():
                model(tokens_of(rank))


@pytest.mark.thorough
def test_nodes_may_use_different_layers_under_the_check():
    run_ranks(nodes_use_different_layers, 4, env=CHECK)
