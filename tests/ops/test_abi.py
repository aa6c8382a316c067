"""Facts that Python and C++ both state, or must state, are the same: prototypes and constants."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hf_zeropp.ops import format, frozen_reference, native
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


def test_prototypes_are_those_of_the_operators():
    assert {name: arguments for name, (_, arguments) in KERNELS.items()} == {
        name: operator.c_arguments for name, operator in OPERATORS.items()
    }


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


def constant(file: str, name: str) -> float:
    """The value of a ``constexpr`` or an enumerator: of ``kMaxBlock`` for ``max_block``."""
    text = (SOURCES / file).read_text()
    expression = re.search(rf"\bk{name.replace('_', '')} = ([^;,]+)[;,]", text, re.IGNORECASE)[1]
    return eval(re.sub(r"(?<=[\dx])f\b", "", expression))


def test_constants_are_the_same():
    frozen = "MAX_INPUTS RUN FINE FIRST_EXPONENT RATIO_EXPONENT FIRST_MIN FIRST_MAX RATIO_MAX SAFE_RATIO SCALES_NAN"
    for module, file, names in (
        (format, "format.h", "MAX_BLOCK CODES_AT_A_BYTE SCALE_NAN SCALE_MIN SCALE_MAX"),
        (frozen_reference, "frozen_format.h", frozen),
    ):
        for name in names.split():
            assert constant(file, name) == pytest.approx(getattr(module, name), rel=1e-7), name


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        ("abi.h", "ok", 0),
        ("abi.h", "parallel_failed", next(iter(native._STATUS))),
        ("abi.h", "cuda_error", native._CUDA_ERROR),
        ("frozen_format.h", "matmul_lanes", frozen_reference.LANES),
        ("frozen_format.h", "max_level", max(frozen_reference.LEVELS)),
        ("frozen_format.h", "zero_rank", sorted(frozen_reference.LEVELS).index(0)),
        ("frozen_format.h", "num_trials", len(frozen_reference.TRIALS)),
        ("cuda/rows.cuh", "lanes", format.MIN_BLOCK),  # the least block of the kernels on rows is a warp of elements
    ],
)
def test_constants_of_other_names_are_the_same(file, name, expected):
    assert constant(file, name) == expected


@pytest.mark.parametrize("guide", ["README.md", "cuda/README.md"])
def test_guides_name_files_that_exist(guide):
    text = (SOURCES / guide).read_text()
    names = {name for name in re.findall(r"`([\w./]+\.(?:py|h|cuh|cu|cpp|txt))`", text) if "quantize_5bit" not in name}
    roots = (SOURCES, SOURCES.parent, SOURCES.parent / "hf_zeropp" / "ops", (SOURCES / guide).parent)
    assert [name for name in sorted(names) if not any((root / name).exists() for root in roots)] == []
