"""The kernels behind the operators of ops.py: the compiled library of `ops/`, or PyTorch code, and which of them runs.

Two classes have a method per operator, for tensors of one device type. Arguments come checked and not empty; `out` is filled
completely. `ZEROPP_KERNELS` = auto | avx512 | avx2 | baseline | reference picks the CPU kernels; an impossible wish is an error.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zeropp.ops import native, reference
from hf_zeropp.ops.format import FLOAT_DTYPES, WireLayout


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

    def quantize(self, input: Tensor, layout: WireLayout, slice_rows: int, rotate: bool, out: Tensor) -> None:
        self.call(
            "quantize",
            input.device,
            input.data_ptr(),
            _DTYPE_CODES[input.dtype],
            self._layout(layout, input.device),
            input.numel() // layout.numel,
            slice_rows,
            rotate,
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
        rotate: bool,
        out: Tensor,
    ) -> None:
        self.call(
            "dequantize_sum",
            wire.device,
            wire.data_ptr(),
            self._layout(layout, wire.device),
            num_sources,
            wire.numel() // (layout.nbytes * num_sources),
            _address(initial),
            scale,
            rotate,
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
            _address(initial),
            self._layout(out_layout, wire.device),
            out.data_ptr(),
        )

    def quantize_difference(
        self, input: Tensor, base: Tensor, base_layout: WireLayout, layout: WireLayout, out: Tensor
    ) -> None:
        self.call(
            "quantize_difference",
            input.device,
            input.data_ptr(),
            _DTYPE_CODES[input.dtype],
            base.data_ptr(),
            self._layout(base_layout, input.device),
            self._layout(layout, input.device),
            input.numel() // layout.numel,
            out.data_ptr(),
        )

    def dequantize_update(
        self, wire: Tensor, layout: WireLayout, base: Tensor, base_layout: WireLayout, out: Tensor
    ) -> None:
        self.call(
            "dequantize_update",
            wire.device,
            wire.data_ptr(),
            self._layout(layout, wire.device),
            base.data_ptr(),
            self._layout(base_layout, wire.device),
            wire.numel() // layout.nbytes,
            out.data_ptr(),
        )

    def quantize_with_feedback(
        self,
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
        out: Tensor,
    ) -> None:
        self.call(
            "quantize_with_feedback",
            out.device,
            _address(wire),
            self._layout(layout, out.device),
            num_sources,
            out.numel() // out_layout.nbytes,
            _address(initial),
            rotate,
            self._layout(out_layout, out.device),
            self._layout(residual_layout, out.device),
            decay,
            rescale,
            residual.data_ptr(),
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


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CudaKernels(CompiledKernels):
    """Kernels on the device of their tensors, in the stream that PyTorch works in. The host waits for nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, "cuda")

    def call(self, kernel: str, device: torch.device, *arguments: Any) -> None:
        with torch.cuda.device(device):
            self._functions[kernel](*arguments, torch.cuda.current_stream(device).cuda_stream)


# ---- Which of them runs.

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
    kernels = kernels_of(device_type) if device_type in ("cpu", "cuda") else None
    return kernels if isinstance(kernels, CompiledKernels) else None


def kernels_of(device_type: str) -> ReferenceKernels | CompiledKernels:
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
