"""Quantize, dequantize, and sum wire buffers: the operators, registered once, whoever computes them.

Each operator has one schema, one fake and one set of checks here (namespace `zeropp`), in a form that returns a new
tensor and a form that fills `out`. Two kinds of kernels (kernels.py) compute them: the compiled library of `ops/` (a plain C ABI,
reached with ctypes: no dependence on PyTorch's C++ ABI, a build of seconds) and the PyTorch reference, which runs
wherever the library does not. They agree bit for bit: which one ran is a matter of speed, and `kernel_info()` tells.

Layouts travel through the dispatcher as text (`WireLayout.spec`): a traced graph then carries everything an operator
needs, and neither fake tensors nor `torch.compile` ever see a lookup table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zeropp.ops.format import FLOAT_DTYPES, GAP, ROTATION_SLICE, WireLayout
from hf_zeropp.ops.kernels import kernels_of

# ----------------------------------------------------------------------------------------------------- public functions


def quantize(
    input: Tensor, layout: WireLayout, *, slice_rows: int = 1, rotate: bool = False, out: Tensor | None = None
) -> Tensor:
    """Encode K slices for the wire.

    input: K * layout.numel elements, contiguous, fp32, bf16 or fp16, any shape.
    slice_rows: R of K = R * C; input slice r * C + c is written to wire slot c * R + r.
    rotate: encode each 32-slice of a quantized part times a Hadamard matrix. Takes a block that is a multiple of 32.
    Returns uint8 [K * layout.nbytes], or `out`, every byte written.
    """
    if out is None:
        return _OPS.quantize(input, layout.spec, slice_rows, rotate)
    _OPS.quantize_out(input, layout.spec, slice_rows, rotate, out)
    return out


def dequantize(
    wire: Tensor, layout: WireLayout, *, dtype: torch.dtype, slice_rows: int = 1, out: Tensor | None = None
) -> Tensor:
    """Decode K slices, K = wire bytes / layout.nbytes.

    slice_rows: R of K = R * C; wire slot r * C + c decodes to output slice c * R + r.
    Returns [K * layout.numel] in `dtype`, or `out`.
    """
    if out is None:
        return _OPS.dequantize(wire, layout.spec, dtype, slice_rows)
    _OPS.dequantize_out(wire, layout.spec, dtype, slice_rows, out)
    return out


def dequantize_sum(
    wire: Tensor,
    layout: WireLayout,
    *,
    num_sources: int,
    initial: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    rotate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Decode and add up what `num_sources` ranks sent: out[p] = (initial[p] + sum over s of wire[s, p]) * scale.

    wire: uint8 [num_sources, P, layout.nbytes]. initial: fp32 [P, layout.numel], or None to start from source 0.
    Sums are fp32, in source order; then rounded to `dtype`. `out` may be `initial`: accumulation in place.
    rotate: the sum is rotated, before `scale`: back, where the sources were rotated when they were encoded.
    Returns [P, layout.numel] in `dtype`, or `out`.
    """
    if out is None:
        return _OPS.dequantize_sum(wire, layout.spec, num_sources, initial, scale, dtype, rotate)
    _OPS.dequantize_sum_out(wire, layout.spec, num_sources, initial, scale, dtype, rotate, out)
    return out


