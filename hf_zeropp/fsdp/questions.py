"""The questions that the ranks of one model ask each other, and what goes with each of them.

With every question go facts that would make ranks run different collectives later, and what the rank has run since the last one.
If ranks differ, all of them raise the same error, which names unit and ranks (comm/agreement.py).
"""

from __future__ import annotations

import array
import dataclasses
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_zeropp.comm.agreement import Agreement, Answer
from hf_zeropp.comm.disagreement import SKIP_IN_A_NODE, Statement
from hf_zeropp.comm.hop import HopError
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.node_gather import NodeGather

# [Note: what ran]
# Ranks that skip different layers of equal shape (LayerDrop with a seed per rank, early exit, experts without tokens) run as many
# collectives as each other, of equal sizes, and exchange the weights and gradients of different layers. No hop can tell.
# Therefore each rank notes what it runs: collectives of all ranks, and the modules that a forward pass with gradients enters. The
# first question of a backward pass then tells of a skipped layer before any gradient is exchanged. What the backward pass itself
# reduced is compared at its end, in time for the optimizer's step.
#
# [Note: what ran in a node]
# A gather of the ranks of a node is noted apart, since only these have to run the same: other nodes may run others, without
# gradients. In generation nothing is noted, because nothing is asked there.
# If ranks of a node run different modules, one waits in a gather, and another one in another gather, or in the next question. On
# accelerators no host waits in a gather, and all ask. On a CPU the question would not come about. So there the ranks of a node
# tell each other what they are about to do, before a gather in which they would wait. They do so in forward passes with gradients
# alone: it takes as long as a gather of few weights, and what backward gathers follows from the forward pass. A rank that comes
# to a question tells that.

T = TypeVar("T")

Describe = Callable[[int], str]
"""Gives the fact of the unit with an index, in words."""


