"""The policy chooses whole weights, a delta or changed words: a table of cases, and the counts that it goes by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hf_zeropp.comm.two_hops import ChangedWords, Delta, GatherLayouts, WholeWeights
from hf_zeropp.fsdp.weights.freshness import Change
from hf_zeropp.fsdp.weights.policy import DELTAS_IN_A_ROW, Sent, next_carrier
from hf_zeropp.ops.format import Segment, WireLayout

KEPT = WireLayout([Segment(8192, None)], 32, torch.bfloat16)
DELTA = WireLayout([Segment(8192, 4)], 32, torch.bfloat16)
VALUES = GatherLayouts(WireLayout([Segment(8192, 8)], 32, torch.bfloat16))
DELTAS = GatherLayouts(KEPT, DELTA)
EXACT = GatherLayouts(KEPT, sends_changes=True)
AUTO = GatherLayouts(KEPT, DELTA, sends_changes=True)
FROZEN = GatherLayouts(KEPT)
NONE, STEPPED, EDITED, INVALID = Change
BOUND = DELTA.nbytes + KEPT.nbytes // DELTAS_IN_A_ROW
"""Bytes from which on changed words take more than deltas, with what a row of them costs."""
FULL = DELTAS_IN_A_ROW

TABLE = [
    # due, layouts, kept, deltas in a row, words, is damaged: what travels
    (STEPPED, VALUES, VALUES, 0, None, False, WholeWeights),
    (INVALID, VALUES, None, 0, None, False, WholeWeights),
    (STEPPED, DELTAS, DELTAS, 0, None, False, Delta),
    (STEPPED, DELTAS, DELTAS, 1000, None, False, Delta),
    (EDITED, DELTAS, DELTAS, 5, None, False, WholeWeights),
    (INVALID, DELTAS, DELTAS, 5, None, False, WholeWeights),
    (INVALID, DELTAS, None, 0, None, False, WholeWeights),
    (STEPPED, DELTAS, FROZEN, 0, None, False, WholeWeights),  # it thawed
    (STEPPED, FROZEN, DELTAS, 7, None, False, WholeWeights),
    (STEPPED, EXACT, EXACT, 0, None, False, ChangedWords),
    (STEPPED, EXACT, EXACT, 0, 10**6, False, ChangedWords),
    (EDITED, EXACT, EXACT, 0, None, False, ChangedWords),
    (INVALID, EXACT, EXACT, 0, None, False, WholeWeights),
    (STEPPED, EXACT, None, 0, None, False, WholeWeights),
    (STEPPED, EXACT, EXACT, 0, 1, True, WholeWeights),
    (STEPPED, AUTO, AUTO, 0, None, False, ChangedWords),
    (STEPPED, AUTO, AUTO, 0, BOUND, False, ChangedWords),
    (STEPPED, AUTO, AUTO, 0, BOUND + 1, False, Delta),
    (STEPPED, AUTO, AUTO, 0, BOUND + 1, True, WholeWeights),
    (EDITED, AUTO, AUTO, 0, BOUND + 1, False, ChangedWords),  # a delta is too coarse for an edit
    (STEPPED, AUTO, AUTO, 1, None, False, Delta),
    (STEPPED, AUTO, AUTO, FULL - 1, None, False, Delta),
    (EDITED, AUTO, AUTO, 1, None, False, ChangedWords),  # it ends the row
    (STEPPED, AUTO, AUTO, FULL, None, False, ChangedWords),
    (STEPPED, AUTO, AUTO, FULL, BOUND + 1, False, ChangedWords),  # many as they are, so that the next ones are few
    (INVALID, AUTO, AUTO, 1, None, False, WholeWeights),
]


@pytest.mark.parametrize("due, layouts, kept, deltas, words, is_damaged, expected", TABLE)
def test_what_travels(due, layouts, kept, deltas, words, is_damaged, expected):
    assert next_carrier(due, layouts, kept, deltas, words=words, is_damaged=is_damaged) is expected


def words_of(num_bytes: int) -> ChangedWords:
    return cast(Any, SimpleNamespace(size=torch.zeros(1, dtype=torch.int64), row_bytes=num_bytes))


def test_a_row_of_deltas_and_the_mean_of_what_was_sent():
    sent = Sent()
    sent.note(WholeWeights, AUTO, INVALID, None)
    assert sent.mean_bytes() is None
    sent.note(ChangedWords, AUTO, STEPPED, words_of(100))
    assert sent.mean_bytes() == 108
    sent.note(Delta, AUTO, STEPPED, words_of(10**6))  # encoded, and dropped for the delta
    sent.note(Delta, AUTO, STEPPED, None)
    assert sent.deltas_in_a_row == 2
    assert sent.mean_bytes() == round((108 + 8 + 2 * DELTA.nbytes) / 3)
    sent.note(ChangedWords, AUTO, STEPPED, words_of(100))
    assert sent.deltas_in_a_row == 0


def test_edits_in_a_row_are_those_that_deltas_could_not_bring():
    sent = Sent()
    for _ in range(3):
        sent.note(WholeWeights, DELTAS, EDITED, None)
    assert sent.edits_in_a_row == 3
    sent.note(WholeWeights, VALUES, EDITED, None)
    assert sent.edits_in_a_row == 3
    sent.note(Delta, DELTAS, STEPPED, None)
    assert sent.edits_in_a_row == 0