def dequantize_sum_quantize(
    wire: Tensor,
    layout: WireLayout,
    out_layout: WireLayout,
    *,
    num_sources: int,
    initial: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sum of `dequantize_sum`, encoded again for the next hop, without an fp32 intermediate in memory.

    out_layout: the same segment sizes as `layout`; bits, block and raw dtype may differ.
    Returns uint8 [P, out_layout.nbytes], or `out`, every byte written.
    """
    if out is None:
        return _OPS.dequantize_sum_quantize(wire, layout.spec, out_layout.spec, num_sources, initial)
    _OPS.dequantize_sum_quantize_out(wire, layout.spec, out_layout.spec, num_sources, initial, out)
    return out


def quantize_difference(
    input: Tensor, base: Tensor, base_layout: WireLayout, layout: WireLayout, *, out: Tensor | None = None
) -> Tensor:
    """Encode how K slices differ from what `base` holds of them; of parts that travel raw, the values themselves.

    input: K * layout.numel elements, fp32, bf16 or fp16. base: uint8 [K, base_layout.nbytes].
    Returns uint8 [K * layout.nbytes], or `out`, every byte written.
    """
    if out is None:
        return _OPS.quantize_difference(input, base, base_layout.spec, layout.spec)
    _OPS.quantize_difference_out(input, base, base_layout.spec, layout.spec, out)
    return out


def dequantize_update(
    wire: Tensor, layout: WireLayout, base: Tensor, base_layout: WireLayout, *, out: Tensor | None = None
) -> Tensor:
    """Add the differences in `wire` to what `base` holds, and encode the sum as `base` was; raw parts are replaced.

    wire: uint8 [K, layout.nbytes]. base: uint8 [K, base_layout.nbytes]. Sums are fp32. `out` may be `base`: in place.
    Returns uint8 [K * base_layout.nbytes], or `out`, every byte written.
    """
    if out is None:
        return _OPS.dequantize_update(wire, layout.spec, base, base_layout.spec)
    _OPS.dequantize_update_out(wire, layout.spec, base, base_layout.spec, out)
    return out


def quantize_with_feedback(
    wire: Tensor | None,
    layout: WireLayout,
    out_layout: WireLayout,
    residual: Tensor,
    residual_layout: WireLayout,
    *,
    num_sources: int,
    initial: Tensor | None = None,
    rotate: bool = False,
    decay: float = 1.0,
    rescale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`dequantize_sum_quantize` with error feedback: what one call leaves out, the next one adds.

    With t the sum (rotated, if asked) and e = residual * rescale, t + e is encoded, and the residual becomes the error r
    of that, or (1 - decay) e + decay r. A residual block that is not finite counts as zero. Raw parts have no residual.

    wire: uint8 [num_sources, P, layout.nbytes], or None, where the sum is `initial` alone and num_sources is 0.
    residual: uint8 [P, residual_layout.nbytes], changed in place; zeros to begin with. Its layout quantizes the parts that
        out_layout does, in blocks of the same size.
    Returns uint8 [P, out_layout.nbytes], or `out`, every byte written.
    """
    specs = layout.spec, out_layout.spec, residual_layout.spec
    arguments = (wire, *specs, num_sources, initial, rotate, decay, rescale, residual)
    if out is None:
        return _OPS.quantize_with_feedback(*arguments)
    _OPS.quantize_with_feedback_out(*arguments, out)
    return out


# ----------------------------------------------------------------- checks, and from them what each operator's result is


class _Result(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _check_tensor(op: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: expected {name} of dtype {expected}, got {tensor.dtype}: convert it first")
    if tensor.device != device:
        raise ValueError(f"{op}: expected {name} on {device}, got {tensor.device}: move it there first")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: expected {name} contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
            "call .contiguous(), or slice whole leading rows"
        )


def _check_size(op: str, name: str, tensor: Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise ValueError(f"{op}: expected {name} with {numel} elements, got {tensor.numel()}: size it by the layout")


def _check_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: expected dtype float32, bfloat16 or float16, got {dtype}: decode to one of them")


def _num_slices(op: str, name: str, tensor: Tensor, slice_size: int, divisor_name: str, divisor: int) -> int:
    """How many slices of `slice_size` elements (bytes, on the wire) `tensor` holds: a multiple of `divisor`."""
    num_slices = tensor.numel() // max(slice_size, 1)  # an empty layout has no slices to tell apart
    if num_slices * slice_size != tensor.numel():
        raise ValueError(
            f"{op}: expected {name} to hold whole slices of {slice_size} elements, got {tensor.numel()} elements: "
            "pass the layout it was made with"
        )
    if divisor < 1 or num_slices % divisor:
        raise ValueError(f"{op}: expected {divisor_name} >= 1 that divides {num_slices} slices, got {divisor}")
    return num_slices


def _check_rotation(op: str, layout: WireLayout, rotate: bool) -> None:
    if rotate and layout.block % ROTATION_SLICE:
        raise ValueError(f"{op}: expected a block that is a multiple of {ROTATION_SLICE} to rotate, got {layout.block}")


def _check_same_segments(op: str, *layouts: WireLayout) -> None:
    first, *others = layouts
    for other in others:
        sizes, other_sizes = ([segment.numel for segment in layout.segments] for layout in (first, other))
        if sizes != other_sizes:
            raise ValueError(
                f"{op}: expected layouts with equal segment sizes, got {sizes} and {other_sizes}: build all from the same "
                "parameters"
            )
        if [segment.bits == GAP for segment in first.segments] != [segment.bits == GAP for segment in other.segments]:
            raise ValueError(f"{op}: expected layouts with the same gaps, got {first.spec!r} and {other.spec!r}")


def _quantize_result(input: Tensor, layout: WireLayout, slice_rows: int, rotate: bool) -> _Result:
    _check_rotation("quantize", layout, rotate)
    _check_tensor("quantize", "input", input, FLOAT_DTYPES, input.device)
    num_slices = _num_slices("quantize", "input", input, layout.numel, "slice_rows", slice_rows)
    return _Result((num_slices * layout.nbytes,), torch.uint8, input.device)


def _dequantize_result(wire: Tensor, layout: WireLayout, dtype: torch.dtype, slice_rows: int) -> _Result:
    _check_dtype("dequantize", dtype)
    _check_tensor("dequantize", "wire", wire, (torch.uint8,), wire.device)
    num_slices = _num_slices("dequantize", "wire", wire, layout.nbytes, "slice_rows", slice_rows)
    return _Result((num_slices * layout.numel,), dtype, wire.device)


def _num_sums(op: str, wire: Tensor, layout: WireLayout, num_sources: int, initial: Tensor | None) -> int:
    _check_tensor(op, "wire", wire, (torch.uint8,), wire.device)
    num_sums = _num_slices(op, "wire", wire, layout.nbytes, "num_sources", num_sources) // num_sources
    if initial is not None:
        _check_tensor(op, "initial", initial, (torch.float32,), wire.device)
        _check_size(op, "initial", initial, num_sums * layout.numel)
    return num_sums


def _dequantize_sum_result(
    wire: Tensor,
    layout: WireLayout,
    num_sources: int,
    initial: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    rotate: bool,
) -> _Result:
    _check_dtype("dequantize_sum", dtype)
    _check_rotation("dequantize_sum", layout, rotate)
    num_sums = _num_sums("dequantize_sum", wire, layout, num_sources, initial)
    return _Result((num_sums, layout.numel), dtype, wire.device)


def _dequantize_sum_quantize_result(
    wire: Tensor, layout: WireLayout, out_layout: WireLayout, num_sources: int, initial: Tensor | None
) -> _Result:
    _check_same_segments("dequantize_sum_quantize", layout, out_layout)
    num_sums = _num_sums("dequantize_sum_quantize", wire, layout, num_sources, initial)
    return _Result((num_sums, out_layout.nbytes), torch.uint8, wire.device)


def _quantize_difference_result(input: Tensor, base: Tensor, base_layout: WireLayout, layout: WireLayout) -> _Result:
    op = "quantize_difference"
    _check_same_segments(op, base_layout, layout)
    _check_tensor(op, "input", input, FLOAT_DTYPES, input.device)
    _check_tensor(op, "base", base, (torch.uint8,), input.device)
    num_slices = _num_slices(op, "input", input, layout.numel, "slices", 1)
    _check_size(op, "base", base, num_slices * base_layout.nbytes)
    return _Result((num_slices * layout.nbytes,), torch.uint8, input.device)


def _dequantize_update_result(wire: Tensor, layout: WireLayout, base: Tensor, base_layout: WireLayout) -> _Result:
    op = "dequantize_update"
    _check_same_segments(op, base_layout, layout)
    _check_tensor(op, "wire", wire, (torch.uint8,), base.device)
    _check_tensor(op, "base", base, (torch.uint8,), base.device)
    num_slices = _num_slices(op, "wire", wire, layout.nbytes, "slices", 1)
    _check_size(op, "base", base, num_slices * base_layout.nbytes)
    return _Result((num_slices * base_layout.nbytes,), torch.uint8, base.device)


def _quantize_with_feedback_result(
    wire: Tensor | None,
    layout: WireLayout,
    out_layout: WireLayout,
    residual_layout: WireLayout,
    num_sources: int,
    initial: Tensor | None,
    rotate: bool,
    decay: float,
    rescale: float,
    residual: Tensor,
) -> _Result:
    op = "quantize_with_feedback"
    _check_same_segments(op, layout, out_layout, residual_layout)
    _check_rotation(op, out_layout, rotate)
    if [part.bits == 0 for part in residual_layout.parts] != [part.bits == 0 for part in out_layout.parts]:
        raise ValueError(
            f"{op}: expected residual_layout to quantize the parts that out_layout quantizes, and no others"
        )
    if residual_layout.block != out_layout.block:
        raise ValueError(
            f"{op}: expected residual_layout with the blocks of out_layout, {out_layout.block}, got {residual_layout.block}"
        )
    if not 0 < decay <= 1:
        raise ValueError(f"{op}: expected a decay in (0, 1], got {decay}")
    if wire is not None:
        num_sums = _num_sums(op, wire, layout, num_sources, initial)
    elif initial is not None and num_sources == 0:
        _check_tensor(op, "initial", initial, (torch.float32,), residual.device)
        num_sums = _num_slices(op, "initial", initial, out_layout.numel, "slices", 1)
    else:
        raise ValueError(f"{op}: expected a wire, or num_sources=0 and what to start from, got neither")
    _check_tensor(op, "residual", residual, (torch.uint8,), residual.device if wire is None else wire.device)
    _check_size(op, "residual", residual, num_sums * residual_layout.nbytes)
    return _Result((num_sums, out_layout.nbytes), torch.uint8, residual.device)


# ---------------------------------------------------------------------------------------------- operators: registration

_LIBRARY = torch.library.Library("zeropp", "DEF")
_OPS = torch.ops.zeropp


def _define(name: str, arguments: str, result: Callable[..., _Result]) -> None:
    """Register `name`, which returns a new tensor, and `name`_out, which fills its last argument.

    `result` checks the arguments and says what comes out; that is all a fake needs.
    """

    def fake(*args: Any) -> Tensor:
        shape, dtype, device = result(*_with_layouts(args))
        return torch.empty(shape, dtype=dtype, device=device)

    def fake_out(*args: Any) -> None:
        shape, dtype, device = result(*_with_layouts(args[:-1]))
        out = args[-1]
        _check_tensor(name, "out", out, (dtype,), device)
        _check_size(name, "out", out, math.prod(shape))

    def compute(args: tuple[Any, ...], out: Tensor) -> None:
        if out.numel():
            getattr(kernels_of(out.device.type), name)(*_with_layouts(args), out)

    def run(*args: Any) -> Tensor:
        out = fake(*args)
        if out.dtype != torch.uint8 and any(arg.has_gaps for arg in _with_layouts(args) if isinstance(arg, WireLayout)):
            raise ValueError(
                f"{name}: expected `out` for a layout with gaps, whose elements would be arbitrary: pass it"
            )
        compute(args, out)
        return out

    def run_out(*args: Any) -> None:
        fake_out(*args)
        compute(args[:-1], args[-1])

    _register(name, f"({arguments}) -> Tensor", run, fake)
    _register(f"{name}_out", f"({arguments}, Tensor(a!) out) -> ()", run_out, fake_out)


def _with_layouts(args: Iterable[Any]) -> list[Any]:
    """Strings are layouts, in every schema."""
    return [WireLayout.from_spec(arg) if isinstance(arg, str) else arg for arg in args]


def _register(name: str, signature: str, implementation: Callable, fake: Callable) -> None:
    """One implementation serves every device: it picks the kernels by the tensor's device."""
    _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zeropp::{name}", fake, lib=_LIBRARY)


_define("quantize", "Tensor input, str layout, int slice_rows, bool rotate", _quantize_result)
_define("dequantize", "Tensor wire, str layout, ScalarType dtype, int slice_rows", _dequantize_result)
_define(
    "dequantize_sum",
    "Tensor wire, str layout, int num_sources, Tensor? initial, float scale, ScalarType dtype, bool rotate",
    _dequantize_sum_result,
)
_define(
    "dequantize_sum_quantize",
    "Tensor wire, str layout, str out_layout, int num_sources, Tensor? initial",
    _dequantize_sum_quantize_result,
)
_define(
    "quantize_difference",
    "Tensor input, Tensor base, str base_layout, str layout",
    _quantize_difference_result,
)
_define(
    "dequantize_update",
    "Tensor wire, str layout, Tensor base, str base_layout",
    _dequantize_update_result,
)
_define(
    "quantize_with_feedback",
    "Tensor? wire, str layout, str out_layout, str residual_layout, int num_sources, Tensor? initial, bool rotate, "
    "float decay, float rescale, Tensor(r!) residual",
    _quantize_with_feedback_result,
)
