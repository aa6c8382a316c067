"""Facts that Python and C++ both state, or must state, are the same: prototypes, structures and constants."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_zeropp import config
from hf_zeropp.ops import format, frozen_format, frozen_reference, native
from hf_zeropp.ops.register import OPERATORS

pytestmark = pytest.mark.one_rank

SOURCES = Path(__file__).parents[2] / "ops"
ABI = (SOURCES / "abi.h").read_text()


def declarations(pattern: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Name: (type of the result, (type, name) of each argument), for each prototype of abi.h that matches ``pattern``."""
    found = re.findall(pattern + r"\(([^)]*)\);", ABI)
    return {
        name: (result.strip(), [argument(text) for text in arguments.split(",")]) for result, name, arguments in found
    }


def argument(text: str) -> tuple[str, str]:
    """ "const float* initial" -> ("const float*", "initial")."""
    c_type, name = " ".join(text.split()).rsplit(" ", 1)
    return c_type, name


KERNELS = declarations(r"ZEROPP_(KERNEL)\((\w+)\)")
FUNCTIONS = declarations(r"ZEROPP_EXPORT ([\w* ]+?) ?(zeropp_\w+)")


def test_every_operator_has_a_prototype():
    assert KERNELS.keys() == OPERATORS.keys(), (
        "an operator is declared in hf_zeropp/ops and not in ops/abi.h, or reversed"
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_prototypes_are_those_of_the_operators(name):
    assert KERNELS[name][1] == OPERATORS[name].c_arguments


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("folder", "suffix"), [("cpu", "cpp"), ("cuda", "cu")])
def test_every_operator_has_a_file_of_its_name(name, folder, suffix):
    assert f"ZEROPP_KERNEL({name})" in (SOURCES / folder / f"{name}.{suffix}").read_text()


def test_other_functions_are_those_of_native():
    found = {
        name: (result, tuple(c_type for c_type, _ in arguments)) for name, (result, arguments) in FUNCTIONS.items()
    }
    assert found == native.FUNCTIONS


def test_ctypes_have_the_sizes_of_c_types():
    sizes = {"int64_t": 8, "float": 4, "int": 4, "void*": 8, "const ZeroppLayout*": 8, "const char*": 8}
    assert {name: ctypes.sizeof(native.ctypes_of(name)) for name in sizes} == sizes


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_abi_is_plain_c():
    command = ["cc", "-std=c99", "-Wall", "-Werror", "-fsyntax-only", "-DZEROPP_ISA=test", f"-I{SOURCES}", "-xc", "-"]
    subprocess.run(command, input='#include "abi.h"', text=True, check=True)


def fields(structure: str) -> list[str]:
    body = re.search(rf"struct {structure} {{(.*?)}};", ABI, re.DOTALL)[1]
    return re.findall(r"(\w+);", re.sub("//.*", "", body))


def test_structures_have_the_same_fields():
    assert fields("ZeroppPart") == list(format.Part._fields)
    assert fields("ZeroppLayout") == [name for name, _ in native.Layout._fields_]


def constant(file: str, name: str) -> float:
    """The value of a ``constexpr`` or an enumerator."""
    text = (SOURCES / file).read_text()
    expression = re.search(rf"\b{name} = ([^;,]+)[;,]", text)[1]
    return eval(re.sub(r"(?<=[\dx])f\b", "", expression))


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        ("abi.h", "kOk", 0),
        ("abi.h", "kParallelFailed", next(iter(native._STATUS))),
        ("abi.h", "kCudaError", native._CUDA_ERROR),
        ("format.h", "kMaxBlock", format.MAX_BLOCK),
        ("format.h", "kCodesAtAByte", format.CODES_AT_A_BYTE),
        ("format.h", "kScaleNaN", format.SCALE_NAN),
        ("format.h", "kScaleMin", format.SCALE_MIN),
        ("format.h", "kScaleMax", format.SCALE_MAX),
        ("frozen_format.h", "kMaxInputs", frozen_reference.MAX_INPUTS),
        ("frozen_format.h", "kMatmulLanes", frozen_reference.LANES),
        ("frozen_format.h", "kRun", frozen_reference.RUN),
        ("frozen_format.h", "kFine", frozen_reference.FINE),
        ("frozen_format.h", "kMaxLevel", max(frozen_reference.LEVELS)),
        ("frozen_format.h", "kZeroRank", sorted(frozen_reference.LEVELS).index(0)),
        ("frozen_format.h", "kNumTrials", len(frozen_reference.TRIALS)),
        ("frozen_format.h", "kFirstExponent", frozen_reference.FIRST_EXPONENT),
        ("frozen_format.h", "kRatioExponent", frozen_reference.RATIO_EXPONENT),
        ("frozen_format.h", "kFirstMin", frozen_reference.FIRST_MIN),
        ("frozen_format.h", "kFirstMax", frozen_reference.FIRST_MAX),
        ("frozen_format.h", "kRatioMax", frozen_reference.RATIO_MAX),
        ("frozen_format.h", "kSafeRatio", frozen_reference.SAFE_RATIO),
        ("frozen_format.h", "kScalesNaN", frozen_reference.SCALES_NAN),
        ("cuda/rows.cuh", "kLanes", format.MIN_BLOCK),  # the least block of the kernels on rows is a warp of elements
    ],
)
def test_constants_are_the_same(file, name, expected):
    assert constant(file, name) == pytest.approx(expected, rel=1e-7)


def test_levels_are_the_same():
    text = (SOURCES / "frozen_format.h").read_text()
    levels = re.search(r"#define ZEROPP_LEVELS (.*)", text)[1]
    assert tuple(map(int, levels.split(","))) == frozen_reference.LEVELS
    first, second, third = re.search(r"return t == 0 \? (\S+) : t == 1 \? (\S+) : (\S+);", text).groups()
    assert tuple(map(int, (first, second, third))) == frozen_reference.TRIALS


def test_dtype_codes_are_positions():
    names = re.search(r"enum ZeroppDType {(.*?)}", ABI)[1].replace(" ", "").split(",")
    assert [name[1:].lower() for name in names] == [str(dtype).removeprefix("torch.") for dtype in format.FLOAT_DTYPES]


def test_limits_of_settings_are_those_of_the_formats():
    for block in (format.MIN_BLOCK, format.MAX_BLOCK):
        assert frozen_format.FrozenFormat(4, block).block == block
    assert format.MIN_BLOCK % format.BLOCK_MULTIPLE == 0
    for bits in frozen_format.FROZEN_BITS:
        assert config.ZeroPPConfig(frozen_bits=bits).frozen_bits == bits


@pytest.mark.parametrize("guide", ["README.md", "cuda/README.md"])
def test_guides_name_files_that_exist(guide):
    text = (SOURCES / guide).read_text()
    names = {name for name in re.findall(r"`([\w./]+\.(?:py|h|cuh|cu|cpp|txt))`", text) if "quantize_5bit" not in name}
    roots = (SOURCES, SOURCES.parent, SOURCES.parent / "hf_zeropp" / "ops", (SOURCES / guide).parent)
    assert [name for name in sorted(names) if not any((root / name).exists() for root in roots)] == []
