"""One rank's training run of the study of low-bit traffic (bench_half_model.py): losses, errors on the way, and bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from convergence_run import ConvergenceRun, Recipe
from error_probe import GradientProbe, weight_error
from training_run import DELTA

PAPER = {"preset": "paper"}
FEEDBACK = {"qgz_error_feedback": "full"}
ROTATED = {"qgz_hadamard": True}

VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "paper": PAPER,
    # One thing changed in the paper's configuration. The first is the package's default.
    "int8-inside": PAPER | {"qgz_intra_bits": 8},
    "hadamard": PAPER | ROTATED,
    "feedback": PAPER | FEEDBACK,
    "delta-4": PAPER | DELTA,
    "delta-2": PAPER | DELTA | {"qwz_bits": 2},
    # Together, all with INT8 inside.
    "int8-feedback": FEEDBACK,
    "int8-loco": {"qgz_error_feedback": 0.5},
    "gradients": FEEDBACK | ROTATED,
    "half-values": DELTA,
    "half": FEEDBACK | ROTATED | DELTA,
    "half-hpz-8": FEEDBACK | ROTATED | DELTA | {"hpz_bits": 8},
    "three-eighths-values": DELTA | {"qwz_bits": 2},
    "three-eighths": FEEDBACK | ROTATED | DELTA | {"qwz_bits": 2},
}

SUM_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclasses.dataclass(frozen=True)
class ProbedRecipe(Recipe):
    """What all runs share, further.

    probe_steps: the last of them, in which gradients are compared with exactly reduced ones.
    repeat: every step sees the same sequences, and so does validation. Without the noise of a random text in them,
        gradients show what communication adds.
    """

    probe_steps: int = 100
    repeat: bool = False


class HalfModelRun(ConvergenceRun):
    """Measures without changing anything: its losses are those of the same run without a probe."""

    variants = VARIANTS
    recipe: ProbedRecipe

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._probe: GradientProbe | None = None
        self._traffic: float | None = None
        self._only_batch = super()._batch() if self.recipe.repeat else None

    def train(self, steps: int) -> float:
        """Some more steps; of the first ones, bytes are counted from the second step on, when only deltas cross."""
        loss = super().train(steps)
        if self.handle and self._traffic is None:
            traffic, nodes = self.handle.traffic, self.handle.topology.num_nodes
            self._traffic = traffic.cross_node_bytes_per_step / (traffic.model_bytes * (nodes - 1) / nodes)
        return loss

    def evaluate(self) -> dict[str, float]:
        return super().evaluate() | {"weight_error": round(weight_error(self.model), 6)}

    def summary(self) -> dict[str, Any]:
        """Bytes across nodes per step over M (Y-1)/Y, and errors of summed gradients by the number of steps summed."""
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
