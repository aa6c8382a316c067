"""Small questions that all ranks answer together before they choose collectives.

Collectives run only if every rank calls the same ones in the same order. A rank that decides alone which collectives come
next (because *its* weights changed, or *it* believes that this is the last micro-step) makes the others wait for ever. So a
decision that chooses collectives is made in three steps:

1. every rank states what it has run since the last question, what it is about to do, the facts it relies on, and one small
   number per unit. All but the numbers become a digest of 8 bytes. What it ran with the ranks of its node alone becomes another;
2. one all-to-all gives the statements of all ranks, some hundred bytes each, to all ranks. It takes one trip over the network.
   An all-reduce of as many bytes takes two for each rank there is, because gloo passes it around a ring;
3. the first digest is compared between all ranks, the second between the ranks of a node. Where either differs, all ranks see it
   in the same result. They exchange words and raise the same error. Otherwise all of them go on with the largest number of each
   unit.

The group is one of its own, on the CPU: no other collective can come between, and no accelerator is waited for. Its timeout
is the world's, so a rank that died or was stopped ends the wait of the others. Who did not answer can be read from the
statements that have arrived: a digest is not zero, and the memory for it is until then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hf_zeropp.comm.disagreement import DisagreementError, Statement, are_words, describe_difference
from hf_zeropp.comm.exchange import exchange
from hf_zeropp.comm.topology import destroy_group

logger = logging.getLogger(__name__)

T = TypeVar("T")

DIGEST_BYTES = 8

PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the others before it logs who has not answered. It goes on waiting until the group's timeout."""


class Channel:
    """A process group for exchanges of statements. It refers to no model, so that it can be closed behind one.

    Attributes:
        group: the ranks, over a backend that moves CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._last: dist.Work | None = None

    def start(self, received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
        """Start ``received`` [W * S] <- from each rank the part of its ``sent`` [W * S] for this rank."""
        work: Any = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        self._last = work
        return work

    def close(self) -> None:
        """Destroy the group, and with it its threads and sockets. No other rank has to do so at the same time."""
        # A pass that raised may leave an exchange that the other ranks never join. gloo would wait for it, as long as the
        # timeout is. Then the group stays.
        if self._last is None or self._last.is_completed():
            destroy_group(self.group)


class Agreement:
    """Compares statements of all ranks of one group.

    Args:
        channel: the ranks.
        nodes: the node of each rank, in the order of the group; by default all are on one.
    """

    def __init__(self, channel: Channel, nodes: Sequence[int] | None = None) -> None:
        self._channel = channel
        self._num_ranks = channel.group.size()
        self._nodes = tuple(nodes or [0] * self._num_ranks)
        self._pending: Answer | None = None

    def ask(self, common: bytes, flags: bytes, explain: Callable[[], Statement], of_node: bytes = b"") -> Answer:
        """Start one exchange. Collective: every rank of the group must ask, or the exchange waits until the timeout.

        Args:
            common: bytes that must be equal on all ranks.
            flags: bytes of which the largest over all ranks counts, as many on all ranks.
            explain: states this rank's part in words; called only where ranks differ.
            of_node: bytes that must be equal on all ranks of a node.
        """
        # An exchange that is still under way is finished first. If its statements differ, ``confirm`` runs a second
        # collective. With a new exchange started before that on some ranks, the group's collectives would come in
        # different orders.
        self.settle()
        # A digest has the same length whatever is stated, so questions of different moments meet in one collective, and
        # are seen to differ.
        message = _digest(common) + _digest(of_node) + flags
        # Bytes are handled by Python and NumPy, whose calls cost less than those of PyTorch. This runs twice in a micro-step.
        sent = torch.frombuffer(bytearray(message * self._num_ranks), dtype=torch.uint8)
        received = torch.zeros_like(sent)  # and not ``empty_like``: ``_describe_silence``
        work = self._channel.start(received, sent)
        # ``explain`` is kept and not called: words for every unit would cost more than the exchange, and are rarely
        # needed. The buffer that is sent must live until the exchange has ended.
        rows = received.numpy().reshape(self._num_ranks, -1)
        self._pending = Answer(self._channel.group, self._nodes, work, sent, rows, explain)
        return self._pending

    def settle(self) -> None:
        """Wait for an exchange that was asked and not looked at yet, so that exchanges keep one order on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.confirm()

    def tell(self, words: T) -> list[T]:
        """Return what all ranks tell, in rank order. Collective: ranks must have agreed that they tell something."""
        return exchange(words, self._channel.group)


