"""Changed words that arrive damaged: an error at once on a CPU, and whole weights next where the host did not wait."""

from __future__ import annotations

import logging
from unittest import mock

import torch
from harness import expect_errors, run_ranks
from toy import POLICIES, full_weights, gathered_weights, logged_messages, make_lm, shard, train

from hf_zeropp import apply_zeropp
from hf_zeropp.comm import carriers
from hf_zeropp.ops import changes_format
from hf_zeropp.traffic import GATHER_RESYNC

NODES = {"ranks_per_node": 2, "qgz_bits": None, "qgz_intra_bits": None, "shared_memory": False}
EXACT = NODES | {"qwz_mode": "exact"}
DAMAGED_CALL = 4  # one of three units in the second crossing of changed words


def damaged_on_arrival(rank: int, *, waits: bool):
    """Damage one wire on its way to rank 3. Without ``waits`` the host does not look at the result, as on a GPU."""
    calls = []

    def apply_changes(wire, sizes, base, offsets):
        calls.append(base)
        if rank == 3 and len(calls) == DAMAGED_CALL:
            wire[offsets[0] : offsets[0] + 2] = 0x5A
        if waits:
            return changes_format.apply_changes(wire, sizes, base, offsets)
        return changes_format._apply_changes(wire, offsets, sizes, base)[0]

    return mock.patch.object(carriers.ops, "apply_changes", apply_changes)


def steps(rank: int, settings: dict, count: int = 5):
    model = shard(make_lm(), POLICIES["bf16"])
    handle = apply_zeropp(model, settings)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank, range(count))
    return model, handle


def stops(rank: int) -> None:
    with damaged_on_arrival(rank, waits=True):
        steps(rank, EXACT)


def goes_on_with_whole_weights(rank: int, settings: dict) -> tuple[int, list[str]]:
    """Return how many resyncs there were beside those of the start, and the errors that were logged."""
    with logged_messages("hf_zeropp", logging.ERROR) as logged, damaged_on_arrival(rank, waits=False):
        model, handle = steps(rank, settings)
        weights = full_weights(model)
        model.reshard()
        for name, gathered in gathered_weights(model).items():
            assert torch.equal(gathered, weights[name].bfloat16()), name
    return handle.traffic.counts[GATHER_RESYNC].calls - len(handle.gathers), logged


def test_a_cpu_stops_at_once_and_names_unit_and_ranks():
    errors = expect_errors(stops, 4)
    assert "unit (root) that rank 3 received from ranks [1, 3]" in errors[3], errors[3]
    assert "apply_changes" in errors[3] and "slice 0 of 2" in errors[3]


def test_where_the_host_did_not_wait_whole_weights_cross_next():
    found = run_ranks(goes_on_with_whole_weights, 4, EXACT)
    # The cross group of ranks 1 and 3 sends one unit whole; the other one need not.
    assert [resyncs for resyncs, _ in found] == [0, 1, 0, 1]
    assert [len(logged) for _, logged in found] == [0, 1, 0, 0]
    assert "arrived damaged on rank 3" in found[1][1][0]
