"""The policy chooses whole weights, a delta or changed words: a table of cases, and the counts that it goes by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hf_zeropp.comm.two_hops import ChangedWords, Delta, GatherLayouts, WholeWeights
from hf_zeropp.fsdp.weights.freshness import Change
from hf_zeropp.fsdp.weights.policy import Sent, next_carrier
from hf_zeropp.ops.format import Segment, WireLayout

KEPT = WireLayout([Segment(8192, None)], 32, torch.bfloat16)
DELTA = WireLayout([Segment(8192, 4)], 32, torch.bfloat16)
VALUES = GatherLayouts(WireLayout([Segment(8192, 8)], 32, torch.bfloat16))
DELTAS = GatherLayouts(KEPT, DELTA)
EXACT = GatherLayouts(KEPT, sends_changes=True)
FROZEN = GatherLayouts(KEPT)
NONE, STEPPED, EDITED, UNSEEN, INVALID = Change

TABLE = [
    # due, layouts, kept: what travels
    (STEPPED, VALUES, VALUES, WholeWeights),
    (INVALID, VALUES, None, WholeWeights),
    (STEPPED, DELTAS, DELTAS, Delta),
    (EDITED, DELTAS, DELTAS, WholeWeights),
    (INVALID, DELTAS, DELTAS, WholeWeights),
    (INVALID, DELTAS, None, WholeWeights),
    (STEPPED, DELTAS, FROZEN, WholeWeights),  # it thawed
    (STEPPED, FROZEN, DELTAS, WholeWeights),
    (STEPPED, EXACT, EXACT, ChangedWords),
    (EDITED, EXACT, EXACT, ChangedWords),
    (INVALID, EXACT, EXACT, WholeWeights),
    (STEPPED, EXACT, None, WholeWeights),
]


@pytest.mark.parametrize("due, layouts, kept, expected", TABLE)
def test_what_travels(due, layouts, kept, expected):
    assert next_carrier(due, layouts, kept) is expected


def words_of(num_bytes: int) -> ChangedWords:
    return cast(Any, SimpleNamespace(size=torch.zeros(1, dtype=torch.int64), row_bytes=num_bytes))


def test_the_mean_of_what_was_sent():
    sent = Sent()
    sent.note(WholeWeights, EXACT, INVALID, None)
    assert sent.mean_bytes() is None
    sent.note(ChangedWords, EXACT, STEPPED, words_of(100))
    assert sent.mean_bytes() == 108
    sent.note(WholeWeights, EXACT, STEPPED, words_of(10**6))  # encoded, and dropped for whole weights
    assert sent.mean_bytes() == round((108 + 8) / 2)


def test_edits_in_a_row_are_those_that_deltas_could_not_bring():
    sent = Sent()
    for _ in range(3):
        sent.note(WholeWeights, DELTAS, EDITED, None)
    assert sent.edits_in_a_row == 3
    sent.note(WholeWeights, VALUES, EDITED, None)
    assert sent.edits_in_a_row == 3
    sent.note(Delta, DELTAS, STEPPED, None)
    assert sent.edits_in_a_row == 0
