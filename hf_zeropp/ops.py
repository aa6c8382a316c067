"""Quantize, dequantize, and sum wire buffers: the operators, registered once, whoever computes them.

Each operator has one schema, one fake and one set of checks here (namespace `zeropp`), in a form that returns a new
tensor and a form that fills `out`. Two kinds of kernels compute them: the compiled library of `ops/` (a plain C ABI,
reached with ctypes: no dependence on PyTorch's C++ ABI, a build of seconds) and the PyTorch reference, which runs
wherever the library does not. They agree bit for bit: which one ran is a matter of speed, and `kernel_info()` tells.

Layouts travel through the dispatcher as text (`WireLayout.spec`): a traced graph then carries everything an operator
needs, and neither fake tensors nor `torch.compile` ever see a lookup table.

`ZEROPP_KERNELS` = auto | avx512 | avx2 | baseline | reference picks the CPU kernels; an impossible wish is an error.
"""

from __future__ import annotations

import ctypes
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zeropp import native, reference
from hf_zeropp.format import FLOAT_DTYPES, WireLayout

# ----------------------------------------------------------------------------------------------------- public functions


def quantize(input: Tensor, layout: WireLayout, *, slice_rows: int = 1, out: Tensor | None = None) -> Tensor:
    """Encode K slices for the wire.

    input: K * layout.numel elements, contiguous, fp32, bf16 or fp16, any shape.
    slice_rows: R of K = R * C; input slice r * C + c is written to wire slot c * R + r.
    Returns uint8 [K * layout.nbytes], or `out`, every byte written.
    """
    if out is None:
        return _OPS.quantize(input, layout.spec, slice_rows)
    _OPS.quantize_out(input, layout.spec, slice_rows, out)
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
    out: Tensor | None = None,
) -> Tensor:
    """Decode and add up what `num_sources` ranks sent: out[p] = (initial[p] + sum over s of wire[s, p]) * scale.

    wire: uint8 [num_sources, P, layout.nbytes]. initial: fp32 [P, layout.numel], or None to start from source 0.
    Sums are fp32, in source order; then rounded to `dtype`. `out` may be `initial`: accumulation in place.
    Returns [P, layout.numel] in `dtype`, or `out`.
    """
    if out is None:
        return _OPS.dequantize_sum(wire, layout.spec, num_sources, initial, scale, dtype)
    _OPS.dequantize_sum_out(wire, layout.spec, num_sources, initial, scale, dtype, out)
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


def _quantize_result(input: Tensor, layout: WireLayout, slice_rows: int) -> _Result:
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
    wire: Tensor, layout: WireLayout, num_sources: int, initial: Tensor | None, scale: float, dtype: torch.dtype
) -> _Result:
    _check_dtype("dequantize_sum", dtype)
    num_sums = _num_sums("dequantize_sum", wire, layout, num_sources, initial)
    return _Result((num_sums, layout.numel), dtype, wire.device)


def _dequantize_sum_quantize_result(
    wire: Tensor, layout: WireLayout, out_layout: WireLayout, num_sources: int, initial: Tensor | None
) -> _Result:
    sizes, out_sizes = ([segment.numel for segment in one.segments] for one in (layout, out_layout))
    if sizes != out_sizes:
        raise ValueError(
            f"dequantize_sum_quantize: expected out_layout with the segment sizes of layout, {sizes}, got {out_sizes}: "
            "build both from the same parameters"
        )
    num_sums = _num_sums("dequantize_sum_quantize", wire, layout, num_sources, initial)
    return _Result((num_sums, out_layout.nbytes), torch.uint8, wire.device)


# -------------------------------------------------------------------------------------------------------------- kernels


# Two classes with a method per operator. Arguments come checked and not empty; `out` is filled completely.


class ReferenceKernels:
    """`reference.py`, on any device."""

    name = "reference"

    def __getattr__(self, operator: str) -> Callable[..., None]:
        compute = getattr(reference, operator)

        def run(*args: Any) -> None:
            layout = next(arg for arg in args if isinstance(arg, WireLayout))
            _assign(args[-1], compute(*args[:-1]), layout)

        return run


