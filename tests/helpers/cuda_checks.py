"""The operators of one case by some kernels, emulated or on a GPU, and by those of the CPU: the same bits.

`kernels` has the methods of `hf_zeropp.kernels.CompiledKernels`. Results lie between guards, elements in gaps keep what they
were.
"""

from __future__ import annotations

from typing import Any

import torch
from cuda_cases import Case, Guarded, placed, same_bits, same_wire

from hf_zeropp import ops
from hf_zeropp.ops.format import WireLayout


def check_everything(kernels: Any, case: Case, device: str = "cpu") -> None:
    wire = check_quantize(kernels, case, device)
    check_dequantize(kernels, case, wire, device)
    check_sum(kernels, case, wire, device)
    check_sum_quantize(kernels, case, wire, device)
    base = ops.quantize((case.values.float() * 0.97).to(case.values.dtype), case.out_layout)
    check_difference(kernels, case, base, device)
    check_update(kernels, case, wire, base, device)
    if case.residual_layout is not None:
        check_feedback(kernels, case, wire, device)


def check_quantize(kernels: Any, case: Case, device: str = "cpu") -> torch.Tensor:
    """Returns the wire of the CPU."""
    ours, theirs = wires(case, case.layout, case.rows * case.columns, device)
    rotate = case.rotates(case.layout)
    kernels.quantize(there(case.values, case, device), case.layout, case.rows, rotate, ours.tensor)
    ops.quantize(case.values, case.layout, slice_rows=case.rows, rotate=rotate, out=theirs.tensor)
    expect_same_wire("quantize", case, ours, theirs, case.layout)
    return theirs.tensor


def check_dequantize(kernels: Any, case: Case, wire: torch.Tensor, device: str) -> None:
    ours, theirs = (Guarded(case.values.numel(), case.dtype, case.offset, where) for where in (device, "cpu"))
    kernels.dequantize(there(wire, case, device), case.layout, case.dtype, case.columns, ours.tensor)
    ops.dequantize(wire, case.layout, dtype=case.dtype, slice_rows=case.columns, out=theirs.tensor)
    expect_same_values("dequantize", case, ours, theirs)


def check_sum(kernels: Any, case: Case, wire: torch.Tensor, device: str) -> None:
    numel = case.columns * case.layout.numel
    ours, theirs = (Guarded(numel, case.dtype, case.offset, where) for where in (device, "cpu"))
    sent, initial, rotate = there(wire, case, device), there(case.initial, case, device), case.rotates(case.layout)
    how = case.scale, case.dtype, rotate
    kernels.dequantize_sum(sent, case.layout, case.rows, initial, *how, ours.tensor)
    settings = dict(zip(("scale", "dtype", "rotate"), how, strict=True), num_sources=case.rows, out=theirs.tensor)
    ops.dequantize_sum(wire, case.layout, initial=case.initial, **settings)
    expect_same_values("dequantize_sum", case, ours, theirs)
    if case.initial is not None and case.dtype == torch.float32 and not case.layout.has_gaps:
        kernels.dequantize_sum(sent, case.layout, case.rows, initial, *how, initial)
        assert same_bits(initial.cpu(), theirs.tensor), f"dequantize_sum in place: {case}"


def check_sum_quantize(kernels: Any, case: Case, wire: torch.Tensor, device: str) -> None:
    layouts = case.layout, case.out_layout
    ours, theirs = wires(case, case.out_layout, case.columns, device)
    initial = there(case.initial, case, device)
    kernels.dequantize_sum_quantize(there(wire, case, device), *layouts, case.rows, initial, ours.tensor)
    ops.dequantize_sum_quantize(wire, *layouts, num_sources=case.rows, initial=case.initial, out=theirs.tensor)
    expect_same_wire("dequantize_sum_quantize", case, ours, theirs, case.out_layout)


def check_difference(kernels: Any, case: Case, base: torch.Tensor, device: str) -> None:
    ours, theirs = wires(case, case.layout, case.rows * case.columns, device)
    layouts = case.out_layout, case.layout
    kernels.quantize_difference(there(case.values, case, device), there(base, case, device), *layouts, ours.tensor)
    ops.quantize_difference(case.values, base, *layouts, out=theirs.tensor)
    expect_same_wire("quantize_difference", case, ours, theirs, case.layout)


def check_update(kernels: Any, case: Case, wire: torch.Tensor, base: torch.Tensor, device: str) -> None:
    """Into another tensor, and in place."""
    ours, theirs = wires(case, case.out_layout, case.rows * case.columns, device)
    sent, held = there(wire, case, device), there(base, case, device)
    kernels.dequantize_update(sent, case.layout, held, case.out_layout, ours.tensor)
    ops.dequantize_update(wire, case.layout, base, case.out_layout, out=theirs.tensor)
    expect_same_wire("dequantize_update", case, ours, theirs, case.out_layout)
    ours.tensor.copy_(base)
    kernels.dequantize_update(sent, case.layout, ours.tensor, case.out_layout, ours.tensor)
    expect_same_wire("dequantize_update in place", case, ours, theirs, case.out_layout)


def check_feedback(kernels: Any, case: Case, wire: torch.Tensor, device: str) -> None:
    """Twice: the second call finds the residual of the first."""
    num_sources, sent = (0, None) if case.without_wire else (case.rows, wire)
    layouts = case.layout, case.out_layout, case.residual_layout
    settings = num_sources, there(case.initial, case, device), case.rotates(case.out_layout), case.decay, case.rescale
    names = "num_sources", "initial", "rotate", "decay", "rescale"
    ours, theirs = wires(case, case.out_layout, case.columns, device)
    our_residual, their_residual = wires(case, case.residual_layout, case.columns, device)
    for residual in (our_residual, their_residual):
        residual.tensor.copy_(ops.quantize(case.left_out, case.residual_layout))
    for _ in range(2):
        arguments = there(sent, case, device), *layouts, *settings, our_residual.tensor, ours.tensor
        kernels.quantize_with_feedback(*arguments)
        named = dict(zip(names, settings, strict=True)) | {"initial": case.initial, "out": theirs.tensor}
        ops.quantize_with_feedback(sent, *layouts[:2], their_residual.tensor, layouts[2], **named)
        expect_same_wire("quantize_with_feedback", case, ours, theirs, case.out_layout)
        expect_same_wire("residual", case, our_residual, their_residual, case.residual_layout)


def there(tensor: torch.Tensor | None, case: Case, device: str) -> torch.Tensor | None:
    return None if tensor is None else placed(tensor.to(device), case.offset)


def wires(case: Case, layout: WireLayout, num_slices: int, device: str) -> tuple[Guarded, Guarded]:
    """For our result and the expected one."""
    nbytes = num_slices * layout.nbytes
    return Guarded(nbytes, torch.uint8, case.offset, device), Guarded(nbytes, torch.uint8, case.offset)


def expect_same_wire(what: str, case: Case, ours: Guarded, theirs: Guarded, layout: WireLayout) -> None:
    assert same_wire(ours.tensor.cpu(), theirs.tensor, layout) and ours.is_intact(), f"{what}: {case}"


def expect_same_values(what: str, case: Case, ours: Guarded, theirs: Guarded) -> None:
    assert same_bits(ours.tensor.cpu(), theirs.tensor) and ours.is_intact(), f"{what}: {case}"
