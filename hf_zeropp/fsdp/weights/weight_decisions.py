"""The decisions of all ranks on weights: which units are gathered anew in a forward pass.

A forward pass begins with a question. Every rank states which units' weights changed (freshness.py). A unit is gathered anew if
it changed on any rank. The answers hold until that forward pass ends, in generation, and in the backward pass of the same model
with its activation recomputation; but no longer than until an optimizer steps, should it step inside a forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from hf_zeropp import devices
from hf_zeropp.comm.exchange import ranks_by
from hf_zeropp.fsdp.gradients.backward_passes import current_backward
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.questions import Questions
from hf_zeropp.fsdp.unit_words import words_of_structure, words_of_unseen_changes
from hf_zeropp.fsdp.weights.freshness import Change
from hf_zeropp.fsdp.weights.gather import WeightGather
from hf_zeropp.fsdp.weights.node_gather import NodeGather
from hf_zeropp.fsdp.weights.schedule import GatherSchedule


@dataclasses.dataclass(frozen=True, eq=False)
class Entrance:
    """A module at which a forward pass may begin.

    Attributes:
        name: its name, which ranks compare.
        modules: those of itself and its submodules that are units.
    """

    name: str
    modules: frozenset[nn.Module]


class WeightDecisions:
    """One model's decisions on weights, on this rank.

    Args:
        run: what all units share.
        questions: asks the other ranks.
        of_nodes: the gathers of all units over a node.

    Attributes:
        gathers: the gathers of all units over the world, in module order.
        is_generating: whether weights must not change now.
    """

    def __init__(self, run: ModelRun, questions: Questions, of_nodes: Sequence[NodeGather]) -> None:
        self.gathers: list[WeightGather] = []
        self.is_generating = False
        self._run = run
        self._questions = questions
        self._of_nodes = of_nodes
        self._schedule = GatherSchedule(run.mesh.device_type, overlaps=run.config.overlap)
        self._entered: list[Entrance] = []  # the forward passes under way, one inside the other
        self._trains = False  # whether the outermost of them has gradients
        for gather in of_nodes:
            gather.before_gather = self.before_node_gather

    @property
    def modules_of_nodes(self) -> frozenset[nn.Module]:
        """The modules of units over a node."""
        return frozenset(module for gather in self._of_nodes for module in gather.unit.modules)

    # Passes.

    def enter_forward(self, entrance: Entrance) -> None:
        """Agree on the weights of the units inside of ``entrance`` if an outermost forward pass begins there."""
        # A pass that does not contain this one has ended without its hook: PyTorch calls no forward hook after a
        # KeyboardInterrupt.
        while self._entered and not entrance.modules < self._entered[-1].modules:
            self._entered.pop()

        # Only units within the module that was entered are asked about: reading the shards of the rest (the other
        # model of a container) would be in vain.
        def is_inside(gather: WeightGather) -> bool:
            return not entrance.modules.isdisjoint(gather.unit.modules)

        if not self._has_answers(filter(is_inside, self.gathers)):
            # A pass without gradients leaves out what a rank that trains would wait for.
            manner = "" if torch.is_grad_enabled() else " without gradients"
            self._agree(list(filter(is_inside, self.gathers)), f"run a forward pass of {entrance.name}{manner}")
            self._questions.tells_node = self._should_tell_node()
        if not self._entered:
            self._trains = torch.is_grad_enabled()
        self._entered.append(entrance)
        # Whether layers are recomputed in backward follows from the forward pass. In generation nodes may run different ones.
        # Reentrant checkpointing turns gradients off around a layer that trains.
        trains = self._trains or torch.is_grad_enabled()
        if trains and current_backward() == -1 and not self.is_generating:
            self._questions.note(f"forward passes of {entrance.name}")

    def leave_forward(self, entrance: Entrance) -> None:
        """Note that a forward pass ended, or raised."""
        if entrance in self._entered:  # a pass may raise before it has entered, and a step ends what it runs in
            del self._entered[self._entered.index(entrance) :]
        if not self._entered:
            self._schedule.finish()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Agree on all weights once, for every forward pass inside. Weights must not change meanwhile."""
        # All units are asked about, since generation may use any part of the model. Inside, ranks of different nodes
        # may run different numbers of forward passes (one has finished its completions), so nothing is asked there.
        # Everything crosses now, also on accelerators: a gather inside that still had to cross could wait for a node that
        # generates no more.
        self._agree(self.gathers, "enter generation_mode", starts_now=True)
        was_generating, self.is_generating = self.is_generating, True
        try:
            for gather in self.gathers:
                # FSDP2 alone makes what such a unit sends (an offloaded one, for instance), so no schedule has started it.
                if gather.stays_in_group and gather.copy.due != Change.NONE:
                    with gather.unit.kept_gathered():
                        pass
            yield
        finally:
            self.is_generating = was_generating

    # Gathers.

    def before_gather(self, gather: WeightGather) -> None:
        """Let ranks agree where FSDP2 gathers outside of every pass, because ``unshard()`` was called, and start cross hops."""
        if not self._has_answers([gather]):
            self._agree(self.gathers, "unshard parameters")
        if gather.is_of_all_ranks:
            self._questions.note(f"gathers of unit {gather.unit.name}")
        elif gather.waits_in_node:
            self._note_in_node(gather.unit.name, gather.hops.node_hop.group)
        self._schedule.reach(gather)

    def before_node_gather(self, gather: NodeGather) -> None:
        """Note a gather of frozen weights in a pass of the model."""
        if self._entered:
            self._note_in_node(gather.first_param, gather.unit.shard_group)

    # Changes.

    def invalidate(self) -> None:
        """Gather whole weights at the next forward pass. This is a mark of one rank, which ranks exchange then."""
        for gather in self.gathers:
            gather.copy.freshness.mark(Change.INVALID)

    def before_step(self, held: set[int], *, has_closure: bool) -> None:
        """Note that an optimizer of the parameters with these ids is about to step."""
        for gather in self.gathers:
            if gather.unit.has_param_of(held):
                # The step begins now. If the weights have changed already, something else has written to them. With deltas
                # that matters: after a step a delta is enough, and after any other write whole weights must cross.
                gather.copy.freshness.before_step(has_closure=has_closure)

    def after_step(self, held: set[int]) -> None:
        """Note that the step ended."""
        for gather in self.gathers:
            if gather.unit.has_param_of(held):
                gather.copy.freshness.after_step()

    def end_answers(self) -> None:
        """An optimizer is about to write weights: answers end here, also for a forward pass that it steps in."""
        # In backward, where optimizers may step for one parameter after the other, the rest of the pass keeps its weights:
        # ``_has_answers``.
        self._entered.clear()
        self._schedule.wait_before_writes()

    # Questions.

    def _has_answers(self, gathers: Iterable[WeightGather]) -> bool:
        if self._entered or self.is_generating:
            return True
        # Backward and recomputation must use the weights of the forward pass, so they keep its answers and ask nothing. A
        # backward pass of another model, which runs this one in a hook, has no answers for it.
        return current_backward() != -1 and any(gather.unit.is_in_backward for gather in gathers)

    def _should_tell_node(self) -> bool:
        """Return whether ranks of a node tell each other what they gather, before each gather of the pass that begins."""
        waits = not devices.has_streams(self._run.mesh.device_type) and self._run.mesh.topology.node_group.size() > 1
        if not (waits and torch.is_grad_enabled()):
            return False
        # A rank of another node that waits for this one in a gather could not be asked.
        return current_backward() == -1 and not any(gather.is_of_all_ranks for gather in self.gathers)

    def _note_in_node(self, name: str, group: dist.ProcessGroup) -> None:
        if not self.is_generating:
            self._questions.note_in_node(name, group, tells=current_backward() == -1)

    def _agree(self, asked: Sequence[WeightGather], action: str, *, starts_now: bool = False) -> None:
        # FSDP2 would initialize these units later, but their cross hops start before.
        for gather in asked:
            gather.unit.initialize()
        # Reading the shards is the cost of a question. A unit that is not asked about keeps its state for the next one.
        changes = {gather: gather.copy.freshness.change() for gather in asked}
        flags = [changes.get(gather, Change.NONE) for gather in self.gathers]
        # Gradients of a unit with hooks cross nodes at every micro-step, so a hook on one rank alone would change collectives.
        facts = [_structure_digest(gather.unit.structure()) for gather in self.gathers]
        # A rank on which a frozen weight thaws refuses to gather it, and the others would wait.
        facts.append(_structure_digest(self._questions.thawed()))
        # The order matters: until the statements were compared, a rank does not know that the others have as many
        # unfinished reductions, and finishing one runs collectives.
        largest = self._questions.ask(
            action, facts, flags, lambda index: words_of_structure(self.gathers[index].unit)
        ).largest()
        self._run.driver.drain()
        self._refuse_unseen(changes, largest)
        for of_node in self._of_nodes:
            if of_node.unit.shard_group.size() == 1:  # FSDP2 calls no gather there that could refuse
                of_node.refuse_thawed()
        for gather, change in zip(self.gathers, largest, strict=True):
            if gather in changes:
                gather.copy.agree(Change(change))
        if self._run.checks:
            # Ranks compare which units' weights they are about to send. Otherwise a rank could wait for one that sends nothing.
            to_send = [gather.copy.due for gather in self.gathers]
            self._questions.ask(
                "start the hops of stale weights", to_send, describe=lambda index: f"due for {to_send[index].name}"
            ).confirm()
        due = [gather for gather in asked if gather.can_start_ahead]
        self._schedule.begin(due, starts_now=starts_now)
        if self._run.checks:
            # A landing compares copies, which all ranks have to do in one order. Later they may use different units.
            for gather in due:
                if gather.copy.is_under_way:
                    gather.land()

    def _refuse_unseen(self, changes: Mapping[WeightGather, Change], largest: bytes) -> None:
        """Raise on all ranks if weights changed on any by a write that nothing told of: [Note: writes that move no counter]."""
        if Change.UNSEEN not in largest:
            return
        unseen = [gather for gather, change in zip(self.gathers, largest, strict=True) if change == Change.UNSEEN]
        own = [gather.unit.name for gather in unseen if changes.get(gather) == Change.UNSEEN]
        found = ranks_by((rank, name) for rank, names in self._questions.tell((dist.get_rank(), own)) for name in names)
        raise RuntimeError(words_of_unseen_changes(found))


# Structures rarely change, and a digest for each unit is needed at every forward pass. It is no ``hash``: Python
# salts that of a string in each process, and ranks would differ.
@functools.lru_cache(maxsize=4096)
def _structure_digest(structure: tuple[object, ...]) -> int:
    return zlib.crc32(repr(structure).encode())