def _assign(out: Tensor, result: Tensor, layout: WireLayout) -> None:
    """out <- result; where these are elements, those in gaps of the layout keep what they were."""
    if out.dtype == torch.uint8 or not layout.has_gaps:
        out.copy_(result.view_as(out))
        return
    for part in layout.parts:
        here = slice(part.element, part.element + part.numel)
        out.view(-1, layout.numel)[:, here] = result.view(-1, layout.numel)[:, here]


_DTYPE_CODES = {dtype: code for code, dtype in enumerate(FLOAT_DTYPES)}


class CompiledKernels:
    """The functions that a library of `ops/` exports under the suffix `name`, for tensors of one device type."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._layouts: dict[tuple[str, torch.device], native.Layout] = {}
        self._functions = native.functions(library, name)

    def call(self, kernel: str, device: torch.device, *arguments: Any) -> None:
        """Run `kernel` on tensors of `device`: addresses and numbers as its C function takes them."""
        self._functions[kernel](*arguments, None)

    def quantize(self, input: Tensor, layout: WireLayout, slice_rows: int, out: Tensor) -> None:
        self.call(
            "quantize",
            input.device,
            input.data_ptr(),
            _DTYPE_CODES[input.dtype],
            self._layout(layout, input.device),
            input.numel() // layout.numel,
            slice_rows,
            out.data_ptr(),
        )

    def dequantize(self, wire: Tensor, layout: WireLayout, dtype: torch.dtype, slice_rows: int, out: Tensor) -> None:
        self.call(
            "dequantize",
            wire.device,
            wire.data_ptr(),
            self._layout(layout, wire.device),
            wire.numel() // layout.nbytes,
            slice_rows,
            out.data_ptr(),
            _DTYPE_CODES[dtype],
        )

    def dequantize_sum(
        self,
        wire: Tensor,
        layout: WireLayout,
        num_sources: int,
        initial: Tensor | None,
        scale: float,
        dtype: torch.dtype,
        out: Tensor,
    ) -> None:
        self.call(
            "dequantize_sum",
            wire.device,
            wire.data_ptr(),
            self._layout(layout, wire.device),
            num_sources,
            wire.numel() // (layout.nbytes * num_sources),
            None if initial is None else initial.data_ptr(),
            scale,
            out.data_ptr(),
            _DTYPE_CODES[dtype],
        )

    def dequantize_sum_quantize(
        self,
        wire: Tensor,
        layout: WireLayout,
        out_layout: WireLayout,
        num_sources: int,
        initial: Tensor | None,
        out: Tensor,
    ) -> None:
        self.call(
            "dequantize_sum_quantize",
            wire.device,
            wire.data_ptr(),
            self._layout(layout, wire.device),
            num_sources,
            wire.numel() // (layout.nbytes * num_sources),
            None if initial is None else initial.data_ptr(),
            self._layout(out_layout, wire.device),
            out.data_ptr(),
        )

    def _layout(self, layout: WireLayout, device: torch.device) -> int:
        """The address of `layout`'s C form, which is kept for the life of the process, its table on `device`."""
        key = (layout.spec, device)
        if key not in self._layouts:
            self._layouts[key] = native.Layout(
                parts=layout.table(device).data_ptr(),
                num_parts=len(layout.parts),
                numel=layout.numel,
                nbytes=layout.nbytes,
                block=layout.block,
                raw_dtype=_DTYPE_CODES[layout.raw_dtype],
            )
        return ctypes.addressof(self._layouts[key])


