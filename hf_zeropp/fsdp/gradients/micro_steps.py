"""The state of gradient accumulation: which micro-step it is, and whether gradients are quantized now.

Several parts tell it: Accelerate or the user's loop (is this the last micro-step?), and the Trainer (how much of training
is done?).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch.distributed as dist

logger = logging.getLogger(__name__)

STEPS_UNTIL_REMINDER = 100
"""Optimizer steps after which a loop that never told its progress is taken for one that never will."""


class MicroSteps:
    """State of gradient accumulation.

    Args:
        quantizes: whether gradients are quantized at the start.

    Attributes:
        quantizes: whether gradients are quantized now. It is the same for all micro-steps of a step, because partial sums are
            sums of gradients that were encoded one way.
        ask_is_last: tells whether the coming backward pass ends an accumulation. Asked once per backward pass.
        is_last_now: the answer for the backward pass under way.
    """

    def __init__(self, quantizes: bool) -> None:
        self.quantizes = self._wants_quantizes = quantizes
        self.ask_is_last: Callable[[], bool] = lambda: True
        self.is_last_now = True
        self._num_steps_without_progress: int | None = 0  # None once progress was told, or asked for
        self._num_crossings = 0  # backward passes since an optimizer's step that were taken for a last micro-step
        self._has_warned = False

    def set_quantizes(self, quantizes: bool, *, is_accumulating: bool) -> None:
        """Quantize gradients from the next step on, or no longer; at once if nothing is accumulated."""
        self._wants_quantizes = quantizes
        self._num_steps_without_progress = None
        self.begin_step(is_accumulating=is_accumulating)

    def begin_step(self, *, is_accumulating: bool) -> None:
        """Let a change of ``quantizes`` take effect, unless partial sums wait for more of their kind."""
        # Quantized and unquantized gradients do not add up, so a change waits until the partial sums have crossed.
        if not is_accumulating:
            self.quantizes = self._wants_quantizes

    def end_step(self, quantizes_until: float) -> None:
        """Note an optimizer's step. A loop that should tell its progress and does not is reminded once, on rank 0."""
        self._num_crossings = 0
        if self._num_steps_without_progress is None:
            return
        self._num_steps_without_progress += 1
        if self._num_steps_without_progress < STEPS_UNTIL_REMINDER:
            return
        self._num_steps_without_progress = None
        if quantizes_until < 1 and dist.get_rank() == 0:
            logger.warning(
                "qgz_until=%s ends the quantization of gradients on the way, but in %d steps nothing has told how far training "
                "is, so it goes on. Call handle.set_progress(step / num_steps) before each step, on all ranks.",
                quantizes_until,
                STEPS_UNTIL_REMINDER,
            )

    def enter_backward(self, *, puts_off_replicas: bool) -> None:
        """Ask about the backward pass that has begun to reduce gradients.

        Args:
            puts_off_replicas: whether FSDP2 was told to leave replicas for a later one, so that this one is not the last.
        """
        # Asked once and kept: all units of a pass must take the same way, even if the answer changes while it runs.
        self.is_last_now = self.ask_is_last() and not puts_off_replicas
        self._num_crossings += self.is_last_now

    @property
    def is_untold(self) -> bool:
        """Whether gradients that exist now are accumulated, and nobody has told it; False once the user knows."""
        return self._num_crossings > 1 and not self._has_warned

    def warn_of_untold(self, unit: str) -> None:
        """Say that passes cross nodes one by one though their gradients are added up, as seen in ``unit``. Rank 0 alone."""
        self._has_warned = True
        if dist.get_rank() == 0:
            logger.warning(
                "Several backward passes came without an optimizer's step between them, and the gradients of each crossed nodes "
                "(seen in unit %s). If they accumulate, let the last pass of a step alone cross: call "
                "handle.set_last_micro_step(False) before the others, and handle.set_last_micro_step(True) before the last. "
                "Accelerate's `accumulate` and the Trainer do it by themselves.",
                unit,
            )
