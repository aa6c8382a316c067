"""A gather chooses whole weights, a delta or changed words: a table of cases, and the counts that it goes by."""

from __future__ import annotations

import pytest
import torch

from hf_zeropp.comm.two_hops import Carrier, ChangedWords, Delta, GatherLayouts, WholeWeights
from hf_zeropp.fsdp.weights.freshness import Change
from hf_zeropp.fsdp.weights.gather import Sent, next_carrier
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


def carrier(kind: type, layouts: GatherLayouts) -> Carrier:
    """Return a carrier that has sent, as far as the record looks at it."""
    made = object.__new__(kind)
    vars(made).update(layouts=layouts, size=torch.zeros(1, dtype=torch.int64), row_bytes=100)
    return made


def test_the_mean_of_what_was_sent():
    sent = Sent()
    sent.note(carrier(WholeWeights, EXACT), INVALID)
    assert sent.mean_bytes() is None
    sent.note(carrier(ChangedWords, EXACT), STEPPED)
    assert sent.mean_bytes() == 108


def test_edits_in_a_row_are_those_that_deltas_could_not_bring():
    sent = Sent()
    for _ in range(3):
        sent.note(carrier(WholeWeights, DELTAS), EDITED)
    assert sent.edits_in_a_row == 3
    sent.note(carrier(WholeWeights, VALUES), EDITED)
    assert sent.edits_in_a_row == 3
    sent.note(carrier(Delta, DELTAS), STEPPED)
    assert sent.edits_in_a_row == 0
    sent.note(carrier(WholeWeights, DELTAS), EDITED)
    sent.note(carrier(WholeWeights, DELTAS), INVALID)  # ``invalidate()``: the caller knows why
    assert sent.edits_in_a_row == 0
