"""One rank's training run in ``bench_half_model.py``: losses, errors that communication adds, and bytes."""

from __future__ import annotations

from typing import Any

import torch

from library.convergence_run import ConvergenceRun
from library.error_probe import GradientProbe, weight_error
from library.variants import HALF_MODEL_VARIANTS, ProbedRecipe

SUM_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Numbers of steps for whose summed gradients an error is kept."""


class HalfModelRun(ConvergenceRun):
    """A run that is measured without being changed: its losses are those of the same run without a probe."""

    variants = HALF_MODEL_VARIANTS
    recipe: ProbedRecipe

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._probe: GradientProbe | None = None
        self._traffic: float | None = None
        self._only_batch = super()._batch() if self.recipe.repeat else None

    def train(self, steps: int) -> float:
        """Train for ``steps`` more steps, and return the mean training loss.

        The first call also fixes the run's traffic. The first step is left out of it: with deltas, it is the one that
        sends whole weights.
        """
        loss = super().train(steps)
        if self.handle and self._traffic is None:
            traffic, nodes = self.handle.traffic, self.handle.topology.num_nodes
            self._traffic = traffic.cross_node_bytes_per_step / (traffic.model_bytes * (nodes - 1) / nodes)
        return loss

    def evaluate(self) -> dict[str, float]:
        """Return a point of the run's curves: ``validation`` and ``weight_error``."""
        return super().evaluate() | {"weight_error": round(weight_error(self.model), 6)}

    def summary(self) -> dict[str, Any]:
        """Return traffic and gradient errors.

        Returns:
            ``traffic``: bytes that cross nodes per step over M (Y-1)/Y; None for FSDP2's own communication.
            ``gradient_error``: errors of summed gradients, and how many steps were summed for each.
            ``scaled_error``: see ``GradientProbe.scaled_error``; None for a run without a probe.
        """
        errors = self._probe.errors() if self._probe else []
        counts = sorted({count for count in SUM_LENGTHS if count < len(errors)} | {len(errors)} - {0})
        sums = {count: round(errors[count - 1], 6) for count in counts}
        return {
            "traffic": self._traffic,
            "gradient_error": {"steps": list(sums), "error": list(sums.values())},
            "scaled_error": round(self._probe.scaled_error(), 6) if self._probe else None,
        }

    def _train_step(self) -> torch.Tensor:
        if self.recipe.steps - self.step == self.recipe.probe_steps:
            self._probe = GradientProbe(self.model)
        loss = super()._train_step()
        if self.handle and self.step == 1:
            self.handle.traffic.reset()
        return loss

    def _batch(self) -> torch.Tensor:
        return super()._batch() if self._only_batch is None else self._only_batch

    def _validation(self) -> torch.Tensor:
        return super()._validation() if self._only_batch is None else self._only_batch

    def _look_at_gradients(self) -> None:
        if self._probe:
            self._probe.look()
