"""The decisions that all ranks of one model take together, and the optimizers' steps that they lie between.

Ranks compare statements (comm/agreement.py) before they choose collectives: on weights when a forward pass begins
(weights/weight_decisions.py), on gradients when a backward pass reduces and ends (gradients/gradient_decisions.py), and here
before an optimizer steps. What goes with every question is in questions.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from hf_zeropp.comm.agreement import Agreement
from hf_zeropp.fsdp.gradients.gradient_decisions import GradientDecisions
from hf_zeropp.fsdp.gradients.plain import PlainParameters
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.questions import Questions
from hf_zeropp.fsdp.weights.gather import WeightGather
from hf_zeropp.fsdp.weights.low_rates import warn_of_low_rate
from hf_zeropp.fsdp.weights.node_gather import NodeGather
from hf_zeropp.fsdp.weights.weight_decisions import WeightDecisions
from hf_zeropp.muon import Muon, warn_of_gathers
from hf_zeropp.traffic import OPTIMIZER


class Decisions:
    """One model's decisions, on this rank.

    Args:
        run: what all units share.
        agreement: compares statements of all ranks.
        of_nodes: the gathers of all units over a node.
        model: the model, which is not kept alive.

    Attributes:
        questions: what ranks ask each other.
        weights, gradients: the decisions on both.
    """

    def __init__(self, run: ModelRun, agreement: Agreement, of_nodes: Sequence[NodeGather], model: nn.Module) -> None:
        self.questions = Questions(run, agreement, of_nodes)
        self.weights = WeightDecisions(run, self.questions, of_nodes)
        self.gradients = GradientDecisions(run, self.questions)
        self._run = run
        self._agreement = agreement
        self._plain = PlainParameters(model, self.questions.is_any, agreement.tell)
        self._has_stepped = False

    def add_unit(self, gather: WeightGather, reduce: ZeroPPReduceScatter) -> None:
        """Decide on the next unit, in module order, as well."""
        self.questions.units.append(gather.unit)
        self.weights.gathers.append(gather)
        self.gradients.reduces.append(reduce)

    # Every optimizer of the process is told of here, also that of another model.

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Complete the gradients that the optimizer is about to read, and note that it may change weights.

        Raises:
            RuntimeError: weights must not change now, or gradients of micro-steps wait for one that was not there.
            ValueError: on every rank, if it trains parameters that are not sharded, and nobody averages their gradients.
            DisagreementError: on every rank, if ranks did not reduce the same gradients.
        """
        held = _params_of(optimizer)
        self._plain.check(optimizer)
        if self._is_about(held):
            if self.weights.is_generating:
                raise RuntimeError(
                    f"An optimizer steps inside generation_mode (rank {dist.get_rank()}), where weights must not change. Leave "
                    "the `with generation_mode(...)` block first."
                )
            self.gradients.refuse_unreduced(held)
            # This is collective, and for all gradients of the model: the step reads ``.grad`` as it is, and a step on gradients
            # without the micro-steps that wait in partial sums would lose them in silence.
            self._agreement.settle()
            self.gradients.deliver()
            self.weights.end_answers()
        self.weights.before_step(held, has_closure=has_closure)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, and note that the optimizer changed the weights of the units whose parameters it holds."""
        held = _params_of(optimizer)
        if self._is_about(held):
            self._run.traffic.end_optimizer_step()
            if isinstance(optimizer, Muon):
                self._run.traffic.record_senders(OPTIMIZER, optimizer.received)
            if not self._has_stepped:
                self._has_stepped = True
                warn_of_low_rate(self._run.config, optimizer)
                warn_of_gathers(optimizer)
            self._run.micro_steps.end_step(self._run.config.qgz_until)
        self.weights.after_step(held)

    def _is_about(self, held: set[int]) -> bool:
        return any(unit.has_param_of(held) for unit in self.questions.units)


def _params_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}