class Questions:
    """The questions of this rank to the other ranks that train the same model.

    Args:
        run: what all units share.
        agreement: compares statements.
        of_nodes: the gathers of all units over a node.

    Attributes:
        units: those over the world, in module order. A question carries a number for each.
        tells_node: whether ranks of the node tell each other what they gather: from a forward pass with gradients until the next
            question.
    """

    def __init__(self, run: ModelRun, agreement: Agreement, of_nodes: Sequence[NodeGather]) -> None:
        self.units: list[Unit] = []
        self.tells_node = False
        self._run = run
        self._agreement = agreement
        self._of_nodes = of_nodes
        self._node_group = run.mesh.topology.node_group
        self._are_of_node: dict[dist.ProcessGroup, bool] = {}
        self._ran: list[str] = []  # what ran since the last question, in the plural
        self._ran_in_node: list[str] = []

    def ask(
        self,
        action: str,
        facts: Sequence[int] = (),
        flags: Sequence[int] = (),
        describe: Describe = lambda index: "",
        remedy: str | None = None,
    ) -> Answer:
        """Ask all ranks whether they are about to do the same, and have run the same since the last question.

        Args:
            action: in words, which ranks compare.
            facts: numbers that ranks compare as well, of each unit and others.
            flags: of each unit a number of which the largest counts; by default zeros.
            describe: gives the fact of the unit with an index, in words.
            remedy: what to do if other ranks are about to do something else; None for that of most questions.
        """
        if self.tells_node:
            self.tells_node = False
            self._tell_node("ask all ranks", waits=False)
        statement, ran, self._ran = self._statement(action, describe, remedy), self._ran, []
        ran_in_node, self._ran_in_node = self._ran_in_node, []
        # Ranks that left a backward pass at different units would finish different numbers of hops.
        numbers = array.array("q", (len(self._run.driver), *facts)).tobytes()
        common = "\n".join((action, *ran, "")).encode() + numbers
        of_node = "\n".join(ran_in_node).encode()
        return self._agreement.ask(common, bytes(flags) or bytes(len(self.units)), statement, of_node)

    def is_any(self, action: str, flag: bool) -> bool:
        """Return whether a flag is set on any rank. Collective: ranks must be about to do the same."""
        return any(self.ask(action, flags=[flag] * len(self.units)).largest())

    def tell_faults(self, unit: str, fault: str) -> list[str]:
        """Return what each data-parallel rank found wrong with a unit's copies; nothing where no rank did. Collective.

        Args:
            unit: its name, which experts on other ranks share.
            fault: what this rank found; empty if it found nothing.
        """
        action = f"compare the copies of unit {unit} with the masters"
        # There are as many flags as in the questions that other ranks may ask by mistake.
        flags = bytes([bool(fault)] * len(self.units))
        answer = self._agreement.ask(action.encode(), flags, self._statement(action))
        return self._agreement.tell(fault) if any(answer.largest()) else []

    def tell(self, words: T) -> list[T]:
        """Return what all ranks tell. Collective: ranks must have agreed that they tell something."""
        return self._agreement.tell(words)

    def note(self, ran: str) -> None:
        """Note what all ranks have to run, in the plural. See [Note: what ran]."""
        # Gathers come very often, so equal words are one object.
        self._ran.append(sys.intern(ran))

    def note_in_node(self, unit: str, group: dist.ProcessGroup, *, tells: bool) -> None:
        """Note a gather that is about to run among the ranks of the node. See [Note: what ran in a node].

        Args:
            unit: its name.
            group: the ranks that gather it.
            tells: whether ranks may tell each other now. They do if ``tells_node``.

        Raises:
            DisagreementError: on every rank of the model, if another rank of the node is about to do something else.
        """
        if not self._is_of_node(group):
            return
        self._ran_in_node.append(sys.intern(f"gathers of unit {unit}"))
        if not (self.tells_node and tells):
            return
        action = f"gather unit {unit} within the node"
        try:
            is_agreed = self._tell_node(action, waits=True)
        except RuntimeError as error:
            raise HopError("agreement, within node", self._node_group, error) from error
        if not is_agreed:
            self.tells_node = False
            self.ask(action, remedy=SKIP_IN_A_NODE).confirm()  # the other nodes' next question is another one

    def thawed(self) -> tuple[str, ...]:
        """Return the names of frozen weights that train now."""
        return tuple(name for gather in self._of_nodes for name in gather.thawed())

    def _is_of_node(self, group: dist.ProcessGroup) -> bool:
        """Return whether a group has the ranks of the node, and several of them. Copies and experts may lie on other groups."""
        if group not in self._are_of_node:
            ranks = [dist.get_process_group_ranks(each) for each in (group, self._node_group)]
            self._are_of_node[group] = ranks[0] == ranks[1] and len(ranks[0]) > 1
        return self._are_of_node[group]

    def _tell_node(self, action: str, *, waits: bool) -> bool:
        """Tell the ranks of the node what this one is about to do. Where it waits, return whether all do the same."""
        own = torch.tensor([zlib.crc32(action.encode())])
        told = [torch.empty_like(own) for _ in range(self._node_group.size())]
        dist.all_gather(told, own, group=self._node_group, async_op=not waits)
        return all(one == own for one in told) if waits else True

    def _statement(
        self, action: str, describe: Describe = lambda index: "", remedy: str | None = None
    ) -> Callable[[], Statement]:
        """Return a function that makes this rank's statement, with what it is now and with what it has run up to now."""
        under_way, ran, ran_in_node = len(self._run.driver), tuple(self._ran), tuple(self._ran_in_node)

        def make() -> Statement:
            facts = {f"unit {unit.name}": describe(index) for index, unit in enumerate(self.units)}
            facts["the number of reductions that a backward pass left unfinished"] = str(under_way)
            facts["what was frozen and trains now"] = ", ".join(self.thawed()) or "nothing"
            statement = Statement(action, facts, ran, ran_in_node)
            return statement if remedy is None else dataclasses.replace(statement, remedy=remedy)

        return make
