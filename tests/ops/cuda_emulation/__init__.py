"""The kernels of ops/cuda compiled for a CPU, with an emulation of CUDA's execution model (cuda_runtime.h)."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "ops" / "cuda"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-w", "-DZEROPP_ISA=cuda"]
# A GPU refuses an access whose address is no multiple of its size. A CPU does not, and stops at it by these.
FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


@functools.cache
def library() -> ctypes.CDLL:
    """`libzeropp_cuda`, emulated: the same functions, for tensors in the host's memory."""
    with tempfile.TemporaryDirectory(prefix="hf-zeropp-emulation-") as folder:
        target = Path(folder, "libzeropp_cuda.so")
        build(sorted(SOURCES.glob("*.cu")), target)
        return ctypes.CDLL(str(target))  # stays loaded when the file is gone


def build(sources: list[Path], target: Path) -> None:
    """All sources as one translation unit: headers are read once."""
    unit = target.with_suffix(".cpp")
    unit.write_text("".join(f'#include "{source}"\n' for source in [*sources, HERE / "fibers.cpp"]))
    command = [compiler(), *FLAGS, f"-I{HERE}", "-include", HERE / "ptx.h", unit, "-o", target]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"The emulation does not compile:\n{result.stderr[:4000]}")
