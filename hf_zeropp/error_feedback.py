"""Error feedback: what the hop across nodes leaves out of a unit's gradients is kept, and added to the next step's.

The residual lies where hop 2 is encoded: 1/N of the unit on each rank, in INT8, in the domain of the sums (rotated, where
gradients are, and with the loss scale of its step). It serves the next step only if that step goes on from this one:

- a step whose gradients were dropped (an fp16 overflow; ``zero_grad`` without ``step``) did not happen: the residual is cleared,
  and a block that is not finite counts as zero (ops.quantize_with_feedback);
- gradients under another loss scale are other numbers: the residual is rescaled;
- ``qgz_reset_steps`` bounds how old an error may be (LoCo, arXiv 2407.04480, section 3).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from hf_zeropp.collectives import Feedback, ReduceLayouts
from hf_zeropp.config import ZeroPPConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class StepClock:
    """What residuals go by.

    Attributes:
        steps: optimizer steps so far.
        loss_scale: the factor in the gradients of the backward pass under way.
    """

    steps: int = 0
    loss_scale: float = 1.0


class Residual:
    """What hop 2 of one unit's reductions left out so far."""

    def __init__(self, config: ZeroPPConfig, clock: StepClock) -> None:
        self._decay = config.error_feedback_decay or 1.0
        self._reset_steps = config.qgz_reset_steps
        self._clock = clock
        self._wires: list[torch.Tensor] = []
        self._specs: list[str] = []  # their layouts
        self._step = -1  # in which it was renewed
        self._loss_scale = 1.0  # of the gradients it is of

    def feedback(self, chunks: Sequence[ReduceLayouts], num_slices: int, device: torch.device) -> list[Feedback] | None:
        """For a hop 2 that begins now, of ``num_slices`` slices in ``chunks``; None where layouts keep no residual."""
        specs = [chunk.residual.spec for chunk in chunks if chunk.residual is not None]
        if specs != self._specs or self._is_too_old():
            self.clear()
        if specs and not self._wires:
            self._wires = [_zeros(num_slices * chunk.residual.nbytes, device) for chunk in chunks if chunk.residual]
            self._loss_scale = self._clock.loss_scale
        rescale = self._clock.loss_scale / self._loss_scale
        self._specs, self._step, self._loss_scale = specs, self._clock.steps, self._clock.loss_scale
        return [Feedback(wire, self._decay, rescale) for wire in self._wires] or None

    def drop_if_unused(self) -> None:
        """The gradients of the last step are gone. If no optimizer took them, they are not to be corrected either."""
        if self._wires and self._step == self._clock.steps:
            logger.info("Gradients were dropped in step %d: what their reduction left out is dropped too.", self._step)
            self.clear()

    def clear(self) -> None:
        self._wires, self._specs, self._step = [], [], -1

    def nbytes(self) -> int:
        return sum(wire.numel() for wire in self._wires)

    def state(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The wires, and what else `restore` needs, fit for JSON."""
        return self._wires, {"specs": self._specs, "step": self._step, "loss_scale": self._loss_scale}

    def restore(self, wires: Sequence[torch.Tensor], rest: dict[str, Any], device: torch.device) -> None:
        """Takes what `state` gave. Where layouts have changed since, the next step begins without it."""
        self._wires = [wire.to(device) for wire in wires]
        self._specs, self._step, self._loss_scale = rest["specs"], rest["step"], rest["loss_scale"]

    def _is_too_old(self) -> bool:
        period = self._reset_steps
        return period is not None and self._step // period != self._clock.steps // period


@torch.inference_mode(False)
def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
