"""The compiled libraries of `ops/`: where they are, how they load, and the C functions they export.

There are two, with the same functions (ops/abi.h): `libzeropp_cpu`, each function once per instruction set, and
`libzeropp_cuda`, which an install with nvcc at hand builds as well. What does not load leaves a reason, in words for
whoever wonders why PyTorch code runs.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {  # a CUDA stream follows in each
    "quantize": (_POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER),
    "dequantize": (_POINTER, _POINTER, _INT, _INT, _POINTER, _INT),
    "dequantize_sum": (_POINTER, _POINTER, _INT, _INT, _POINTER, ctypes.c_float, _INT, _POINTER, _INT),
    "dequantize_sum_quantize": (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "quantize_difference": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "dequantize_update": (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "quantize_with_feedback": (
        *(_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER),
        *(ctypes.c_float, ctypes.c_float, _POINTER, _POINTER),
    ),
    "frozen_pack": (_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER),
    "frozen_unpack": (_POINTER, _POINTER, _INT, _INT, _INT, _INT, _POINTER, _INT),
    "frozen_matmul": (_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _POINTER),
}
_STATUS = {1: "the thread pool failed"}
_CUDA_ERROR = 1000  # `kCudaError` of ops/format.h


class Layout(ctypes.Structure):
    """`zeropp::Layout` of ops/format.h."""

    _fields_ = [
        ("parts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_parts", "numel", "nbytes", "block", "raw_dtype")),
    ]


def functions(library: ctypes.CDLL, suffix: str) -> dict[str, Callable[..., int]]:
    """The kernels that `library` exports under `suffix`. They raise on a status other than 0."""
    found = {}
    for name, argtypes in _SIGNATURES.items():
        function = getattr(library, f"zeropp_{name}_{suffix}")
        function.argtypes = (*argtypes, _POINTER)
        function.errcheck = functools.partial(_check_status, library)
        found[name] = function
    return found


def _check_status(library: ctypes.CDLL, status: int, function: Any, arguments: Any) -> None:
    if status:
        raise RuntimeError(f"{function.__name__}: {_STATUS.get(status) or _cuda_error(library, status)}")


def _cuda_error(library: ctypes.CDLL, status: int) -> str:
    library.zeropp_error_text.restype = ctypes.c_char_p
    return f"CUDA error {status - _CUDA_ERROR}, {library.zeropp_error_text(status).decode()}"


@functools.cache
def cpu_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The CPU library, its threads connected to PyTorch's pool; or None, and why not."""
    path = library_path("cpu")
    if path is None:
        return None, "the compiled library is missing: reinstall hf-zeropp with a C++ compiler at hand"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return None, f"{path} does not load: {error}"
    library.zeropp_set_parallel_for(ctypes.c_void_p(_parallel_for_address()))
    return library, None


@functools.cache
def cuda_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The CUDA library, where there is a device that it can use; or None, and why not."""
    path = library_path("cuda")
    if path is None:
        return None, "there is no CUDA library: reinstall hf-zeropp with nvcc (CUDA 12 or newer) at hand"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return None, f"{path} does not load: {error}"
    count = ctypes.c_int()
    if status := library.zeropp_find_devices(ctypes.byref(count)):
        return None, f"the CUDA library finds no GPU: {_cuda_error(library, status)}"
    return library, None


def library_path(device_type: str) -> str | None:
    # An editable install keeps built files apart from the sources; both lie on the package's path.
    package_path = sys.modules[__package__.partition(".")[0]].__path__
    found = (path for root in package_path for path in Path(root, "_libs").glob(f"libzeropp_{device_type}.*"))
    return next(map(str, found), None)


def _parallel_for_address() -> int | None:
    """Address of PyTorch's C function for threads (torch/csrc/stable/c/shim.h); None, that is serial, without it."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{suffix}")).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
