"""The life of a unit's copy of the weights on one rank: a state machine, whose only moves are the methods of ``Copy``."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from hf_zeropp.comm.hop import HopError
from hf_zeropp.comm.two_hops import Carrier, ChangedWords, GatherLayouts, Secondary
from hf_zeropp.fsdp.comm_objects import record_event
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.freshness import Change, Freshness
from hf_zeropp.fsdp.weights.secondary_check import SecondaryCheck, WrongCopies
from hf_zeropp.ops import DamagedWireError


class State(enum.Enum):
    """The states of a copy.

    ABSENT: there is nothing that could be brought up to date, so whole weights cross.
    DUE: all ranks know that weights of some rank changed. The cross hop starts in the forward pass that has begun, also in one
        that skips the unit; or at the unit's next gather, where only FSDP2 can make its input.
    ENCODED: the changed words that will cross are encoded.
    CROSSING: the cross hop is under way. It is landed before the weights are used.
    OVERTAKEN: weights changed while the cross hop was under way, in a unit that the pass did not use. It is landed before another
        one starts. It may not be dropped: the other ranks of the cross group add what it brings, and a delta that one rank left
        out would stay missing.
    FRESH: gathers stay within the node. Where nothing is kept: what FSDP2 gathered last are the weights.
    FAILED: a hop failed, a wire is damaged, or copies are wrong. The run ends here, unless whole weights replace all copies
        (``handle.invalidate()`` on any rank).
    """

    ABSENT = "absent"
    DUE = "due"
    ENCODED = "encoded"
    CROSSING = "crossing"
    OVERTAKEN = "overtaken"
    FRESH = "fresh"
    FAILED = "failed"


TABLE = """
state      same       changed    invalid    encode   start     land   take      read   fail

absent     absent     absent     absent     -        crossing  -      fresh     -      failed
due        due        due        due        encoded  crossing  -      fresh     -      failed
encoded    due        due        due        -        crossing  -      fresh     -      failed
crossing   crossing   overtaken  overtaken  -        -         fresh  crossing  -      failed
overtaken  overtaken  overtaken  overtaken  -        -         due    crossing  -      failed
fresh      fresh      due        due        -        -         -      fresh     fresh  failed
failed     failed     failed     absent     -        -         -      -         -      failed
"""
"""The moves of a copy, and the states behind them. A dash stands for a move that raises an error.

