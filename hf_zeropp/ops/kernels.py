"""Kernels compute the operators. This module holds the two kinds of kernels, and chooses which of them run.

``CompiledKernels`` call the C functions of ``ops/`` (a plain C ABI, reached with ctypes: no dependence on the C++ ABI of
PyTorch, and a build of seconds). Where the compiled library does not run, ``TritonKernels`` (``triton_kernels.py``) take its
place on GPUs, and ``ReferenceKernels``, which are PyTorch code, elsewhere. All give the same bits, so the choice is a matter of
speed.

The environment variable ``ZEROPP_KERNELS`` = auto | avx512 | avx2 | baseline | reference chooses the CPU kernels at import. A
choice that this machine cannot run is an error.
"""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zeropp.ops import native
from hf_zeropp.ops.format import FLOAT_DTYPES, WireLayout
from hf_zeropp.ops.operator import Operator
from hf_zeropp.ops.reference_kernels import ReferenceKernels

_DTYPE_CODES = {dtype: code for code, dtype in enumerate(FLOAT_DTYPES)}


class CompiledKernels:
    """The C functions that a library of ``ops/`` exports under one suffix, for tensors of one device type.

    Args:
        library: the loaded library.
        name: the suffix of its functions: an instruction set, or "cuda".
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._library = library
        self._functions: dict[str, Callable[..., int]] = {}
        self._layouts: dict[tuple[str, torch.device], tuple[int, native.Layout, Tensor]] = {}

    def run(self, operator: Operator, arguments: Sequence[Any], counts: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Call the C function of an operator.

        Args:
            operator: the operator.
            arguments: checked, and not empty.
            counts: ``Result.counts``.
            outs: tensors to fill. Every byte is written.

        Raises:
            RuntimeError: the function reports a failure, or the library has no such function.
        """
        # The order is that of ``Operator.c_arguments``, from which ctypes and ops/abi.h take theirs.
        device = outs[0].device
        values = self._c_values(operator, arguments, device)
        values += counts
        values += [out.data_ptr() for out in outs]
        self._call(self._function(operator), device, values)

    def _call(self, function: Callable[..., int], device: torch.device, values: list[Any]) -> None:
        function(*values, None)  # no stream

    def _function(self, operator: Operator) -> Callable[..., int]:
        """Return the C function, bound on its first use: a library of older sources may lack those of new operators."""
        if (function := self._functions.get(operator.name)) is None:
            c_types = [c_type for c_type, _ in operator.c_arguments]
            function = native.kernel(self._library, f"zeropp_{operator.name}_{self.name}", c_types)
            self._functions[operator.name] = function
        return function

    def _c_values(self, operator: Operator, arguments: Sequence[Any], device: torch.device) -> list[Any]:
        """Return the arguments as C takes them (``Operator.c_arguments``): numbers, addresses and dtype codes."""
        values: list[Any] = []
        for argument, value in zip(operator.arguments, arguments, strict=True):
            if isinstance(value, Tensor):
                values.append(value.data_ptr())
                # One kernel serves all float dtypes, and must know which one it reads.
                if argument.has_dtype_code:
                    values.append(_DTYPE_CODES[value.dtype])
            elif isinstance(value, WireLayout):
                values.append(self._layout(value, device))
            else:
                # Numbers pass as they are, and None of an optional tensor becomes a null pointer.
                values.append(_DTYPE_CODES.get(value, value))
                if value is None and argument.has_dtype_code:
                    values.append(0)  # the kernel does not read it
        return values

    def _layout(self, layout: WireLayout, device: torch.device) -> int:
        """Return the address of ``layout``'s C form, which is kept for the life of the process, its table on ``device``."""
        # Kernels keep no layout between calls, but CUDA kernels read the table after the call has returned. Nothing
        # here is ever freed, so no caller has to keep a layout alive until the device is done. Copying a table to a GPU
        # makes the host wait, which happens once here and not in every call.
        key = (layout.spec, device)
        if key not in self._layouts:
            table = layout.table(device)
            c_form = native.Layout(
                parts=table.data_ptr(),
                num_parts=len(layout.parts),
                numel=layout.numel,
                nbytes=layout.nbytes,
                block=layout.block,
                raw_dtype=_DTYPE_CODES[layout.raw_dtype],
            )
            # Two threads may both get here for one layout. The first entry stays, and both use it: if the second replaced it, its
            # memory would be freed while a kernel reads it.
            self._layouts.setdefault(key, (ctypes.addressof(c_form), c_form, table))
        return self._layouts[key][0]


