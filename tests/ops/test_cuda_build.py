"""The compiler's result for the CUDA kernels: no registers are spilled, and memory is moved 16 bytes at a time.

Looks into the library of the install with `cuobjdump` and `nvdisasm`, which the toolkit or two small packages bring
(the `test` extra): no GPU is needed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from hf_zeropp.ops import native
from hf_zeropp.ops.register import OPERATORS

ARCHITECTURES = ("sm_80", "sm_90")
HOT = {  # kernel: the instructions that must move 16 bytes at a time
    **{
        f"{name}_rows": ("LDG", "STG")
        for name in OPERATORS
        if not name.startswith("frozen_") and not name.endswith("_changes")
    },
    "unpack_rows": ("LDG", "STG"),
    "count_blocks": ("LDG",),
    "write_blocks": ("LDG",),
    "apply_blocks": ("LDG", "STG"),
    "multiply_rows": ("LDG",),  # its results are a few floats
}
RESOURCES = re.compile(r"Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def search_path() -> str:
    """PATH, and where the packages put their programs."""
    packages = Path(sysconfig.get_path("purelib"), "nvidia")
    return os.pathsep.join([os.environ["PATH"], *map(str, packages.glob("*/bin"))])


def tools_are_missing() -> str | None:
    if native.library_path("cuda") is None:
        return "no CUDA library in this install (no nvcc when it was built)"
    missing = [tool for tool in ("cuobjdump", "nvdisasm") if shutil.which(tool, path=search_path()) is None]
    return (
        f"{' and '.join(missing)} not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        if missing
        else None
    )


pytestmark = pytest.mark.skipif(tools_are_missing() is not None, reason=str(tools_are_missing()))


@functools.cache
def cuobjdump(*flags: str) -> str:
    environment = {**os.environ, "PATH": search_path()}
    command = [shutil.which("cuobjdump", path=search_path()), *flags, native.library_path("cuda")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def variants(names: list[str], kernel: str) -> list[str]:
    """The instantiations of a kernel template, among mangled names: each name carries its length before it."""
    return [name for name in names if f"{len(kernel)}{kernel}" in name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", HOT)
def test_no_spills_and_no_arrays_in_memory(kernel, architecture):
    resources = RESOURCES.findall(cuobjdump("--dump-resource-usage", "--gpu-architecture", architecture))
    mine = variants([name for name, *_ in resources], kernel)
    assert mine, f"{kernel} is not in the library for {architecture}"
    for name, registers, stack, local in resources:
        if name in mine:
            assert (int(stack), int(local)) == (0, 0), f"{name}: {registers} registers, {stack} bytes of stack"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", HOT)
def test_16_bytes_at_a_time_and_no_local_memory(kernel, architecture):
    listing = cuobjdump("--dump-sass", "--gpu-architecture", architecture)
    functions = dict(part.split("\n", 1) for part in listing.split("Function : ")[1:])
    mine = variants(list(functions), kernel)
    assert mine, f"{kernel} is not in the library for {architecture}"
    for name in mine:
        for instruction in HOT[kernel]:
            assert re.search(rf"\b{instruction}\.E(\.\w+)*\.128\b", functions[name]), (
                f"{name} has no 16-byte {instruction}"
            )
        assert not re.search(r"\b(LDL|STL)\b", functions[name]), f"{name} uses local memory"


def test_newer_devices_find_ptx():
    assert "arch = sm_90" in cuobjdump("--dump-ptx")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensor_cores_multiply(architecture):
    listing = cuobjdump("--dump-sass", "--gpu-architecture", architecture)
    functions = dict(part.split("\n", 1) for part in listing.split("Function : ")[1:])
    assert all("HMMA.16816.F32.BF16" in functions[name] for name in variants(list(functions), "multiply_rows"))
