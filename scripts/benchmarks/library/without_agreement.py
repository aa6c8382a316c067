"""Training steps in which every rank decides alone, for comparison with steps in which ranks agree.

Deciding alone is safe only where nothing but the optimizer changes weights, and ranks do not differ, as in a benchmark.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hf_zeropp.comm.two_hops import TwoHopGather
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.freshness import ShardContent


@dataclasses.dataclass(frozen=True)
class OwnAnswer:
    """The answer to a question that no other rank was asked."""

    flags: bytes

    def largest(self) -> bytes:
        """Return this rank's own flags."""
        return self.flags

    def confirm(self) -> None:
        """Return at once, since there is nobody to differ from."""


@contextlib.contextmanager
def without_agreement() -> Iterator[None]:
    """Neither read the content of shards, nor compose statements, nor exchange them. All ranks must enter together."""

    def agree_alone(decisions: Decisions, *args: Any, **kwargs: Any) -> None:
        # The statement of a unit is its parameters' structure, which is composed before ``_ask`` is called.
        with mock.patch.object(Decisions, "_structure", lambda decisions, index: ()):
            agree(decisions, *args, **kwargs)

    def ask_alone(decisions: Decisions, moment: Any, detail: int, facts: Any, flags: Any, statement: Any) -> OwnAnswer:
        return OwnAnswer(bytes(flags))

    agree = Decisions._agree_on_weights
    with (
        mock.patch.object(ShardContent, "digest", lambda content: None),
        mock.patch.object(TwoHopGather, "holds", lambda *args: True),
        mock.patch.object(Decisions, "_agree_on_weights", agree_alone),
        mock.patch.object(Decisions, "_ask", ask_alone),
    ):
        yield