class CudaKernels(CompiledKernels):
    """Kernels that run on the device of their tensors, in the stream that PyTorch works in. The host never waits."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, "cuda")

    def _call(self, function: Callable[..., int], device: torch.device, values: list[Any]) -> None:
        # A launch goes to the current device and fails with a stream of another one. The current stream is the right
        # one, since FSDP2 gathers and reduces on streams of its own: a kernel runs there behind the collective whose
        # wire it reads, and before later work that PyTorch's allocator gives the same memory to.
        with torch.cuda.device(device):
            function(*values, torch.cuda.current_stream(device).cuda_stream)


# ---- The choice.

_INSTRUCTION_SETS = ("avx512", "avx2", "baseline")  # the fastest first


class KernelInfo(NamedTuple):
    """Which kernels run, and why. ``hf-zeropp env`` prints it."""

    cpu: str  # "avx512", "avx2", "baseline" or "reference"
    available: tuple[str, ...]  # names that set_kernels takes on this machine, the fastest first
    library: str | None  # path of the CPU library
    reason: str | None  # why there is no CPU library
    cuda: str  # "cuda", "triton" or "reference"; where there is no GPU, "reference"
    cuda_library: str | None  # path of the CUDA library
    cuda_reason: str | None  # why it does not compute on GPUs, if there are any


def kernel_info() -> KernelInfo:
    """Return which kernels run on this machine, and why."""
    library, reason = native.cpu_library()
    path = None if library is None else library._name
    return KernelInfo(
        cpu=_kernels["cpu"].name,
        available=_available(),
        library=path,
        reason=reason,
        cuda=_cuda_kernels_name(),
        cuda_library=native.library_path("cuda"),
        cuda_reason=native.cuda_library()[1],
    )


def _cuda_kernels_name() -> str:
    """Return which kernels run on GPUs, without the warning that choosing them may give."""
    if native.cuda_library()[0] is not None:
        return "cuda"
    kernels = triton_kernels("cuda")[0] if torch.cuda.is_available() else None
    return ReferenceKernels.name if kernels is None else kernels.name


def set_kernels(name: str = "auto") -> None:
    """Choose the CPU kernels of this process, as ``ZEROPP_KERNELS`` does at import.

    Args:
        name: "avx512", "avx2", "baseline", "reference", or "auto" for the fastest that this machine runs.

    Raises:
        ValueError: an unknown name.
        RuntimeError: this machine cannot run these kernels.
    """
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
    """Return the compiled kernels chosen for tensors of this device type; None where PyTorch code runs."""
    # ``kernels_of`` warns about other device types. A mere question must not.
    kernels = kernels_of(device_type) if device_type in ("cpu", "cuda") else None
    return kernels if isinstance(kernels, CompiledKernels) else None


def kernels_of(device_type: str) -> ReferenceKernels | CompiledKernels:
    """Return the kernels for tensors of this device type."""
    if device_type not in _kernels:
        _kernels[device_type] = _first_kernels(device_type)
    return _kernels[device_type]


def _first_kernels(device_type: str) -> ReferenceKernels | CudaKernels:
    """Choose for a device type other than the CPU. Warns once, since it is called once per device type."""
    library, reason = native.cuda_library() if device_type == "cuda" else (None, "there are no kernels for it")
    if library is not None:
        return CudaKernels(library)
    kernels, why_not = triton_kernels(device_type) if device_type == "cuda" else (None, "")
    if kernels is not None:
        _warn(
            f"Triton kernels run on {device_type}, because {reason}. They compute the same bits and need no memory beside their "
            "tensors. How fast they are was not measured. Changed words (qwz_mode exact) and packed "
            "frozen weights run as PyTorch code, which takes up to 200 MB.",
            stacklevel=6,
        )
        return kernels
    _warn(
        f"PyTorch code runs on {device_type}, because {reason}. It computes the same bits, moves some 30 times the memory of "
        f"the kernels, and takes up to 39 bytes beside its tensors for each element of a call (22 in INT8).{why_not}",
        stacklevel=6,
    )
    return ReferenceKernels()


def triton_kernels(device_type: str) -> tuple[ReferenceKernels | None, str]:
    """Return Triton's kernels, or None and a sentence that says why they do not run on this device type."""
    # Imported here, because it takes a second and most machines need it not.
    try:
        from hf_zeropp.ops.triton_kernels import TritonKernels, check_a_case

        check_a_case(device_type)
    except Exception as error:  # whatever Triton, its compiler or the driver raises: the reference still runs
        return None, f" Triton does not run there either: {type(error).__name__}: {error}"
    return TritonKernels(), ""


def _choose_at_import(environment: Mapping[str, str]) -> None:
    name = environment.get("ZEROPP_KERNELS", "auto")
    set_kernels(name)
    if _kernels["cpu"].name == "reference" != name:
        _warn(f"{native.cpu_library()[1]}. PyTorch code runs instead, slowly.", stacklevel=3)


def _warn(message: str, stacklevel: int) -> None:
    """Warn on one rank of each machine: its ranks share the libraries, and those of another machine may have them."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(f"hf_zeropp on {platform.node()}: {message}", stacklevel=stacklevel)


# The CPU's kernels are chosen at import, where ZEROPP_KERNELS is read. Those of other devices are chosen at the first
# call with a tensor there, so a process that never uses a GPU neither loads the CUDA library nor warns that there is
# none.
_kernels: dict[str, ReferenceKernels | CompiledKernels] = {}
_choose_at_import(os.environ)