@dataclasses.dataclass(eq=False)
class Answer:
    """One exchange under way."""

    _group: dist.ProcessGroup
    _nodes: tuple[int, ...]
    _work: dist.Work | None
    _sent: torch.Tensor | None
    _received: np.ndarray
    _explain: Callable[[], Statement]

    def largest(self) -> bytes:
        """Wait, and return the largest value of each flag over all ranks.

        Raises:
            DisagreementError: as ``confirm`` does.
            RuntimeError: as ``confirm`` does.
        """
        self.confirm()
        return self._received[:, 2 * DIGEST_BYTES :].max(axis=0).tobytes()

    def confirm(self) -> None:
        """Wait until it is known that all ranks made the same statement.

        Raises:
            DisagreementError: on every rank, if they did not.
            RuntimeError: another rank ended, or did not answer within the group's timeout.
        """
        # The answer may be asked for several times, by ``settle`` and by the caller who asked the question. The exchange ends
        # once.
        if self._work is None:
            return
        work, self._work = self._work, None
        self._wait_for(work)
        self._sent = None
        # All ranks hold the same bytes here, so all of them take this branch, and the exchange of words inside is
        # a collective that all of them run.
        common, of_node = self._received[:, :DIGEST_BYTES], self._received[:, DIGEST_BYTES : 2 * DIGEST_BYTES]
        firsts = [self._nodes.index(node) for node in self._nodes]  # the first rank of each rank's node
        if (common != common[0]).any() or (of_node != of_node[firsts]).any():
            ranks = dist.get_process_group_ranks(self._group)
            statements = dict(zip(ranks, exchange(self._explain(), self._group), strict=True))
            raise DisagreementError(describe_difference(statements, dict(zip(ranks, self._nodes, strict=True))))

    def _wait_for(self, work: dist.Work) -> None:
        try:
            # This wait ends in an error if a rank died, and after the group's timeout if a rank runs something else.
            # In both cases the message must tell what this rank was about to do, because the backend's own names only
            # a socket.
            if not self._is_answered_soon(work):
                logger.warning("%s, and has waited for %s: %s.", self._asker(), PATIENCE, self._describe_silence())
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._asker()}, and waited in vain for the other ranks to do the same: {self._describe_silence()}. Look for "
                f"the first error of the others. Here it ended with: {error}"
            ) from error

    def _is_answered_soon(self, work: dist.Work) -> bool:
        try:
            work.wait(PATIENCE)
        except RuntimeError:
            if work.is_completed():  # it failed; waiting again would only repeat the error
                raise
            return False
        return True

    def _asker(self) -> str:
        return f"Rank {dist.get_rank()} is about to {self._explain().action}"

    def _describe_silence(self) -> str:
        """Say whose statement has not arrived, while an exchange is under way or after it failed."""
        # Every rank sends its statement to each of the others by itself, so one that is missing tells of its sender alone.
        ranks = dist.get_process_group_ranks(self._group)
        silent = [ranks[index] for index, row in enumerate(self._received) if not row[:DIGEST_BYTES].any()]
        if not silent:
            return "all of them are here, but one has ended since"
        return f"{are_words(silent)} not there (its data ended before that of the others? it ended, hangs, or was stopped?)"


def _digest(stated: bytes) -> bytes:
    return hashlib.blake2b(stated, digest_size=DIGEST_BYTES).digest()
