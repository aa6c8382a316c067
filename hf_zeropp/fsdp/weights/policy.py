"""The policy says what travels next when a unit's weights cross nodes: whole weights, a delta, or the words that changed.

[Note: changed words or a delta]
With ``qwz_mode="auto"`` a unit sends changed words until they take clearly more bytes than a delta. A delta leaves the copy
rounded: most of its words then differ from the weights, so the next changed words would be many, however few the step changed.
The unit therefore goes on with deltas, and after ``DELTAS_IN_A_ROW`` of them sends changed words once, many as they are. From
then on their number is that of a step again. What this costs is at most whole weights, spread over the row (an edit ends a row
early), so a delta is only better if it saves more than that in every step.

[Note: all ranks choose alike] The choice follows from what all ranks agreed on, from sizes that the cross group has exchanged,
and from its own earlier choices, so it is the same on all of its ranks. Other cross groups may choose otherwise: deltas and
changed words meet the same barriers of the node, and crossings land in the same order on all of its ranks
(``ZeroPPAllGather.encode``).
"""

from __future__ import annotations

import dataclasses

from hf_zeropp.comm.two_hops import Carrier, ChangedWords, Delta, GatherLayouts, WholeWeights
from hf_zeropp.fsdp.weights.freshness import Change

MANY_EDITS = 3
"""Resyncs in a row that no optimizer and no call explains: more than that is worth a warning."""

DELTAS_IN_A_ROW = 32
"""``qwz_mode="auto"``: deltas after which a unit sends changed words again, to see how many there are by now."""


def next_carrier(
    due: Change,
    layouts: GatherLayouts,
    kept: GatherLayouts | None,
    deltas_in_a_row: int,
    *,
    words: int | None = None,
    is_damaged: bool = False,
) -> type[Carrier]:
    """Return what travels next. ``ChangedWords`` may be answered twice: before they are encoded, and when their bytes are known.

    Args:
        due: the change that ranks agreed on.
        layouts: the layouts in which the unit is gathered now.
        kept: those of the copy; None where there is none.
        deltas_in_a_row: deltas since whole weights or changed words crossed.
        words: bytes of the changed words, the most of any rank of the cross group. None where they are not encoded.
        is_damaged: whether a rank of the cross group could not apply the words of the crossing before.
    """
    # Other layouts than the copy's mean another dtype, or parameters frozen or thawed: codes of two forms do not add up.
    if layouts != kept or due == Change.INVALID or is_damaged:
        return WholeWeights
    # [Note: when a delta is enough] in freshness.py
    delta = layouts.delta if due < Change.EDITED else None
    if layouts.sends_changes and (delta is None or not 0 < deltas_in_a_row < DELTAS_IN_A_ROW):
        # This rank's slice of the secondary shard is what the other nodes hold of its weights, bit for bit. The words that
        # differ from it are therefore enough, whatever changed the weights.
        if delta is None or words is None or deltas_in_a_row:
            return ChangedWords
        return Delta if words > delta.nbytes + layouts.kept.nbytes // DELTAS_IN_A_ROW else ChangedWords
    return WholeWeights if delta is None else Delta


@dataclasses.dataclass
class Sent:
    """The things that a unit has sent since there is room for its copy.

    Attributes:
        deltas_in_a_row: deltas since whole weights or changed words crossed.
        edits_in_a_row: resyncs in a row for edits.
        num_measured: times that changed words crossed, or deltas in their place.
        measured_bytes: bytes of one rank's wires in all of these, with those of the sizes.
    """

    deltas_in_a_row: int = 0
    edits_in_a_row: int = 0
    num_measured: int = 0
    measured_bytes: int = 0

    def note(self, kind: type[Carrier], layouts: GatherLayouts, due: Change, words: ChangedWords | None) -> None:
        """Note that a cross hop started for the change ``due``, with the ``words`` that were encoded for it or not sent."""
        if words is not None:
            self.num_measured += 1
            self.measured_bytes += words.size.nbytes
        if kind is ChangedWords and words is not None:
            self.measured_bytes += words.row_bytes
        if kind is Delta and layouts.sends_changes and layouts.delta is not None:
            self.num_measured += words is None
            self.measured_bytes += layouts.delta.nbytes
        if kind is Delta:
            self.edits_in_a_row = 0
        elif kind is WholeWeights and layouts.delta is not None and due >= Change.EDITED:
            self.edits_in_a_row += 1
        self.deltas_in_a_row = self.deltas_in_a_row + 1 if kind is Delta else 0

    def mean_bytes(self) -> int | None:
        """Return the mean bytes of changed words that one rank sent in a step, their sizes included; None before any."""
        return round(self.measured_bytes / self.num_measured) if self.num_measured else None
