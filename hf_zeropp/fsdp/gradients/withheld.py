"""Reduced gradients of parameters that got no gradient on this rank, while they may have got one on others.

A token meets a few experts of a layer, so an expert gets a gradient on some ranks only. FSDP2 leaves ``.grad`` at None on the
others. But every rank holds a slice of every parameter, so a parameter that got a gradient on any rank has a reduced one on all
of them: clipping and an optimizer's step must find it everywhere. One that got none on any rank keeps None, as in stock FSDP2.

What was reduced for such parameters is withheld until ranks know of each other which gradients there are. At the end of the last
backward pass a rank also states whether its own have changed since it told the others. If they have on any rank, all of them tell
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from hf_zeropp.comm.agreement import Agreement, Statement
from hf_zeropp.fsdp.comm_objects import record_event
from hf_zeropp.fsdp.units import Unit, local_tensor_of

QUESTION = b"which gradients exist"
"""Asked only after ranks have agreed to ask it, so every rank asks it."""


class WithheldGradients:
    """The reduced gradients of one unit that wait until it is known whether the parameter has one.

    Args:
        unit: the unit.

    Attributes:
        is_complete: whether all trainable parameters got a gradient in the last reduction of the pass under way.
    """

    def __init__(self, unit: Unit) -> None:
        self.is_complete = False
        self._unit = unit
        self._slices: dict[DTensor, torch.Tensor] = {}
        self._written: torch.Event | None = None
        self._told = self._all = bytes([True]) * len(unit.params)  # of this rank
        self._exist = b""  # on any rank

    def keep(self, param: DTensor, result: torch.Tensor) -> None:
        """Withhold this rank's slice of a reduced gradient."""
        earlier = self._slices.get(param)
        self._slices[param] = result if earlier is None else earlier + result
        self._written = record_event(result.device)

    def forget_unwanted(self) -> None:
        """Drop everything if gradients were cleared."""
        if self._slices and all(param.grad is None for param in self._unit.params):
            self._slices.clear()

    def has_changed(self) -> bool:
        """Return whether other gradients exist on this rank than when ranks told each other the last time."""
        if self.is_complete and self._told == self._all:  # nearly always, and it asks no parameter
            return False
        return self.existing() != self._told

    def existing(self) -> bytes:
        """Return for each parameter whether it has a gradient on this rank, or gets none because it is frozen."""
        return bytes(param.grad is not None or not param.requires_grad for param in self._unit.params)

    def learn(self, exist: bytes) -> None:
        """Take note of the gradients that exist on any rank, in the order of the parameters."""
        self._told, self._exist = self.existing(), exist

    def give(self) -> None:
        """Put what was withheld into the gradients that exist on any rank, and drop the rest."""
        if self._slices and self._written is not None:
            torch.accelerator.current_stream().wait_event(self._written)
        # A gradient that this rank told of and has no more was dropped on purpose, by an optimizer that steps inside the backward
        # pass. It stays None, as under stock FSDP2.
        for param, told, exists in zip(self._unit.params, self._told, self._exist, strict=False):
            if exists and not told and param.grad is None:
                with torch.inference_mode(False):  # as in pending.py
                    param.grad = torch.zeros_like(param, requires_grad=False)
        for param, result in self._slices.items():
            if isinstance(param.grad, DTensor):
                local = local_tensor_of(param.grad)
                local += result.view(local.shape).to(local)
        self._slices.clear()
        self.is_complete = False


def give_everywhere(withheld: Sequence[WithheldGradients], changed: bytes, agreement: Agreement) -> None:
    """Let parameters have a gradient on all ranks if they have one on any. Collective where something has changed.

    Args:
        withheld: those of all units, in the same order on all ranks.
        changed: for each unit, whether ``has_changed`` on any rank.
        agreement: of the ranks.
    """
    units = [one for one, is_changed in zip(withheld, changed, strict=True) if is_changed]
    if units:
        own = [one.existing() for one in units]
        answer = agreement.ask(QUESTION, b"".join(own), lambda: Statement("tell which gradients it has", {}))
        largest, start = answer.largest(), 0
        for one, existing in zip(units, own, strict=True):
            one.learn(largest[start : start + len(existing)])
            start += len(existing)
    for one in withheld:
        one.give()
