"""Changed words that arrive damaged: an error at once on a CPU, and at the next crossing where the host did not wait."""

from __future__ import annotations

from unittest import mock

import torch
from harness import expect_errors
from toy import POLICIES, make_lm, shard, train

from hf_zeropp import apply_zeropp
from hf_zeropp.comm import two_hop_gather
from hf_zeropp.ops import changes_format

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

    return mock.patch.object(two_hop_gather.ops, "apply_changes", apply_changes)


def steps(rank: int, settings: dict, count: int = 5):
    model = shard(make_lm(), POLICIES["bf16"])
    handle = apply_zeropp(model, settings)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank, range(count))
    return model, handle


def stops(rank: int) -> None:
    with damaged_on_arrival(rank, waits=True):
        steps(rank, EXACT)


def stops_later(rank: int) -> None:
    with damaged_on_arrival(rank, waits=False):
        steps(rank, EXACT)


def test_a_cpu_stops_at_once_and_names_unit_and_ranks():
    errors = expect_errors(stops, 4)
    assert "unit (root) that rank 3 received from ranks [1, 3]" in errors[3], errors[3]
    assert "apply_changes" in errors[3] and "slice 0 of 2" in errors[3]


def test_where_the_host_did_not_wait_the_next_crossing_stops():
    errors = expect_errors(stops_later, 4)
    assert "unit (root) that rank 3 received from ranks [1, 3]" in errors[3], errors[3]
    assert "apply_changes" in errors[3] and "slice 0 of 2" in errors[3]
