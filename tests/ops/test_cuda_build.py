"""The compiler's result for the CUDA kernels: no spilled registers, memory moved 16 bytes at a time, no more instructions.

Looks into the library of the install with `cuobjdump` and `nvdisasm`, which the toolkit or two small packages bring
(the `test` extra): no GPU is needed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from hf_zeropp.ops import native
from hf_zeropp.ops.register import OPERATORS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
COUNTED = ("sm_80", "sm_90")  # whose instructions have ceilings
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
    return f"no {' or '.join(missing)}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm" if missing else None


pytestmark = [
    pytest.mark.skipif(tools_are_missing() is not None, reason=str(tools_are_missing())),
    pytest.mark.one_rank,
]


@functools.cache
def cuobjdump(*flags: str) -> str:
    environment = {**os.environ, "PATH": search_path()}
    command = [shutil.which("cuobjdump", path=search_path()), *flags, native.library_path("cuda")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
def built_for(request: pytest.FixtureRequest) -> None:
    """Skip the test of an architecture for which the library was not built."""
    architecture = request.getfixturevalue("architecture") if "architecture" in request.fixturenames else None
    if architecture is not None and f"{architecture}." not in cuobjdump("--list-elf"):
        pytest.skip(f"no machine code for {architecture} (the nvcc that built it was older than 12.8)")


def variants(names: list[str], kernel: str) -> list[str]:
    """The instantiations of a kernel template, among mangled names: each name carries its length before it."""
    return [name for name in names if f"{len(kernel)}{kernel}" in name]


@functools.cache
def disassembled(architecture: str) -> dict[str, str]:
    """The machine code of each function, by its mangled name."""
    listing = cuobjdump("--dump-sass", "--gpu-architecture", architecture)
    return dict(part.split("\n", 1) for part in listing.split("Function : ")[1:])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", HOT)
def test_no_spills_and_no_arrays_in_memory(kernel, architecture):
    resources = RESOURCES.findall(cuobjdump("--dump-resource-usage", "--gpu-architecture", architecture))
    mine = variants([name for name, *_ in resources], kernel)
    assert mine, f"{kernel} is not in the library for {architecture}"
    for name, registers, stack, local in resources:
        if name in mine:
            assert (int(stack), int(local)) == (0, 0), f"{name}: {registers} registers, {stack} bytes of stack"


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", HOT)
def test_16_bytes_at_a_time_and_no_local_memory(kernel, architecture):
    functions = disassembled(architecture)
    for name in variants(list(functions), kernel):
        for instruction in HOT[kernel]:
            is_wide = re.search(rf"\b{instruction}\.E(\.\w+)*\.128\b", functions[name])
            assert is_wide, f"{name} has no 16-byte {instruction}"
        assert not re.search(r"\b(LDL|STL)\b", functions[name]), f"{name} uses local memory"


def test_newer_devices_find_ptx_of_the_newest_architecture_alone():
    newest = max(int(number) for number in re.findall(r"\.sm_(\d+)\.", cuobjdump("--list-elf")))
    assert {int(number) for number in re.findall(r"\.sm_(\d+)\.", cuobjdump("--list-ptx"))} == {newest}


@pytest.mark.thorough("sm_[18]*")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensor_cores_multiply(architecture):
    functions = disassembled(architecture)
    assert all("HMMA.16816.F32.BF16" in functions[name] for name in variants(list(functions), "multiply_rows"))


# ---- Instructions. Another compiler makes other code, so the ceilings hold for one version of nvcc.

CEILINGS = Path(__file__).parent / "cuda_instructions.json"
"""The counts of each kernel. For sm_90 ptxas compiles two of the kernels in one of two ways, which changes from build to build:
dequantize_update_rows to 10,576 or 10,584 instructions, and quantize_difference_rows to 15,027 or 15,034 on the ALU pipe. Their
ceilings are the larger counts. Five builds gave the same counts for all other kernels."""
WRITE = "ZEROPP_WRITE_CEILINGS"  # set: lower the ceilings to what is counted. They never rise by themselves.
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
# These run on the pipe for integers and comparisons, at half the rate of multiplications and additions.
ALU = set("BMSK FMNMX FSEL FSETP IABS IADD3 IMNMX ISETP LEA LOP3 P2R PLOP3 PRMT R2P SEL SHF VIADD VIMNMX".split())


def nvcc_version() -> str | None:
    if (nvcc := shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")) is None:
        return None
    found = re.search(r"V(\d+\.\d+\.\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return found and found[1]


def counted(kernel: str, architecture: str) -> dict[str, int]:
    """Static instructions of all variants of a kernel, of the largest one, and those of all variants on the ALU pipe."""
    functions = disassembled(architecture)
    opcodes = [INSTRUCTION.findall(functions[name]) for name in variants(list(functions), kernel)]
    opcodes = [[opcode for opcode in found if opcode != "NOP"] for found in opcodes]  # padding
    sizes = [len(found) for found in opcodes]
    on_alu = sum(opcode in ALU for found in opcodes for opcode in found)
    return {"variants": len(sizes), "all": sum(sizes), "largest": max(sizes), "alu": on_alu}


def as_text(ceilings: dict) -> str:
    """Return JSON with a line for each kernel."""
    text = json.dumps(ceilings, indent=2, sort_keys=True)
    return re.sub(r"\{[^{}]*\}", lambda counts: " ".join(counts[0].split()), text) + "\n"


@pytest.mark.thorough("*-sm_80")
@pytest.mark.parametrize("architecture", COUNTED)
@pytest.mark.parametrize("kernel", HOT)
def test_kernels_take_no_more_instructions(kernel, architecture):
    ceilings = json.loads(CEILINGS.read_text())
    if ceilings["nvcc"] != nvcc_version():
        pytest.skip(f"the ceilings hold for nvcc {ceilings['nvcc']}, here is {nvcc_version()}")
    found, ceiling = counted(kernel, architecture), ceilings[architecture].get(kernel)
    if os.environ.get(WRITE):
        lower = {key: min(count, ceiling[key]) for key, count in found.items()} if ceiling else found
        ceilings[architecture][kernel] = lower | {"variants": found["variants"]}
        CEILINGS.write_text(as_text(ceilings))
    assert ceiling is not None, f"{kernel} has no ceiling: run with {WRITE}=1"
    assert found["variants"] == ceiling["variants"], f"other variants: set the ceilings of {kernel} anew, and say why"
    above = {key: (count, ceiling[key]) for key, count in found.items() if count > ceiling[key]}
    assert not above, f"{kernel} takes more instructions than before (counted, ceiling): {above}"


def test_the_count_can_fail():
    listing = "/*0000*/ LDC R1, c[0x0] ;\n/* 0x00 */\n/*0010*/ @!P0 LOP3.LUT R2, R2 ;\n/*0020*/ @P1 FADD R0, R1, R2 ;"
    assert INSTRUCTION.findall(listing) == ["LDC", "LOP3", "FADD"]
