"""Decisions that all ranks take together: which weights are gathered anew, and when gradients are delivered.

Ranks agree (comm/agreement.py) on these occasions, among others:

- *A forward pass begins.* Every rank states which units' weights changed (freshness.py). A unit is gathered anew if it changed on
  any rank. The answers hold until that forward pass ends, in generation, and in the backward pass of the same model with its
  activation recomputation; but no longer than until an optimizer steps, should it step inside a forward pass.
- *A backward pass reduces its first unit.* Every rank states whether this is the last micro-step. On a CPU the answer is waited
  for before the first hop starts. On an accelerator the exchange runs while the model computes.
- *Pending gradients are needed* (gradients/pending.py): by an optimizer's step, or in ``handle.deliver()``. Every rank states for
  which units.
- *The backward pass of the last micro-step ends.* What ranks ran in it is compared, in time for an optimizer's step.

With each statement go facts that would make ranks run different collectives later: frozen parameters, dtypes, reductions that a
backward pass left when it raised. And it says what the rank ran since the last statement ([Note: what ran]). If ranks differ, all
of them raise the same error, which names unit and ranks.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from hf_zeropp import devices
from hf_zeropp.comm.agreement import SKIP_IN_A_NODE, Agreement, Answer, Statement
from hf_zeropp.comm.exchange import ranks_by, words_of
from hf_zeropp.comm.hop import HopError
from hf_zeropp.fsdp.gradients.backward_passes import Backward, current_backward, require_backward
from hf_zeropp.fsdp.gradients.plain import PlainParameters
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.run import Run
from hf_zeropp.fsdp.weights.freshness import Change
from hf_zeropp.fsdp.weights.frozen_gather import FrozenGather
from hf_zeropp.fsdp.weights.gather import WeightGather, ZeroPPAllGather
from hf_zeropp.fsdp.weights.low_rates import warn_of_low_rate
from hf_zeropp.muon import Muon, warn_of_gathers
from hf_zeropp.traffic import OPTIMIZER

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

NAMED = 4
"""Units that an error names."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entrance:
    """A module at which a forward pass may begin.

    Attributes:
        name: its name, which ranks compare.
        modules: those of itself and its submodules that are units.
    """

    name: str
    modules: frozenset[nn.Module]