class CudaKernels(CompiledKernels):
    """Kernels on the device of their tensors, in the stream that PyTorch works in. The host waits for nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, "cuda")

    def call(self, kernel: str, device: torch.device, *arguments: Any) -> None:
        with torch.cuda.device(device):
            self._functions[kernel](*arguments, torch.cuda.current_stream(device).cuda_stream)


# ---------------------------------------------------------------------------------------------------- choice of kernels

_INSTRUCTION_SETS = ("avx512", "avx2", "baseline")  # the fastest first


class KernelInfo(NamedTuple):
    """Which kernels run, and why; what `hf-zeropp env` prints."""

    cpu: str  # "avx512", "avx2", "baseline" or "reference"
    available: tuple[str, ...]  # what set_kernels takes on this machine, the fastest first
    library: str | None  # path of the CPU library
    reason: str | None  # why there is no CPU library
    cuda_library: str | None  # path of the CUDA library
    cuda_reason: str | None  # why tensors on GPUs, if there are any, go by the PyTorch reference


def kernel_info() -> KernelInfo:
    library, reason = native.cpu_library()
    path = None if library is None else library._name
    return KernelInfo(
        cpu=_kernels["cpu"].name,
        available=_available(),
        library=path,
        reason=reason,
        cuda_library=native.library_path("cuda"),
        cuda_reason=native.cuda_library()[1],
    )


def set_kernels(name: str = "auto") -> None:
    """Choose the CPU kernels of this process, as `ZEROPP_KERNELS` does at import."""
    if name not in ("auto", *_INSTRUCTION_SETS, "reference"):
        raise ValueError(f"ZEROPP_KERNELS: expected auto, avx512, avx2, baseline or reference, got {name!r}")
    library, reason = native.cpu_library()
    available = _available()
    if name == "auto":
        name = available[0]
    if name not in available:
        why = reason or "this machine lacks the instructions"
        raise RuntimeError(f"ZEROPP_KERNELS={name}: {why}; available here: {', '.join(available)}")
    if library is None or name == "reference":
        _kernels["cpu"] = ReferenceKernels()
    else:
        _kernels["cpu"] = CompiledKernels(library, name)


def _available() -> tuple[str, ...]:
    library, _ = native.cpu_library()
    compiled = [name for name in _INSTRUCTION_SETS if library is not None and library.zeropp_supports(name.encode())]
    return (*compiled, "reference")


def compiled_kernels(device_type: str) -> CompiledKernels | None:
    """The compiled kernels chosen for tensors of this device type; None where PyTorch code runs."""
    kernels = _kernels_of(device_type) if device_type in ("cpu", "cuda") else None
    return kernels if isinstance(kernels, CompiledKernels) else None


def _kernels_of(device_type: str) -> ReferenceKernels | CompiledKernels:
    if device_type not in _kernels:
        _kernels[device_type] = _first_kernels(device_type)
    return _kernels[device_type]


def _first_kernels(device_type: str) -> ReferenceKernels | CudaKernels:
    """For a device type other than the CPU, whose kernels are chosen at import. Warns once, since it is asked once."""
    library, reason = native.cuda_library() if device_type == "cuda" else (None, "there are no kernels for it")
    if library is not None:
        return CudaKernels(library)
    warnings.warn(f"hf_zeropp: PyTorch code runs on {device_type}, slowly: {reason}", stacklevel=5)
    return ReferenceKernels()


def _choose_at_import(environment: Mapping[str, str]) -> None:
    name = environment.get("ZEROPP_KERNELS", "auto")
    set_kernels(name)
    if _kernels["cpu"].name == "reference" != name:
        warnings.warn(f"hf_zeropp: {native.cpu_library()[1]}. PyTorch code runs instead, slowly.", stacklevel=2)


_kernels: dict[str, ReferenceKernels | CompiledKernels] = {}
_choose_at_import(os.environ)


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
            getattr(_kernels_of(out.device.type), name)(*_with_layouts(args), out)

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


_define("quantize", "Tensor input, str layout, int slice_rows", _quantize_result)
_define("dequantize", "Tensor wire, str layout, ScalarType dtype, int slice_rows", _dequantize_result)
_define(
    "dequantize_sum",
    "Tensor wire, str layout, int num_sources, Tensor? initial, float scale, ScalarType dtype",
    _dequantize_sum_result,
)
_define(
    "dequantize_sum_quantize",
    "Tensor wire, str layout, str out_layout, int num_sources, Tensor? initial",
    _dequantize_sum_quantize_result,
)
