"""Error feedback: what the hop across nodes leaves out of a unit's gradients is kept, and added to the next step's.

The residual lies where hop 2 is encoded: 1/N of the unit on each rank, in INT8, in the domain of the sums (rotated, where
gradients are, and with the loss scale of its step). It serves the next step only if that step goes on from this one:

- a step whose gradients were dropped did not happen, and its residual is cleared. Two signs tell: gradients that are None again
  though no optimizer stepped (``zero_grad`` alone), and a loss scale that fell (an fp16 overflow, even where a fused optimizer
  steps and skips inside). Where ``zero_grad(set_to_none=False)`` drops finite gradients, nothing tells;
- a block that is not finite counts as zero (ops.quantize_with_feedback);
- gradients under a larger loss scale are other numbers: the residual is rescaled;
- ``qgz_reset_steps`` bounds how old an error may be (LoCo, arXiv 2407.04480, section 3).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from hf_zeropp.comm.two_hops import Feedback, ReduceLayouts
from hf_zeropp.config import ZeroPPConfig

logger = logging.getLogger(__name__)

MANY_DROPS = 3
"""Steps in a row without an optimizer: more than a loss scaler looking for its scale is worth a word."""


@dataclasses.dataclass
class LossScale:
    """The factor in the gradients of the backward pass under way; the same for all units."""

    value: float = 1.0


class Residual:
    """What hop 2 of one unit's reductions left out so far."""

    def __init__(self, config: ZeroPPConfig, loss_scale: LossScale) -> None:
        self._decay = config.error_feedback_decay or 1.0
        self._reset_steps = config.qgz_reset_steps
        self._loss_scale = loss_scale
        self._wires: list[torch.Tensor] = []
        self._kinds: list[str] = []  # of the wires: see _kinds_of
        self._scale = 1.0  # the loss scale in the gradients it is of
        self._num_steps = 0  # that it has served since it was zero
        self._awaits_step = False  # no optimizer has taken the gradients that it is of
        self._num_drops = 0  # in a row
        self._is_restored = False

    def feedback(self, chunks: Sequence[ReduceLayouts], num_slices: int, device: torch.device) -> list[Feedback] | None:
        """For a hop 2 that begins now, of ``num_slices`` slices in ``chunks``; None where layouts keep no residual."""
        kinds = _kinds_of(chunks)
        if kinds != self._kinds and self._is_restored:
            logger.warning("The residual in the checkpoint is of other settings: error feedback begins anew, at zero.")
        if kinds != self._kinds or self._is_too_old() or self._loss_scale.value < self._scale:
            self.clear()
        if kinds and not self._wires:
            self._wires = [_zeros(num_slices * chunk.residual.nbytes, device) for chunk in chunks if chunk.residual]
            self._scale = self._loss_scale.value
        rescale = self._loss_scale.value / self._scale
        self._kinds, self._scale, self._is_restored = kinds, self._loss_scale.value, False
        self._awaits_step = bool(kinds)
        return [Feedback(wire, self._decay, rescale) for wire in self._wires] or None

    def after_optimizer_step(self) -> None:
        """An optimizer took the unit's gradients. (Several may, or one per parameter: they count as one step.)"""
        if self._awaits_step:
            self._num_steps += 1
            self._num_drops = 0
        self._awaits_step = False

    def drop_if_unused(self) -> None:
        """The gradients of the last step are gone. If no optimizer took them, they are not to be corrected either."""
        if self._awaits_step:
            self._num_drops += 1
            if self._num_drops == MANY_DROPS:
                _warn_of_drops()
            self.clear()

    def clear(self) -> None:
        self._wires, self._kinds = [], []
        self._num_steps, self._awaits_step, self._is_restored = 0, False, False

    def nbytes(self) -> int:
        return sum(wire.numel() for wire in self._wires)

    def state(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The wires, and what else `restore` needs, fit for JSON."""
        return self._wires, {"kinds": self._kinds, "scale": self._scale, "num_steps": self._num_steps}

    def restore(self, wires: Sequence[torch.Tensor], rest: dict[str, Any], device: torch.device) -> None:
        """Take over what `state` gave. Where settings have changed since, the next step begins without it."""
        self._wires = [wire.to(device) for wire in wires]
        self._kinds, self._scale, self._num_steps = rest["kinds"], rest["scale"], rest["num_steps"]
        self._awaits_step, self._is_restored = False, True

    def _is_too_old(self) -> bool:
        return self._reset_steps is not None and self._num_steps >= self._reset_steps


def _kinds_of(chunks: Sequence[ReduceLayouts]) -> list[str]:
    """What a residual's bytes mean: layouts, and whether they are of rotated sums."""
    domain = "rotated " if chunks[0].rotates else ""
    return [domain + chunk.residual.spec for chunk in chunks if chunk.residual is not None]


@functools.cache
def _warn_of_drops() -> None:
    """Once per process."""
    logger.warning(
        "Gradients were dropped %d times in a row without a step of a torch optimizer, and with them what error feedback kept. "
        "If weights are updated by hand, or gradients taken per task, error feedback has no effect: switch it off.",
        MANY_DROPS,
    )


@torch.inference_mode(False)
def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
