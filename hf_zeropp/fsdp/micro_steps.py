"""The state of gradient accumulation: which micro-step it is, and whether gradients are quantized now.

Several parts tell it: Accelerate or the user's loop (is this the last micro-step?), and the Trainer (how much of training
is done?).
"""

from __future__ import annotations

from collections.abc import Callable


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

    def set_quantizes(self, quantizes: bool, *, is_accumulating: bool) -> None:
        """Quantize gradients from the next step on, or no longer; at once if nothing is accumulated."""
        self._wants_quantizes = quantizes
        self.begin_step(is_accumulating=is_accumulating)

    def begin_step(self, *, is_accumulating: bool) -> None:
        """Let a change of ``quantizes`` take effect, unless partial sums wait for more of their kind."""
        # Quantized and unquantized gradients do not add up, so a change waits until the partial sums have crossed.
        if not is_accumulating:
            self.quantizes = self._wants_quantizes

    def enter_backward(self) -> None:
        """Ask about the backward pass that has begun to reduce gradients."""
        # Asked once and kept: all units of a pass must take the same way, even if the answer changes while it runs.
        self.is_last_now = self.ask_is_last()