class Decisions:
    """One model's decisions, on this rank.

    Args:
        run: what all units share.
        agreement: the questions that ranks ask each other.
        frozen: the gathers of all units over a node.
        model: the model, which is not kept alive.

    Attributes:
        gathers: the gathers of all units over the world, in module order.
        reduces: the reductions of the same units.
        backward: the model's backward passes.
    """

    def __init__(self, run: Run, agreement: Agreement, frozen: Sequence[FrozenGather], model: nn.Module) -> None:
        self.gathers: list[WeightGather] = []
        self.reduces: list[ZeroPPReduceScatter] = []
        self._run = run
        self._frozen = list(frozen)
        self._agreement = agreement
        self._node_group = run.mesh.topology.node_group
        # From a forward pass with gradients until the next question: [Note: what ran in a node]
        self._tells_node = False
        self._plain = PlainParameters(model, self._is_any, agreement.tell)
        self._micro_step_answer: Answer | None = None
        self.backward = Backward(self._end_backward)
        self._entered: list[Entrance] = []  # the forward passes under way, one inside the other
        self._is_generating = False
        self._has_stepped = False
        self._ran: list[str] = []  # what ran since the last question, in the plural: [Note: what ran]
        self._ran_in_node: list[str] = []
        self._are_of_node: dict[dist.ProcessGroup, bool] = {}
        for gather in self._frozen:
            gather.before_gather = self.before_frozen_gather

    @property
    def modules_of_nodes(self) -> frozenset[nn.Module]:
        """The modules of units over a node."""
        return frozenset(module for gather in self._frozen for module in gather.unit.modules)

    def add_unit(self, gather: WeightGather, reduce: ZeroPPReduceScatter) -> None:
        """Decide on the next unit, in module order, as well."""
        self.gathers.append(gather)
        self.reduces.append(reduce)

    # Weights.

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
            asked = list(filter(is_inside, self.gathers))
            self._agree_on_weights(asked, f"run a forward pass of {entrance.name}{manner}")
            self._tells_node = self._may_part()
        self._entered.append(entrance)
        # Whether layers are recomputed in backward follows from the forward pass. In generation nodes may run different ones.
        if torch.is_grad_enabled() and current_backward() == -1 and not self._is_generating:
            self._ran.append(f"forward passes of {entrance.name}")

    def _may_part(self) -> bool:
        """Return whether ranks of a node could wait for each other in this pass, which begins, and tell each other in time."""
        waits = not devices.has_streams(self._run.mesh.device_type) and self._node_group.size() > 1
        if not (waits and torch.is_grad_enabled()):
            return False
        # A rank of another node that waits for this one in a gather could not be asked.
        return current_backward() == -1 and not any(gather.is_of_all_ranks for gather in self.gathers)

    def leave_forward(self, entrance: Entrance) -> None:
        """Note that a forward pass ended, or raised."""
        if entrance in self._entered:  # a pass may raise before it has entered, and a step ends what it runs in
            del self._entered[self._entered.index(entrance) :]
        if not self._entered:
            self._run.schedule.finish()

    def invalidate(self) -> None:
        """Gather whole weights at the next forward pass. This is a mark of one rank, which ranks exchange then."""
        for gather in self.gathers:
            gather.expire()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Agree on all weights once, for every forward pass inside. Weights must not change meanwhile."""
        # All units are asked about, since generation may use any part of the model. Inside, ranks of different nodes
        # may run different numbers of forward passes (one has finished its completions), so nothing is asked there.
        # Everything crosses now, also on accelerators: a gather inside that still had to cross could wait for a node that
        # generates no more.
        self._agree_on_weights(self.gathers, "enter generation_mode", starts_now=True)
        was_generating, self._is_generating = self._is_generating, True
        try:
            for gather in self.gathers:
                # FSDP2 alone makes what such a unit sends (an offloaded one, for instance), so no schedule has started it.
                is_left = (
                    isinstance(gather, ZeroPPAllGather) and gather.stays_in_group and gather.copy.due != Change.NONE
                )
                if is_left:
                    with gather.unit.kept_gathered():
                        pass
            yield
        finally:
            self._is_generating = was_generating

    def _has_answers(self, gathers: Iterable[WeightGather]) -> bool:
        if self._entered or self._is_generating:
            return True
        # Backward and recomputation must use the weights of the forward pass, so they keep its answers and ask nothing. A
        # backward pass of another model, which runs this one in a hook, has no answers for it.
        return current_backward() != -1 and any(gather.unit.is_in_backward for gather in gathers)

    def before_gather(self, gather: WeightGather) -> None:
        """Let ranks agree where FSDP2 gathers outside of every pass, because ``unshard()`` was called, and note the gather."""
        if not self._has_answers([gather]):
            self._agree_on_weights(self.gathers, "unshard parameters")
        # Generation asks nothing and gathers very often, so equal words are one object.
        if gather.is_of_all_ranks:
            self._ran.append(sys.intern(f"gathers of unit {gather.unit.name}"))
        elif isinstance(gather, ZeroPPAllGather) and gather.waits_in_node:
            self._gather_in_node(gather.unit.name, gather.hops.node_hop.group)

    def before_frozen_gather(self, gather: FrozenGather) -> None:
        """Note a gather of frozen weights in a pass of the model."""
        if self._entered:
            self._gather_in_node(gather.first_param, gather.unit.shard_group)

    def _gather_in_node(self, name: str, group: dist.ProcessGroup) -> None:
        """Note a gather that is about to run among the ranks of the node. See [Note: what ran in a node].

        Raises:
            DisagreementError: on every rank of the model, if another rank of the node is about to do something else.
        """
        if self._is_generating or not self._is_of_node(group):
            return
        self._ran_in_node.append(sys.intern(f"gathers of unit {name}"))
        if not self._tells_node or current_backward() != -1:
            return
        action = f"gather unit {name} within the node"
        try:
            is_agreed = self._tell_node(action, waits=True)
        except RuntimeError as error:
            raise HopError("agreement, within node", self._node_group, error) from error
        if not is_agreed:
            self._tells_node = False
            self._ask(action, remedy=SKIP_IN_A_NODE).confirm()  # the other nodes' next question is another one

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

    def _agree_on_weights(self, asked: Sequence[WeightGather], action: str, *, starts_now: bool = False) -> None:
        # FSDP2 would initialize these units later, but their cross hops start before.
        for gather in asked:
            gather.unit.initialize()
        # Reading the shards is the cost of a question. A unit that is not asked about keeps its state for the next one.
        changes = {gather: gather.copy.freshness.change() for gather in asked}
        flags = [changes.get(gather, Change.NONE) for gather in self.gathers]
        # Gradients of a unit with hooks cross nodes at every micro-step, so a hook on one rank alone would change collectives.
        facts = [_structure_digest(gather.unit.structure()) for gather in self.gathers]
        # A rank on which a frozen weight thaws refuses to gather it, and the others would wait.
        facts.append(_structure_digest(self._thawed()))
        # The order matters: until the statements were compared, a rank does not know that the others have as many
        # unfinished reductions, and finishing one runs collectives.
        largest = self._ask(action, facts, flags, self._describe_structure).largest()
        self._run.driver.drain()
        self._refuse_unseen(changes, largest)
        for frozen in self._frozen:
            if frozen.unit.shard_group.size() == 1:  # FSDP2 calls no gather there that could refuse
                frozen.refuse_thawed()
        for gather, change in zip(self.gathers, largest, strict=True):
            if gather in changes:
                gather.copy.agree(Change(change))
        if self._run.checks:
            self._compare_due()
        due = [one for one in asked if isinstance(one, ZeroPPAllGather) and one.can_start_ahead]
        self._run.schedule.begin(due, starts_now=starts_now)
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
        found = ranks_by((rank, name) for rank, names in self._agreement.tell((dist.get_rank(), own)) for name in names)
        said = [f"unit {name} on {words_of(ranks)}" for name, ranks in found.items()]
        raise RuntimeError(
            f"Weights have changed since they were gathered, and no version counter tells of it: {'; '.join(said[:NAMED])}"
            f"{f' and {len(said) - NAMED} more' if said[NAMED:] else ''}. Other nodes hold the old ones, and on accelerators the "
            "pass before this one has computed with them. Call handle.invalidate() after writes through param.data, NumPy, "
            "pointers or torch._foreach_* functions, and after a checkpoint was loaded in place."
        )

    def _compare_due(self) -> None:
        """Compare which units' weights every rank is about to send, before one waits for another that sends nothing."""
        due = [int(gather.copy.due) for gather in self.gathers]
        said = "start the hops of stale weights"
        self._ask(said, due, describe=lambda index: f"due for {Change(due[index]).name}").confirm()

    def tell_faults(self, unit: str, fault: str) -> list[str]:
        """Return what each data-parallel rank found wrong with a unit's copies; nothing where no rank did. Collective.

        Args:
            unit: its name, which experts on other ranks share.
            fault: what this rank found; empty if it found nothing.
        """
        action = f"compare the copies of unit {unit} with the masters"
        # There are as many flags as in the questions that other ranks may ask by mistake.
        flags = bytes([bool(fault)] * len(self.gathers))
        answer = self._agreement.ask(action.encode(), flags, self._statement(action))
        return self._agreement.tell(fault) if any(answer.largest()) else []

    # Gradients.

    def keeps_unreduced(self) -> bool:
        """Return whether gradients stay on the rank at full size in this pass, which is not the last micro-step."""
        if not self._run.config.accumulates_on_rank:
            return False
        self._enter_micro_step()
        return not self._run.micro_steps.is_last_now

    def _enter_micro_step(self) -> None:
        require_backward()
        if self.backward.begins_micro_step():
            self._run.traffic.micro_steps += 1
            puts_off = any(reduce.unit.puts_off_replicas for reduce in self.reduces)
            self._run.micro_steps.enter_backward(puts_off_replicas=puts_off)

    def reduction_begins(self, reduce: ZeroPPReduceScatter) -> None:
        """Take note of a reduction that FSDP2 asks for, and finish with the backward pass."""
        self._enter_micro_step()
        # On an accelerator the host waits for the answer in the second reduction, or at the end of a pass that has one reduction.
        self.confirm_micro_step()
        # Each loss of a step may have units of its own. What they share is accumulated, whatever the script calls it.
        if self._run.micro_steps.is_untold and any(param.grad is not None for param in reduce.unit.trainable):
            self._run.micro_steps.warn_of_untold(reduce.unit.name)
        self._ran.append(f"reductions of unit {reduce.unit.name}")
        if self.backward.begins_to_reduce():
            self._run.traffic.begin_backward()
            # ``quantizes`` may change here, and it is part of the statement: ranks that were told of different
            # progress would reduce wires of different sizes.
            micro_steps = self._run.micro_steps
            micro_steps.begin_step(is_accumulating=any(one.partial_bytes() for one in self.reduces))
            is_last, quantizes = micro_steps.is_last_now, micro_steps.quantizes
            action = (
                f"run a backward pass of {'the last' if is_last else 'another'} micro-step, with gradients "
                f"{'quantized' if quantizes else 'unquantized'}"
            )
            self._micro_step_answer = self._ask_debts(action)
            # gloo ends the process of a rank that receives a hop of another size (SIGABRT). So on a CPU no hop starts before
            # ranks know that they reduce the gradients of the same units.
            if not devices.has_streams(self._run.mesh.device_type):
                self.confirm_micro_step()

    def confirm_micro_step(self) -> None:
        """Make sure that all ranks run this backward pass, and take it for the same micro-step."""
        answer, self._micro_step_answer = self._micro_step_answer, None
        if answer is not None:
            answer.confirm()

    def deliver(self) -> None:
        """Complete all gradients of the model. Collective if any is pending."""
        # A rank that owes nothing asks nothing: before most steps gradients are complete. Where ranks differ in
        # what they owe, the question of one meets another question of the others, and all of them raise.
        if any(reduce.owes for reduce in self.reduces):
            self._ask_debts("complete accumulated gradients, for an optimizer's step or in handle.deliver()").confirm()
            self._run.driver.drain()
        for reduce in self.reduces:
            reduce.deliver()

    # Optimizers' steps. Every optimizer of the process is told of here, also that of another model.

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Complete the gradients that the optimizer is about to read, and note that it may change weights.

        Raises:
            RuntimeError: weights must not change now, or gradients of micro-steps wait for one that was not there.
            ValueError: on every rank, if it trains parameters that are not sharded, and nobody averages their gradients.
            DisagreementError: on every rank, if ranks did not reduce the same gradients.
        """
        held = _params_of(optimizer)
        self._plain.check(optimizer)
        reduces = self._reduces_for(held)
        if reduces:
            if self._is_generating:
                raise RuntimeError(
                    f"An optimizer steps inside generation_mode (rank {dist.get_rank()}), where weights must not change. Leave "
                    "the `with generation_mode(...)` block first."
                )
            self._refuse_unreduced(held)
            self._complete_before_step()
        for gather in self.gathers:
            if gather.unit.has_param_of(held):
                # The step begins now. If the weights have changed already, something else has written to them. With deltas
                # that matters: after a step a delta is enough, and after any other write whole weights must cross.
                gather.copy.freshness.before_step(has_closure=has_closure)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, and note that the optimizer changed the weights of the units whose parameters it holds."""
        held = _params_of(optimizer)
        if self._reduces_for(held):
            self._run.traffic.end_optimizer_step()
            if isinstance(optimizer, Muon):
                self._run.traffic.record_senders(OPTIMIZER, optimizer.received)
            if not self._has_stepped:
                self._has_stepped = True
                warn_of_low_rate(self._run.config, optimizer)
                warn_of_gathers(optimizer)
            self._run.micro_steps.end_step(self._run.config.qgz_until)
        for gather in self.gathers:
            if gather.unit.has_param_of(held):
                gather.copy.freshness.after_step()

    def _reduces_for(self, held: set[int]) -> bool:
        return any(reduce.unit.has_param_of(held) for reduce in self.reduces)

    def _refuse_unreduced(self, held: set[int]) -> None:
        """Refuse a step that would leave gradients out, which FSDP2 would mix with those of the next step."""
        if not self._run.config.accumulates_on_rank:
            return
        waiting = [one.unit for one in self.reduces if one.unit.has_param_of(held) and one.unit.unreduced_bytes()]
        if not waiting:
            return
        among = f"those of unit {waiting[0].name} among them"
        if self._run.micro_steps.is_last_now:
            raise RuntimeError(
                f"An optimizer steps while gradients wait on rank {dist.get_rank()}, {among}, though the last backward pass was "
                "a last micro-step: FSDP2 did not reduce them in it. This happens where several forward passes through reentrant "
                "checkpointing come before one backward pass (use use_reentrant=False, or a backward pass behind each forward "
                "pass), and where the backward pass raised. The next last micro-step reduces them with its own gradients; "
                "handle.discard_accumulated() drops them."
            )
        raise RuntimeError(
            f"An optimizer steps while gradients wait on rank {dist.get_rank()} for the last micro-step "
            f'(qgz_accumulate="rank"), {among}. Let a last micro-step come before '
            "the step (handle.set_last_micro_step(True), and set_requires_gradient_sync(True) where that is False), or drop them "
            'with handle.discard_accumulated(). With qgz_accumulate="node" a step uses what has accumulated so far.'
        )

    def _complete_before_step(self) -> None:
        # This is collective, and for all gradients of the model: the step reads ``.grad`` as it is, and a step on gradients
        # without the micro-steps that wait in partial sums would lose them in silence.
        self._agreement.settle()
        self.deliver()
        # The answers about weights end here, also for a forward pass that the optimizer steps in. In backward, where optimizers
        # may step for one parameter after the other, the rest of the pass keeps its weights: ``_has_answers``.
        self._entered.clear()
        self._run.schedule.wait_before_writes()

    def _end_backward(self) -> None:
        self.confirm_micro_step()
        answer, is_last = None, self._run.micro_steps.is_last_now
        if is_last:
            # Ranks compare what they reduced. This travels beside the hops that are still under way. After another micro-step the
            # next forward pass asks, long before a step.
            answer = self._ask("end a backward pass of the last micro-step")
        self._run.driver.drain()
        for reduce in self.reduces:
            # After the last micro-step this also settles units that took no part in it. After another one it only
            # takes the wrappers off gradients that are complete; what is owed stays for the next micro-step.
            if not reduce.is_settled and (is_last or not reduce.owes):
                reduce.deliver()
        if answer is not None:
            answer.confirm()

    # Statements.

    def _ask_debts(self, action: str) -> Answer:
        # The debts are read once, for the bytes and for the words: an answer is waited for later, when this pass has
        # changed them.
        owes = [reduce.owes for reduce in self.reduces]
        return self._ask(
            action, owes, describe=lambda index: f"has {'' if owes[index] else 'no '}accumulated gradients"
        )

    def _ask(
        self,
        action: str,
        facts: Sequence[int] = (),
        flags: Sequence[int] = (),
        describe: Callable[[int], str] = lambda index: "",
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
        if self._tells_node:
            self._tells_node = False
            self._tell_node("ask all ranks", waits=False)
        statement, ran, self._ran = self._statement(action, describe, remedy), self._ran, []
        ran_in_node, self._ran_in_node = self._ran_in_node, []
        # Ranks that left a backward pass at different units would finish different numbers of hops.
        numbers = array.array("q", (len(self._run.driver), *facts)).tobytes()
        common = "\n".join((action, *ran, "")).encode() + numbers
        of_node = "\n".join(ran_in_node).encode()
        return self._agreement.ask(common, bytes(flags) or bytes(len(self.gathers)), statement, of_node)

    def _is_any(self, action: str, flag: bool) -> bool:
        """Return whether a flag is set on any rank. Collective: ranks must be about to do the same."""
        return any(self._ask(action, flags=[flag] * len(self.gathers)).largest())

    def _thawed(self) -> tuple[str, ...]:
        return tuple(name for gather in self._frozen for name in gather.thawed())

    def _statement(
        self, action: str, describe: Callable[[int], str] = lambda index: "", remedy: str | None = None
    ) -> Callable[[], Statement]:
        """Return a function that makes this rank's statement, with what it is now and with what it has run up to now."""
        under_way, ran, ran_in_node = len(self._run.driver), tuple(self._ran), tuple(self._ran_in_node)

        def make() -> Statement:
            facts = {f"unit {gather.unit.name}": describe(index) for index, gather in enumerate(self.gathers)}
            facts["the number of reductions that a backward pass left unfinished"] = str(under_way)
            facts["what was frozen and trains now"] = ", ".join(self._thawed()) or "nothing"
            statement = Statement(action, facts, ran, ran_in_node)
            return statement if remedy is None else dataclasses.replace(statement, remedy=remedy)

        return make

    def _describe_structure(self, index: int) -> str:
        unit = self.gathers[index].unit
        shards = zip(unit.param_shards(), unit.params, strict=True)
        frozen = [shard.name for shard, param in shards if not param.requires_grad]
        dtypes = sorted({str(param.dtype) for param in unit.params})
        said = f"{', '.join(dtypes)}, {'frozen: ' + ', '.join(frozen) if frozen else 'all parameters trainable'}"
        grad_dtypes = sorted(map(str, unit.grad_dtypes - {None, *(param.dtype for param in unit.params)}))
        said += f", some gradients in {', '.join(grad_dtypes)}" if grad_dtypes else ""
        said += ", with hooks on its gradients" if unit.shows_reduced_output else ""
        factor = unit.gradient_divide_factor
        return said + ("" if factor is None else f", gradients divided by {factor}")


def _params_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


# Structures rarely change, and a digest for each unit is needed at every forward pass. It is no ``hash``: Python
# salts that of a string in each process, and ranks would differ.
@functools.lru_cache(maxsize=4096)
def _structure_digest(structure: tuple[object, ...]) -> int:
    return zlib.crc32(repr(structure).encode())
