"""The states of a copy: all moves from all states, those of the table and those that are forbidden."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from harness import run_ranks

from hf_zeropp.fsdp.weights.copy import TABLE, Copy, State
from hf_zeropp.fsdp.weights.freshness import Change, Freshness
from hf_zeropp.fsdp.weights.secondary_check import WrongCopies


class FakeCarrier:
    """Notes what a copy lets it do."""

    layouts: Any = "layouts"

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self.error = error
        self.secondary = SimpleNamespace(own=torch.zeros(1))
        self.hops = SimpleNamespace(cross_hop=SimpleNamespace(group=None))

    def prepare(self, shards: object) -> None:
        self.calls.append("prepare")

    def send(self) -> None:
        self.calls.append("send")

    def land(self) -> None:
        self.calls.append("land")
        if self.error is not None:
            raise self.error


def new_copy() -> Copy:
    unit = SimpleNamespace(name="blocks.0", is_unsharded=False)
    freshness = mock.Mock(spec=Freshness)
    freshness.change.return_value = Change.NONE
    return Copy(cast(Any, unit), freshness)


def fail(copy: Copy) -> None:
    with pytest.raises(WrongCopies, match="copies differ"):
        copy.fail(WrongCopies("copies differ"))


MOVES: dict[str, Callable[[Copy], Any]] = {
    "same": lambda copy: copy.agree(Change.NONE),
    "changed": lambda copy: copy.agree(Change.STEPPED),
    "invalid": lambda copy: copy.agree(Change.INVALID),
    "encode": lambda copy: copy.encode(cast(Any, FakeCarrier()), []),
    "start": lambda copy: copy.start(None if copy.state is State.ENCODED else cast(Any, FakeCarrier())),
    "land": lambda copy: copy.land(),
    "take": lambda copy: copy.take(),
    "read": lambda copy: copy.read(),
    "fail": fail,
}


WAY_TO: dict[State, list[str]] = {
    State.ABSENT: [],
    State.DUE: ["start", "land", "changed"],
    State.ENCODED: ["start", "land", "changed", "encode"],
    State.CROSSING: ["start"],
    State.OVERTAKEN: ["start", "changed"],
    State.FRESH: ["start", "land"],
    State.FAILED: ["start", "land", "fail"],
}


def copy_in(state: State) -> Copy:
    copy = new_copy()
    for move in WAY_TO[state]:
        MOVES[move](copy)
    assert copy.state is state
    return copy


def table() -> dict[tuple[State, str], State | None]:
    """Return the state behind each move from each state; None where it is forbidden."""
    (_, *moves), *rows = (line.split() for line in TABLE.splitlines() if line)
    return {
        (State(state), move): None if after == "-" else State(after)
        for state, *cells in rows
        for move, after in zip(moves, cells, strict=True)
    }


def walk_all_moves(rank: int) -> int:
    """In a process group, since errors name the rank."""
    rows = table()
    assert set(rows) == set(itertools.product(State, MOVES))
    for (before, move), after in rows.items():
        copy = copy_in(before)
        if after is not None:
            MOVES[move](copy)
            assert copy.state is after, (before, move)
            continue
        with pytest.raises(RuntimeError) as error:
            MOVES[move](copy)
        expected = "failed before" if before is State.FAILED else f"to {move}, got {before.value} (rank 0)"
        assert "blocks.0" in str(error.value) and expected in str(error.value), error.value
        assert copy.state is before, "a move that is forbidden changes nothing"
    return len(rows)


def test_every_move_from_every_state():
    assert run_ranks(walk_all_moves, 1) == [len(State) * len(MOVES)]


@pytest.mark.parametrize("state", [state for state in State if state is not State.FAILED])
@pytest.mark.parametrize("change", [Change.STEPPED, Change.EDITED, Change.INVALID])
def test_a_copy_is_due_behind_every_change(state, change):
    """Without a look at ``TABLE``: a copy that is crossing when its weights change would else be used as it lands."""
    copy = copy_in(state)
    copy.agree(change)
    assert copy.due >= change


def test_what_was_encoded_is_dropped_where_ranks_agree_anew():
    copy = copy_in(State.ENCODED)
    copy.agree(Change.NONE)
    assert copy.carrier is None and copy.due == Change.STEPPED
    whole = FakeCarrier()
    copy.start(cast(Any, whole))
    assert whole.calls == ["prepare", "send"]


def test_an_error_that_is_no_hop_s_leaves_the_copy_as_it_is():
    """Memory that ran out, or Ctrl+C: the hop is still under way, and is landed later."""
    for error in (torch.OutOfMemoryError("no memory"), KeyboardInterrupt()):
        copy, carrier = new_copy(), FakeCarrier(error)
        copy.start(cast(Any, carrier))
        with pytest.raises(type(error)):
            copy.land()
        assert copy.state is State.CROSSING
        carrier.error = None
        copy.land()
        assert copy.state is State.FRESH


def test_a_hop_that_has_started_is_landed_also_if_the_start_is_interrupted_behind_it():
    """The other ranks of the cross group add what it brings. Ctrl+C comes where the shard is hashed, the longest part."""
    copy = new_copy()
    copy.freshness.taken.side_effect = KeyboardInterrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        copy.start(cast(Any, FakeCarrier()))
    copy.agree(Change.EDITED)
    assert copy.state is State.OVERTAKEN
    copy.land()
    assert copy.state is State.DUE