Three moves are agreements of all ranks: that nothing changed, that weights changed, or that copies are not to be relied on
(``Change.INVALID``). The others are methods of ``Copy``."""


def read_table(table: str) -> dict[tuple[State, str], State]:
    """Return the states behind the moves that a table like ``TABLE`` permits."""
    (_, *moves), *rows = (line.split() for line in table.splitlines() if line)
    return {
        (State(state), move): State(after)
        for state, *cells in rows
        for move, after in zip(moves, cells, strict=True)
        if after != "-"
    }


_MOVES = read_table(TABLE)
_AGREEMENTS = {Change.NONE: "same", Change.INVALID: "invalid"}


class Copy:
    """A unit's secondary shard, and the state that it is in.

    Two facts stand beside the state. *Changed here*: this rank sees that its own weights are others than those that were taken
    last. It does nothing about it alone. *Outdated unsharded*: FSDP2 holds the unit unsharded, or has prefetched it, with weights
    of an older copy.

    Args:
        unit: the unit.
        freshness: what this rank sees of its own weights.
        check: compares copies with the masters; None where this was not asked for.

    Attributes:
        state: as in ``TABLE``.
        freshness: as given.
        secondary: room for the secondary shard; None until a carrier needs it.
        layouts: the form in which it holds weights; None until the first cross hop starts.
        carrier: what is encoded, or under way; None in other states.
    """

    def __init__(self, unit: Unit, freshness: Freshness, check: SecondaryCheck | None = None) -> None:
        self.state = State.ABSENT
        self.secondary: Secondary | None = None
        self.layouts: GatherLayouts | None = None
        self.carrier: Carrier | None = None
        self._unit = unit
        self.freshness = freshness
        self._check = check
        self._change = Change.NONE
        self._arrived: torch.Event | None = None  # when the last cross hop had landed; None on a CPU
        self._version = 0  # counts the times that weights were taken from the shards
        self._unsharded_version = 0  # the version that FSDP2's unsharded parameters have
        self._failure = ""

    # Moves. All ranks that share a cross hop make them in the same order.

    @property
    def due(self) -> Change:
        """The change since the weights were taken last, as all ranks agreed on it; NONE if no cross hop has to start."""
        if self.state is State.ABSENT:
            return Change.INVALID
        return self._change if self.state in (State.DUE, State.ENCODED, State.OVERTAKEN) else Change.NONE

    @property
    def is_under_way(self) -> bool:
        """Whether there is a cross hop to land."""
        return self.state in (State.CROSSING, State.OVERTAKEN)

    def agree(self, change: Change) -> None:
        """Take note of the change that all ranks agreed on. With a check this is a collective.

        FSDP2 leaves its root unit unsharded after a forward pass, every unit that was told so, and what it prefetched for a unit
        that a pass did not use. Such a unit would compute with what it was gathered from, so it is resharded unless that is the
        newest copy.
        """
        if change == Change.INVALID:  # also where another rank says so: what this one has found does not count any more
            self.freshness.mark(change)
        # A unit that an earlier pass found stale and then skipped is still due.
        self._change = max(self.due, change)
        self._enter(self._behind(_AGREEMENTS.get(change, "changed")))
        if self._unit.is_unsharded and (self.due != Change.NONE or self._unsharded_version != self._version):
            self._unit.reshard()
        if self._check is not None:
            with self.guard(WrongCopies):
                self._check.agreed()

    def encode(self, words: ChangedWords, shards: Sequence[torch.Tensor]) -> None:
        """Encode the changed words that will cross. What is written to the weights from now on is a new change."""
        encoded = self._behind("encode")
        self._prepare(words, shards)
        self.freshness.taken(is_kept=True)
        self.carrier = words
        self._enter(encoded)

    def start(self, carrier: Carrier | None = None, shards: Sequence[torch.Tensor] = ()) -> None:
        """Start the cross hop with what ``carrier`` makes of ``shards``; without one, with what is encoded already."""
        crossing, is_encoded = self._behind("start"), carrier is None
        if carrier is not None:
            self._prepare(carrier, shards)
            self.carrier = carrier
        assert self.carrier is not None
        with self.guard(DamagedWireError):
            self.carrier.send()
        # The hop is under way, and is landed also if what follows here is interrupted.
        self._enter(crossing)
        self.secondary, self.layouts = self.carrier.secondary, self.carrier.layouts
        self._version += 1
        # The weights count as taken from here on and not from the landing: they were encoded when the hop started, so
        # a write in between is a new change.
        if not is_encoded:
            self.freshness.taken(is_kept=True)

    def land(self) -> None:
        """Finish the cross hop, which brings the secondary shard up to date. With a check this is a collective."""
        landed = self._behind("land")
        assert self.carrier is not None and self.secondary is not None
        with self.guard(DamagedWireError):
            self.carrier.land()
        self._enter(landed)
        # The copies are compared after the landing, when all of them should be equal, and before they are decoded.
        if self._check is not None:
            with self.guard(WrongCopies):
                self._check.landed(self.secondary)
        self._arrived = record_event(self.secondary.own.device)

    def read(self) -> Secondary:
        """Return the secondary shard, from which FSDP2's unsharded parameters are decoded next on this stream."""
        self._enter(self._behind("read"))
        assert self.secondary is not None
        # It may have been written on another stream: FSDP2 gathers on streams of its own, and hops that are started ahead run
        # on the caller's. An event orders them without making the host wait.
        if self._arrived is not None:
            torch.accelerator.current_stream().wait_event(self._arrived)
        self._unsharded_version = self._version
        return self.secondary

    def take(self) -> None:
        """Note that FSDP2's unsharded parameters are gathered from the shards as they are now, past the secondary shard."""
        # An agreement alone clears nothing, since a pass may skip the unit. What was really gathered does.
        taken = self._behind("take")
        self.freshness.taken(is_kept=False)
        self._version += 1
        self._unsharded_version = self._version
        self._enter(taken)

    def fail(self, error: Exception) -> NoReturn:
        """Note that a hop failed, that a wire is damaged, or that copies are wrong, and raise an error that names the unit."""
        self.state = self._behind("fail")
        if isinstance(error, DamagedWireError):
            assert self.carrier is not None
            ranks = dist.get_process_group_ranks(self.carrier.hops.cross_hop.group)
            self._failure = (
                f"The weights of unit {self._unit.name} that rank {dist.get_rank()} received from ranks {ranks}, slice by slice, "
                f"are damaged: {error}. Go on from an earlier checkpoint, and look for what damages bytes."
            )
            raise DamagedWireError(self._failure) from error
        if isinstance(error, HopError):
            error.unit = self._unit.name
        self._failure = str(error)
        raise error

    @contextlib.contextmanager
    def guard(self, *kinds: type[Exception]) -> Iterator[None]:
        """Run a part of a gather in which ranks meet: with an error of a hop, or of these kinds, the copy has failed."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (HopError, *kinds)):
                self.fail(error)
            raise

    def _prepare(self, carrier: Carrier, shards: Sequence[torch.Tensor]) -> None:
        carrier.prepare(shards)
        if self._check is not None:
            self._check.encoded(carrier)

    def _enter(self, state: State) -> None:
        self.state = state
        if state in (State.ABSENT, State.DUE, State.FRESH):
            self.carrier = None

    def _behind(self, move: str) -> State:
        """Return the state to which a move leads.

        Raises:
            RuntimeError: the move is forbidden.
        """
        if (after := _MOVES.get((self.state, move))) is not None:
            return after
        if self.state is State.FAILED:
            raise RuntimeError(
                f"The copy of unit {self._unit.name} failed before, and cannot be used: {self._failure} "
                "(handle.invalidate() brings a new copy, of weights that are right again.)"
            )
        able = " or ".join(state.value for state, name in _MOVES if name == move)
        raise RuntimeError(
            f"Expected the copy of unit {self._unit.name} to be {able} when it is to {move}, got {self.state.value} (rank "
            f"{dist.get_rank()}). This is a bug of hf_zeropp: please report it."
        )
