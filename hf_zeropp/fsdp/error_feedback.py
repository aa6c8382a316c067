"""Error feedback: each rank keeps what the cross hop rounded away of its gradients, and adds it to the next step's.

What is kept is called the *residual*. It is kept where the cross hop is encoded: 1/N of the unit on each rank, in INT8. It has
the form of the sums that it was taken from: rotated if gradients are rotated, and multiplied with the loss scale of its step.

A residual corrects the next step only if that step follows the one it was taken from. So:

- It is cleared if the gradients were dropped, because a step that did not happen needs no correction. Two signs tell: gradients
  that are None again although no optimizer stepped (``zero_grad`` alone), and a loss scale that fell (an fp16 overflow, even if
  a fused optimizer steps and skips the update inside). ``zero_grad(set_to_none=False)`` without a loss scaler gives no sign.
- It is rescaled if the loss scale grew, because the gradients are then multiplied with another factor.
- A block that holds a NaN or an Inf adds nothing to it (``ops.quantize_with_feedback``).
- ``qgz_reset_steps`` bounds how many steps it may have served (LoCo, arXiv 2407.04480, section 3).
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
"""Dropped steps in a row that are worth a warning. A loss scaler that looks for its scale drops fewer."""


@dataclasses.dataclass
class LossScale:
    """The factor that losses, and so gradients, of the backward pass under way are multiplied with. All units share it."""

    value: float = 1.0


class Residual:
    """The residual of one unit.

    Args:
        config: the settings of the run.
        loss_scale: the factor in the gradients now.

    Attributes:
        is_kept: whether there is error feedback at all.
    """

    def __init__(self, config: ZeroPPConfig, loss_scale: LossScale) -> None:
        self.is_kept = config.error_feedback_decay is not None
        self._decay = config.error_feedback_decay or 1.0
        self._reset_steps = config.qgz_reset_steps
        self._loss_scale = loss_scale
        self._wires: list[torch.Tensor] = []
        self._kinds: list[str] = []  # what the wires mean: see _kinds_of
        self._scale = 1.0  # the loss scale of the gradients that it was taken from
        self._num_steps = 0  # steps that it has served since it was zero
        self._awaits_step = False  # no optimizer has stepped with the gradients that it was taken from
        self._num_drops = 0  # dropped steps in a row
        self._is_restored = False

    def feedback(self, chunks: Sequence[ReduceLayouts], num_slices: int, device: torch.device) -> list[Feedback] | None:
        """Return what the cross hop that begins now adds and updates; None if the layouts keep no residual.

        Args:
            chunks: the layouts of the chunks in which a slice travels.
            num_slices: slices that this rank encodes, Y.
            device: where the residual is kept.
        """
        kinds = _kinds_of(chunks)
        if kinds != self._kinds and self._is_restored:
            logger.warning(
                "The residual in the checkpoint was saved with other settings: error feedback starts again from zero."
            )
        # The loss scale falls only after an overflow, and then the optimizer has skipped the step that the residual
        # belongs to. Where it grew, the step was made, and the residual is rescaled below.
        if kinds != self._kinds or self._is_too_old() or self._loss_scale.value < self._scale:
            self.clear()
        # Zero bytes decode to zeros. The scale is set with them, so that the first step rescales nothing.
        if kinds and not self._wires:
            self._wires = [_zeros(num_slices * chunk.residual.nbytes, device) for chunk in chunks if chunk.residual]
            self._scale = self._loss_scale.value
        # The residual carries the factor of the gradients that it was taken from. Powers of two, which loss scalers
        # use, rescale it without rounding.
        rescale = self._loss_scale.value / self._scale
        self._kinds, self._scale, self._is_restored = kinds, self._loss_scale.value, False
        # The cross hop that begins now rewrites the residual in place. It corrects the next step only if an optimizer
        # takes what this hop delivers; otherwise ``drop_if_unused`` clears it.
        self._awaits_step = bool(kinds)
        return [Feedback(wire, self._decay, rescale) for wire in self._wires] or None

    def after_optimizer_step(self) -> None:
        """Note that an optimizer took the unit's gradients. Several optimizers, or one per parameter, count as one step."""
        if self._awaits_step:
            self._num_steps += 1
            self._num_drops = 0
        self._awaits_step = False

    @property
    def awaits_step(self) -> bool:
        """Whether no optimizer has stepped with the gradients that the residual was taken from."""
        return self._awaits_step

    def drop_if_unused(self) -> None:
        """Clear the residual if no optimizer took the gradients of the last step, which are gone now."""
        if self._awaits_step:
            self._num_drops += 1
            # Compared for equality, as a loop that always drops its gradients would be warned of at every step
            # otherwise.
            if self._num_drops == MANY_DROPS:
                _warn_of_drops()
            self.clear()

    def clear(self) -> None:
        """Start again from zero."""
        self._wires, self._kinds = [], []
        self._num_steps, self._awaits_step, self._is_restored = 0, False, False

    def nbytes(self) -> int:
        """Return the bytes that this rank holds."""
        return sum(wire.numel() for wire in self._wires)

    def state(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Return the wires, and what else ``restore`` needs, fit for JSON."""
        return self._wires, {"kinds": self._kinds, "scale": self._scale, "num_steps": self._num_steps}

    def restore(self, wires: Sequence[torch.Tensor], rest: dict[str, Any], device: torch.device) -> None:
        """Take over what ``state`` returned. If settings have changed since, the next step starts from zero."""
        self._wires = [wire.to(device) for wire in wires]
        self._kinds, self._scale, self._num_steps = rest["kinds"], rest["scale"], rest["num_steps"]
        self._awaits_step, self._is_restored = False, True

    def _is_too_old(self) -> bool:
        return self._reset_steps is not None and self._num_steps >= self._reset_steps


def _kinds_of(chunks: Sequence[ReduceLayouts]) -> list[str]:
    """Return what a residual's bytes mean: the layouts, and whether they hold rotated sums."""
    # A rotated sum and a plain one have equal layouts, so the layout alone would let one correct the other.
    domain = "rotated " if chunks[0].rotates else ""
    return [domain + chunk.residual.spec for chunk in chunks if chunk.residual is not None]


@functools.cache
def _warn_of_drops() -> None:
    """Log the warning, once per process."""
    logger.warning(
        "Gradients were dropped %d times in a row without a step of a torch optimizer, and the residual of error feedback with "
        "them. If weights are updated by hand, or gradients are taken per task, error feedback has no effect: switch it off.",
        MANY_DROPS,
    )


# A tensor made in inference mode cannot be written in training, and this one is kept and written in every step.
@torch.inference_mode(False)
def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
