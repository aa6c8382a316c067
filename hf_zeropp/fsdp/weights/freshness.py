"""One rank's view of whether the gathered copy of a unit still equals its weights.

See [Note: when a secondary shard is stale] and [Note: when a delta is enough] below.
"""

from __future__ import annotations

import enum

from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.fingerprint import MAX_LATE, Fingerprint
from hf_zeropp.fsdp.weights.weight_stamp import WeightStamp

# [Note: when a secondary shard is stale]
# A secondary shard is a copy of the weights. It serves until they change. A rank sees a change of its own shard by two signs, on
# every device:
#
# 1. *the stamp*: identity and version counters of the unit's parameters, which move in operations on the parameters;
# 2. *marks*: a torch optimizer that holds a parameter of the unit stepped, ``load_state_dict`` ran, or the user's code called
#    ``handle.invalidate()``. An optimizer's mark is set before its step as well: a step that raised half-way shows by it.
#
# No rank acts on its own answer. Before every forward pass the ranks exchange their answers for all units, and each unit
# is gathered anew if it changed on *any* rank (weight_decisions.py). A change made on one rank alone is then a gather more, not
# a hang.
#
# [Note: when a delta is enough]
# With ``qwz_mode="delta"`` a stale secondary shard is brought up to date by the difference between the weights and the copy.
# Differences are coarse where weights moved far, so they are sent only after changes by optimizers
# (``Change.STEPPED``). After any other change (``Change.EDITED``) whole weights cross: a resync. They also cross behind a
# checkpoint (``WeightGather.resync``), because a resumed run starts from the masters that it holds.
#
# Changed words (``qwz_mode="exact"``) bring a secondary shard up to date after any change. Whole weights cross only
# where the caller says that copies are not to be relied on (``Change.INVALID``).


class Change(enum.IntEnum):
    """A change of a unit's weights since they were gathered. The larger one counts where ranks differ."""

    NONE = 0
    STEPPED = 1
    EDITED = 2
    UNSEEN = 3  # by counters and marks: [Note: writes that move no counter] in fingerprint.py
    INVALID = 4


class Freshness:
    """One rank's view of one unit.

    Args:
        unit: the unit.
        checks_steps: whether a write between an optimizer's step and the next gather must be told from the step. Only deltas
            need it.
        max_late: as of ``Fingerprint``.
    """

    def __init__(self, unit: Unit, *, checks_steps: bool = False, max_late: int = MAX_LATE) -> None:
        self._unit = unit
        self._fingerprint = Fingerprint(unit, max_late)
        self._checks_steps = checks_steps
        self._stamp: WeightStamp | None = None
        # Nothing was gathered yet, so the first gather must send whole weights.
        self._marked = Change.INVALID
        self._is_in_closure_step = False
        self._under_step = Change.NONE

    def taken(self, *, is_kept: bool) -> None:
        """Note that the unit's weights, as they are now, were gathered or are being sent.

        Args:
            is_kept: whether a copy is kept of them. Where none is, each gather takes the weights as they are, as in stock FSDP2.
        """
        if self._marked == Change.INVALID or not is_kept:
            self._fingerprint.forget()
        self._marked = Change.NONE
        if not self._is_in_closure_step:
            self._under_step = Change.NONE
        self._stamp = WeightStamp.of(self._unit.params)
        if is_kept:
            self._fingerprint.take()

    def mark(self, change: Change) -> None:
        """Note a change that the caller reports."""
        self._marked = max(self._marked, change)

    def before_step(self, *, has_closure: bool) -> None:
        """Note that an optimizer which holds a parameter of the unit begins a step. Changes up to now were not its own."""
        # Without deltas the same crosses after an edit as after a step, so there is nothing to tell apart.
        if self._checks_steps and self._stamp is not None and not self._is_in_closure_step:
            # An edit must be noted now: after the step it could not be told from the step's own writes, and a delta would be
            # sent for it.
            if not self._stamp.matches(self._unit.params):
                self.mark(Change.EDITED)
        # Without a closure no forward pass runs inside of the step. One that runs before ``after_step`` then shows that the
        # step raised, and what it wrote until then counts as an edit.
        self._is_in_closure_step = has_closure
        # A step that raises half-way runs nothing behind it. The mark must stand by then.
        self._under_step = Change.STEPPED if has_closure else Change.EDITED

    def after_step(self) -> None:
        """Note that the step ended. It does not come after a step that raised: the mark of ``before_step`` tells of that one."""
        self._is_in_closure_step = False
        self._under_step = Change.NONE
        self.mark(Change.STEPPED)
        # Without deltas the mark is answer enough: every change means the same, so there is nothing to compare
        # later. With deltas, the stamp after the step shows whether anything else wrote between the step and the
        # next gather.
        if self._checks_steps:
            self._stamp = WeightStamp.of(self._unit.params)

    def change(self) -> Change:
        """Return what happened to the weights since ``taken``.

        On an accelerator this may start a comparison, and returns what earlier ones have found.
        """
        marked = max(self._marked, self._under_step)
        if marked == Change.INVALID:
            return marked
        # It counts also behind a step: a pass has computed with old copies.
        if self._fingerprint.has_found():
            return Change.UNSEEN
        if marked == Change.EDITED:
            return marked
        if marked == Change.STEPPED and not self._checks_steps:
            return Change.STEPPED
        assert self._stamp is not None
        if not self._stamp.matches(self._unit.params):
            # Optimizers with a closure (LBFGS) run forward passes between updates of one step. Weights that changed
            # there were changed by the optimizer.
            return max(marked, Change.STEPPED if self._is_in_closure_step else Change.EDITED)
        if marked == Change.NONE:  # reading the shards is the cost of this method, so it comes last
            self._fingerprint.compare()
        return Change.UNSEEN if self._fingerprint.has_found() else marked
