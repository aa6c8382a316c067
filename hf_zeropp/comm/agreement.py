"""Small questions that all ranks answer together before they choose collectives.

Collectives run only if every rank calls the same ones in the same order. A rank that decides alone which collectives come
next (because *its* weights changed, or *it* believes that this is the last micro-step) makes the others wait for ever. So a
decision that chooses collectives is made in three steps:

1. every rank states what it is about to do, the facts it relies on, and one small number per unit;
2. one all-reduce of a few hundred bytes takes the largest value of each byte of ``statement + complement of statement``,
   which tells every rank the largest and the smallest value at once;
3. where statements differ, all ranks see it in the same result. They exchange words and raise the same error. Otherwise
   all of them go on with the largest number of each unit.

The group is one of its own, on the CPU: no other collective can come between, and no accelerator is waited for. Its timeout
is the world's, so a rank that died or was stopped ends the wait of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist


class DisagreementError(RuntimeError):
    """Ranks were about to run different collectives. Raised on every rank, with the same words."""


@dataclasses.dataclass(frozen=True)
class Statement:
    """A rank's account of what it is about to do, for the error message.

    Attributes:
        action: a phrase after "is about to", such as "run a forward pass of unit layers.0".
        facts: by subject (a unit), the fact that this rank relies on.
    """

    action: str
    facts: dict[str, str]


class Agreement:
    """Compares statements of all ranks of one group.

    Args:
        group: the ranks, over a backend that moves CPU tensors.
        num_common: bytes of a statement that must be equal on all ranks.
        num_flags: bytes of which the largest over all ranks counts.
    """

    def __init__(self, group: dist.ProcessGroup, num_common: int, num_flags: int) -> None:
        self._group = group
        self._num_common = num_common
        self._num_flags = num_flags
        self._pending: Answer | None = None

    def ask(self, common: bytes, flags: bytes, explain: Callable[[], Statement]) -> Answer:
        """Start one exchange. Collective: every rank of the group must ask, or the exchange waits until the timeout.

        Args:
            common: ``num_common`` bytes that must be equal on all ranks.
            flags: ``num_flags`` bytes.
            explain: states this rank's part in words; called only where ranks differ.
        """
        # An exchange that nobody waited for yet is finished first. If its statements differ, ``largest`` runs a second
        # collective. With a new exchange started before that on some ranks, the group's collectives would come in
        # different orders.
        self.settle()
        assert (len(common), len(flags)) == (self._num_common, self._num_flags)
        # One all-reduce instead of two: the largest value of 255 - x is 255 less the smallest x. Bytes are equal on
        # all ranks exactly where the largest and the smallest are. Flags are complemented as well, which costs a byte
        # per unit, and keeps the buffer two halves of one form.
        values = torch.frombuffer(bytearray(common + flags), dtype=torch.uint8)
        buffer = torch.cat((values, 255 - values))
        work = dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        # ``explain`` is kept and not called: words for every unit would cost more than the exchange, and are rarely
        # needed.
        self._pending = Answer(self._group, work, buffer, self._num_common, explain)
        return self._pending

    def settle(self) -> None:
        """Wait for an exchange that was asked and not looked at yet, so that exchanges keep one order on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.largest()


class Answer:
    """One exchange under way."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        work: dist.Work | None,
        buffer: torch.Tensor,
        num_common: int,
        explain: Callable[[], Statement],
    ) -> None:
        self._group = group
        self._work = work
        self._buffer = buffer
        self._num_common = num_common
        self._explain = explain

    def largest(self) -> bytes:
        """Wait, and return the largest value of each flag over all ranks.

        Raises:
            DisagreementError: on every rank, if ranks made different statements.
            RuntimeError: another rank ended, or did not answer within the group's timeout.
        """
        # The answer may be asked for several times, by ``settle`` and by whoever asked the question. The exchange ends
        # once.
        if self._work is not None:
            work, self._work = self._work, None
            self._wait_for(work)
            # All ranks hold the same bytes here, so all of them take this branch, and the exchange of words inside is
            # a collective that all of them run.
            if self._ranks_differ():
                raise DisagreementError(describe(self._all_statements()))
        half = len(self._buffer) // 2
        return bytes(self._buffer[self._num_common : half].tolist())

    def _wait_for(self, work: dist.Work) -> None:
        try:
            # This wait ends in an error if a rank died, and after the group's timeout if a rank runs something else.
            # In both cases the message must tell what this rank was about to do, because the backend's own names only
            # a socket.
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {dist.get_rank()} is about to {self._explain().action}, and waited in vain for the other ranks to do "
                f"the same: one of them ended, hangs, or was stopped ({error}). Look for the first error of the others."
            ) from error

    def _ranks_differ(self) -> bool:
        half = len(self._buffer) // 2
        largest, smallest = self._buffer[: self._num_common], 255 - self._buffer[half : half + self._num_common]
        return not torch.equal(largest, smallest)

    def _all_statements(self) -> list[Statement]:
        statements: list[Statement] = [Statement("", {})] * self._group.size()
        dist.all_gather_object(statements, self._explain(), group=self._group)
        return statements


def describe(statements: list[Statement]) -> str:
    """Return what ranks disagree about, in words. ``statements`` are in rank order."""
    by_action = _ranks_by([statement.action for statement in statements])
    if len(by_action) > 1:
        said = "; ".join(f"{_ranks(ranks)} about to {action}" for action, ranks in by_action.items())
        return (
            f"Ranks are about to run different collectives, which would wait for ever: {said}. Every rank must run the same "
            "forward and backward passes, with the same last micro-step."
        )
    # The first subject that differs is named. A cause in one unit often makes later units differ as well.
    for subject in dict.fromkeys(subject for statement in statements for subject in statement.facts):
        by_fact = _ranks_by([statement.facts.get(subject, "nothing") for statement in statements])
        if len(by_fact) > 1:
            said = "; ".join(f"{_ranks(ranks, verb=False)}: {fact}" for fact, ranks in by_fact.items())
            return (
                f"Ranks must agree before they {statements[0].action}, but {subject} differs: {said}. Change the model, and "
                "use its parameters, on all ranks alike."
            )
    return f"Ranks disagree about {statements[0].action}, though their descriptions are equal: {statements[0].facts}."


def _ranks_by(values: list[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _ranks(ranks: list[int], *, verb: bool = True) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is" if verb else f"rank {ranks[0]}"
    return f"ranks {ranks} are" if verb else f"ranks {ranks}"
