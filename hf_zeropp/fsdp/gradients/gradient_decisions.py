"""The decisions of all ranks on gradients: whether a backward pass is the last micro-step, and when gradients are delivered.

Ranks agree on these occasions:

- *A backward pass reduces its first unit.* Every rank states whether this is the last micro-step. On a CPU the answer is waited
  for before the first hop starts. On an accelerator the exchange runs while the model computes.
- *Pending gradients are needed* (pending.py): by an optimizer's step, or in ``handle.deliver()``. Every rank states for which
  units.
- *The backward pass of the last micro-step ends.* What ranks ran in it is compared, in time for an optimizer's step.
"""

from __future__ import annotations

import torch.distributed as dist

from hf_zeropp import devices
from hf_zeropp.comm.agreement import Answer
from hf_zeropp.fsdp.gradients.backward_passes import Backward, require_backward
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.questions import Questions


class GradientDecisions:
    """One model's decisions on gradients, on this rank.

    Args:
        run: what all units share.
        questions: asks the other ranks.

    Attributes:
        reduces: the reductions of all units over the world, in module order.
        backward: the model's backward passes.
    """

    def __init__(self, run: ModelRun, questions: Questions) -> None:
        self.reduces: list[ZeroPPReduceScatter] = []
        self.backward = Backward(self.end_backward)
        self._run = run
        self._questions = questions
        self._micro_step_answer: Answer | None = None

    def keeps_unreduced(self) -> bool:
        """Return whether gradients stay on the rank at full size in this pass, which is not the last micro-step."""
        if not self._run.config.accumulates_on_rank:
            return False
        self._enter_micro_step()
        return not self._run.micro_steps.is_last_now

    def reduction_begins(self, reduce: ZeroPPReduceScatter) -> None:
        """Take note of a reduction that FSDP2 asks for, and finish with the backward pass."""
        self._enter_micro_step()
        # On an accelerator the host waits for the answer in the second reduction, or at the end of a pass that has one reduction.
        self.confirm_micro_step()
        # Each loss of a step may have units of its own. What they share is accumulated, whatever the script calls it.
        if self._run.micro_steps.is_untold and any(param.grad is not None for param in reduce.unit.trainable):
            self._run.micro_steps.warn_of_untold(reduce.unit.name)
        self._questions.note(f"reductions of unit {reduce.unit.name}")
        if self.backward.begins_to_reduce():
            self._ask_micro_step()

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

    def end_backward(self) -> None:
        """A backward pass in which gradients were reduced has ended."""
        self.confirm_micro_step()
        answer, is_last = None, self._run.micro_steps.is_last_now
        if is_last:
            # Ranks compare what they reduced. This travels beside the hops that are still under way. After another micro-step the
            # next forward pass asks, long before a step.
            answer = self._questions.ask("end a backward pass of the last micro-step")
        self._run.driver.drain()
        for reduce in self.reduces:
            # After the last micro-step this also settles units that took no part in it. After another one it only
            # takes the wrappers off gradients that are complete; what is owed stays for the next micro-step.
            if is_last or not reduce.owes:
                reduce.deliver()
        if answer is not None:
            answer.confirm()

    def refuse_unreduced(self, held: set[int]) -> None:
        """Refuse a step that would leave gradients out, which FSDP2 would mix with those of the next step.

        Args:
            held: the ids of the optimizer's parameters.

        Raises:
            RuntimeError: gradients wait on this rank.
        """
        if not self._run.config.accumulates_on_rank:
            return
        waiting = [
            one.unit for one in self.reduces if one.unit.has_param_of(held) and one.unit.gradients.unreduced_bytes()
        ]
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
            f'(qgz_accumulate="{self._run.config.qgz_accumulate}"), {among}. Let a last micro-step come before '
            "the step (handle.set_last_micro_step(True), and set_requires_gradient_sync(True) where that is False), or drop them "
            'with handle.discard_accumulated(). With qgz_accumulate="node" a step uses what has accumulated so far.'
        )

    def _enter_micro_step(self) -> None:
        require_backward()
        if self.backward.begins_micro_step():
            self._run.traffic.micro_steps += 1
            puts_off = any(reduce.unit.gradients.puts_off_replicas for reduce in self.reduces)
            self._run.micro_steps.enter_backward(puts_off_replicas=puts_off)

    def _ask_micro_step(self) -> None:
        self._run.traffic.begin_backward()
        # ``quantizes`` may change here, and it is part of the statement: ranks that were told of different
        # progress would reduce wires of different sizes.
        micro_steps = self._run.micro_steps
        micro_steps.begin_step(is_accumulating=any(one.partial_bytes() for one in self.reduces))
        is_last, quantizes = micro_steps.is_last_now, micro_steps.quantizes
        self._micro_step_answer = self._ask_debts(
            f"run a backward pass of {'the last' if is_last else 'another'} micro-step, with gradients "
            f"{'quantized' if quantizes else 'unquantized'}"
        )
        # gloo ends the process of a rank that receives a hop of another size (SIGABRT). So on a CPU no hop starts before
        # ranks know that they reduce the gradients of the same units.
        if not devices.has_streams(self._run.mesh.device_type):
            self.confirm_micro_step()

    def _ask_debts(self, action: str) -> Answer:
        # The debts are read once, for the bytes and for the words: an answer is waited for later, when this pass has
        # changed them.
        owes = [reduce.owes for reduce in self.reduces]
        return self._questions.ask(
            action, owes, describe=lambda index: f"has {'' if owes[index] else 'no '}accumulated gradients"
        )
