"""The policy says what travels next when a unit's weights cross nodes: whole weights, a delta, or the words that changed.

The choice follows from what all ranks agreed on, so it is the same on all of them. Where changed words arrived damaged, the ranks
of a cross group send whole weights instead (``ZeroPPAllGather.start``), and others need not.
"""

from __future__ import annotations

import dataclasses

from hf_zeropp.comm.two_hops import Carrier, ChangedWords, Delta, GatherLayouts, WholeWeights
from hf_zeropp.fsdp.weights.freshness import Change

MANY_EDITS = 3
"""Resyncs in a row that no optimizer and no call explains: more than that is worth a warning."""


def next_carrier(due: Change, layouts: GatherLayouts, kept: GatherLayouts | None) -> type[Carrier]:
    """Return what travels next.

    Args:
        due: the change that ranks agreed on.
        layouts: the layouts in which the unit is gathered now.
        kept: those of the copy; None where there is none.
    """
    # Other layouts than the copy's mean another dtype, or parameters frozen or thawed: codes of two forms do not add up.
    if layouts != kept or due == Change.INVALID:
        return WholeWeights
    if layouts.sends_changes:
        # This rank's slice of the secondary shard is what the other nodes hold of its weights, bit for bit. The words that
        # differ from it are therefore enough, whatever changed the weights.
        return ChangedWords
    # [Note: when a delta is enough] in freshness.py
    return WholeWeights if layouts.delta is None or due >= Change.EDITED else Delta


@dataclasses.dataclass
class Sent:
    """The record of what a unit has sent since its secondary shard was allocated.

    Attributes:
        edits_in_a_row: resyncs in a row for edits.
        num_measured: times that changed words were encoded.
        measured_bytes: bytes of one rank's wires in all of these, with those of the sizes.
    """

    edits_in_a_row: int = 0
    num_measured: int = 0
    measured_bytes: int = 0

    def note(self, kind: type[Carrier], layouts: GatherLayouts, due: Change, words: ChangedWords | None) -> None:
        """Note that a cross hop started for the change ``due``. ``words`` were encoded for it, also where it carries others."""
        if words is not None:
            self.num_measured += 1
            self.measured_bytes += words.size.nbytes + (words.row_bytes if kind is ChangedWords else 0)
        if kind is Delta:
            self.edits_in_a_row = 0
        elif kind is WholeWeights and layouts.delta is not None and due >= Change.EDITED:
            self.edits_in_a_row += 1

    def mean_bytes(self) -> int | None:
        """Return the mean bytes of changed words that one rank sent in a step, their sizes included; None before any."""
        return round(self.measured_bytes / self.num_measured) if self.num_measured else None
