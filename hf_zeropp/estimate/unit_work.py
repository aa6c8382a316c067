"""The work of one unit in one step under one method: its own computation, and the stages of its gathers and reductions."""

from __future__ import annotations

import dataclasses

from hf_zeropp.estimate.stages import Stage

FORWARD_FLOPS = 2
"""Operations per weight and token of a forward pass: one multiplication and one addition."""

BACKWARD_FLOPS = 4
"""The same of a backward pass: gradients of inputs, and gradients of weights. Frozen weights need the first alone."""


@dataclasses.dataclass(frozen=True)
class UnitWork:
    """One unit under one method.

    Attributes:
        name: of the unit.
        forward_s: seconds of its forward pass in one micro-step.
        backward_s: seconds of its backward pass, with the recomputed forward pass under activation checkpointing.
        gather_first: stages of its gather in the first forward pass after an optimizer step.
        gather_forward: stages in later forward passes.
        gather_backward: stages in backward passes; empty where the unit was not resharded.
        reduce: stages of its reduction in all micro-steps but the last.
        reduce_last: stages in the last micro-step.
        all_reduce_last: stages that follow on a stream of their own (HSDP, and this package's cross hops on accelerators).
        copies: stages between a gather and the computation, on the compute stream (FSDP2's copy-out).
        prefetches: whether its gathers run while the unit before it computes, on accelerators.
        ahead: how many of the first stages of ``gather_first`` run before FSDP2 asks for the gather: on CPU for all units when
            the forward pass begins, on accelerators on a stream of their own, one unit ahead.
    """

    name: str
    forward_s: float
    backward_s: float
    gather_first: tuple[Stage, ...] = ()
    gather_forward: tuple[Stage, ...] = ()
    gather_backward: tuple[Stage, ...] = ()
    reduce: tuple[Stage, ...] = ()
    reduce_last: tuple[Stage, ...] = ()
    all_reduce_last: tuple[Stage, ...] = ()
    copies: tuple[Stage, ...] = ()
    prefetches: bool = True
    ahead: int = 0
