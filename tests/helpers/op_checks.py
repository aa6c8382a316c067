"""Operators computed by two kinds of kernels must have the same bits, and write nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from op_cases import Call, Case, calls

from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.kernels import CompiledKernels, kernels_of
from hf_zeropp.ops.operator import Operator
from hf_zeropp.ops.reference_kernels import ReferenceKernels
from hf_zeropp.ops.register import OPERATORS

Kernels = CompiledKernels | ReferenceKernels
GUARD = 64
POISON = 0xA5


def check_everything(
    kernels: Sequence[Kernels], case: Case, device: str = "cpu", expected: Kernels | None = None
) -> None:
    """Every operator on one case, by several ``kernels`` on ``device``, against ``expected`` on the CPU (default: those set)."""
    for name, call in calls(case).items():
        check_call(OPERATORS[name], call, case, kernels, device, expected or kernels_of("cpu"))


def check_call(
    operator: Operator, call: Call, case: Case, kernels: Sequence[Kernels], device: str, expected_kernels: Kernels
) -> None:
    theirs = Run(operator, call, "cpu", 0)
    runs = [(one, Run(operator, call, device, case.offset)) for one in kernels]
    theirs.run(expected_kernels, theirs.out.tensor)
    for one, ours in runs:
        ours.run(one, ours.out.tensor)
        what = f"{operator.name} by {one.name}: {case}"
        assert same(ours.out.tensor.cpu(), theirs.out.tensor, call.layout), what
        assert ours.out.is_intact(), f"memory beyond the result of {what}"
    if call.in_place is not None:
        for one, ours in runs:
            ours.run(one, ours.arguments[call.in_place])
            what = f"in place, {operator.name} by {one.name}: {case}"
            assert same(ours.arguments[call.in_place].cpu(), theirs.out.tensor, call.layout), what


class Run:
    """An operator's arguments on a device, ``offset`` elements behind aligned addresses, and guarded memory to fill."""

    def __init__(self, operator: Operator, call: Call, device: str, offset: int) -> None:
        self.operator = operator
        self.arguments = [
            placed(value.to(device), offset) if isinstance(value, torch.Tensor) else value for value in call.arguments
        ]
        self.result = operator.check(self.arguments)
        (filled,) = self.result.filled
        self.out = Guarded(torch.Size(filled.shape).numel(), filled.dtype, offset, device)

    def run(self, kernels: Kernels, filled: torch.Tensor) -> None:
        if self.out.tensor.numel():
            kernels.run(self.operator, self.arguments, self.result.counts, [filled])


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy, ``offset`` elements behind an aligned address."""
    base = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)
    base[offset:] = tensor.flatten()
    return base[offset:]


class Guarded:
    """Memory for a result of ``numel`` elements, poisoned, between guards that nothing may touch."""

    def __init__(self, numel: int, dtype: torch.dtype, offset: int, device: str = "cpu") -> None:
        begin, nbytes = GUARD + offset * dtype.itemsize, numel * dtype.itemsize
        self.bytes = torch.full((begin + nbytes + GUARD,), POISON, dtype=torch.uint8, device=device)
        self.begin, self.end = begin, begin + nbytes
        self.tensor = self.bytes[begin : self.end].view(dtype)

    def is_intact(self) -> bool:
        return bool((self.bytes[: self.begin] == POISON).all() and (self.bytes[self.end :] == POISON).all())


def same(one: torch.Tensor, other: torch.Tensor, layout: WireLayout | None) -> bool:
    """Bit for bit; ``layout`` is that of wires, None for elements."""
    return same_bits(one, other) if layout is None else same_wire(one, other, layout)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; for fp32, any NaN equals any other, because processors make different ones."""
    one, other = one.flatten(), other.flatten()
    if one.dtype == torch.float32:
        one, other = (torch.where(tensor.isnan(), 1.0, tensor) for tensor in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def same_wire(one: torch.Tensor, other: torch.Tensor, layout: WireLayout) -> bool:
    """Bit for bit, but for the NaNs of raw fp32 elements."""
    if layout.raw_dtype != torch.float32:
        return torch.equal(one.flatten(), other.flatten())
    wires = [wire.reshape(-1, layout.nbytes).clone() for wire in (one, other)]
    is_same = True
    for part in layout.parts:
        if part.bits == 0:
            raw = [wire[:, part.codes : part.codes + 4 * part.numel].contiguous() for wire in wires]
            is_same &= same_bits(*(elements.view(torch.float32) for elements in raw))
            for wire in wires:
                wire[:, part.codes : part.codes + 4 * part.numel] = 0
    return is_same and torch.equal(*wires)
