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
from types import ModuleType
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
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


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
    library, reason = _load(path)
    if library is not None:
        library.zeropp_set_parallel_for(ctypes.c_void_p(_parallel_for_address()))
    return library, reason


@functools.cache
def cuda_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The CUDA library, where there is a device that it can use; or None, and why not."""
    path = library_path("cuda")
    if path is None:
        return None, "there is no CUDA library: reinstall hf-zeropp with nvcc (CUDA 12 or newer) at hand"
    library, reason = _load(path)
    if library is None:
        return None, reason
    count = ctypes.c_int()
    if status := library.zeropp_find_devices(ctypes.byref(count)):
        return None, f"the CUDA library finds no GPU: {_cuda_error(library, status)}"
    return library, None


def library_path(device_type: str) -> str | None:
    """Return the path of the library for ``device_type`` in the package's own folders, or None where it was not built.

    Neither the working directory nor ``LD_LIBRARY_PATH`` is searched, and no file of another name is taken.
    """
    # An editable install keeps built files apart from the sources; both lie on the package's path.
    paths = (Path(root, "_libs", f"libzeropp_{device_type}{_SUFFIX}") for root in _package().__path__)
    return next((str(path) for path in paths if path.is_file()), None)


def _load(path: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Load a library; or return None, and why not."""
    # Some installers link each file of a package into a store of theirs. Then the sources lie beside the library there.
    real, home = Path(path).resolve(), Path(str(_package().__file__)).resolve().parent
    if real.parent not in (Path(path).parent.resolve(), home / "_libs"):
        return None, f"{path} leads out of the package's folder, to {real}: reinstall hf-zeropp"
    try:
        return ctypes.CDLL(path), None
    except OSError as error:
        return None, f"{path} does not load: {error}"


def _package() -> ModuleType:
    return sys.modules[__package__.partition(".")[0]]


def _parallel_for_address() -> int | None:
    """Address of PyTorch's C function for threads (torch/csrc/stable/c/shim.h); None, that is serial, without it."""
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{_SUFFIX}")).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
