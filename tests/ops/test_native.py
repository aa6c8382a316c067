"""The libraries of ops/: which are there, and what is said where one is not or cannot be used."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hf_zeropp
from hf_zeropp import ops
from hf_zeropp.cli import environment_table
from hf_zeropp.ops import kernels, native
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.ops.register import OPERATORS

pytestmark = pytest.mark.one_rank

BUILT = native.library_path("cuda") is not None
needs_library = pytest.mark.skipif(not BUILT, reason="no CUDA library in this install (no nvcc when it was built)")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def forgetful():
    """Libraries are looked for anew, before the test and after it."""
    native.cuda_library.cache_clear()
    yield
    native.cuda_library.cache_clear()
    kernels._kernels.pop("cuda", None)


def test_a_broken_cuda_library_is_explained(forgetful, monkeypatch, tmp_path: Path):
    broken = tmp_path / "libzeropp_cuda.so"
    broken.write_text("not a library")
    monkeypatch.setattr(native, "library_path", lambda device_type: str(broken))
    library, reason = native.cuda_library()
    assert library is None and f"{broken} does not load" in reason


@needs_library
@without_gpu
def test_a_missing_gpu_or_driver_is_explained(forgetful):
    library, reason = native.cuda_library()
    assert library is None and "finds no GPU that runs its kernels: CUDA error" in reason
    assert ops.kernel_info().cuda_library == native.library_path("cuda")
    assert ops.kernel_info().cuda_reason == reason


def test_the_env_command_says_why(forgetful, monkeypatch):
    monkeypatch.setattr(native, "library_path", lambda device_type: None)
    rows = dict(zip(*(list(column.cells) for column in environment_table().columns), strict=True))
    assert rows["CUDA library"] == "none" and "nvcc" in rows["CUDA kernels"] and "reinstall" in rows["CUDA kernels"]


@without_gpu
def test_where_neither_the_library_nor_triton_runs_the_reference_does_with_one_warning(forgetful, monkeypatch):
    monkeypatch.setattr(native, "library_path", lambda device_type: None)
    kernels._kernels.pop("cuda", None)
    why = "PyTorch code runs on cuda, because there is no CUDA library.*nvcc.* Triton does not run there either: "
    with pytest.warns(UserWarning, match=why) as caught:
        assert kernels.kernels_of("cuda").name == "reference"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.compiled_kernels("cuda") is None


CPU = native.library_path("cpu")
needs_cpu_library = pytest.mark.skipif(CPU is None, reason="no CPU library in this install")


@pytest.fixture
def library_folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """A package folder for libraries, empty, whose libraries are looked for anew."""
    (tmp_path / "package/_libs").mkdir(parents=True)
    monkeypatch.setattr(hf_zeropp, "__path__", [str(tmp_path / "package")])
    native.cpu_library.cache_clear()
    yield tmp_path / "package/_libs"
    native.cpu_library.cache_clear()


@needs_cpu_library
def test_no_library_is_loaded_from_elsewhere_or_by_another_name(library_folder, tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "_libs", tmp_path / "hf_zeropp/_libs"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(CPU, folder)
    shutil.copy(CPU, library_folder / "libzeropp_cpu.evil.so")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert native.library_path("cpu") is None
    shutil.copy(CPU, library_folder)
    assert native.library_path("cpu") == str(library_folder / Path(CPU).name)


@needs_cpu_library
def test_a_link_out_of_the_package_is_not_loaded(library_folder, tmp_path):
    shutil.copy(CPU, tmp_path / "elsewhere.so")
    (library_folder / Path(CPU).name).symlink_to(tmp_path / "elsewhere.so")
    library, reason = native.cpu_library()
    assert library is None and "leads out of the package's folder" in reason


@needs_cpu_library
def test_a_package_that_an_installer_linked_as_a_whole_loads(library_folder, tmp_path, monkeypatch):
    store = tmp_path / "store/hf_zeropp"
    (store / "_libs").mkdir(parents=True)
    shutil.copy(CPU, store / "_libs")
    (store / "__init__.py").touch()
    (library_folder / Path(CPU).name).symlink_to(store / "_libs" / Path(CPU).name)
    (library_folder.parent / "__init__.py").symlink_to(store / "__init__.py")
    monkeypatch.setattr(hf_zeropp, "__file__", str(library_folder.parent / "__init__.py"))
    assert native.cpu_library()[1] is None


DECIDE = """
#include "cuda/devices.h"
extern "C" int fit_of(const int* architectures, int count, int ptx, int toolkit, int device, int driver) {
  return static_cast<int>(zeropp::fit_of({architectures, count, ptx, toolkit}, device, driver));
}
"""
RUNS, DRIVER_TOO_OLD, NO_CODE = range(3)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_devices_that_run_the_code_of_a_library(tmp_path: Path):
    """CUDA's rules for machine code, for PTX and for drivers, as ops/cuda/devices.h states them."""
    source, library = tmp_path / "decide.cpp", tmp_path / "decide.so"
    source.write_text(DECIDE)
    include = f"-I{Path(__file__).parents[2] / 'ops'}"
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", include, str(source), "-o", str(library)], check=True)
    decide = ctypes.CDLL(str(library)).fit_of

    def fit(device: int, driver: int = 13000, built: tuple[int, ...] = (800, 900, 1000, 1200), ptx: int = 1200) -> int:
        return decide((ctypes.c_int * len(built))(*built), len(built), ptx, 13000, device, driver)

    # Machine code runs on its own and on later minor versions of its major version, with any driver that starts at all.
    assert [fit(device) for device in (800, 860, 890, 900, 1000, 1030, 1200, 1210)] == [RUNS] * 8
    assert fit(860, built=(890,)) == NO_CODE
    assert fit(900, driver=12020) == RUNS
    # Older devices than all, and one between two major versions that has neither machine code nor PTX of an older one.
    assert [fit(device) for device in (700, 750, 1100)] == [NO_CODE] * 3
    # The driver makes machine code from PTX for newer devices, if it is not older than the toolkit.
    assert [fit(1300), fit(1300, driver=14000), fit(1300, driver=12090)] == [RUNS, RUNS, DRIVER_TOO_OLD]
    assert fit(1100, built=(800, 900), ptx=900) == RUNS
    assert fit(1300, ptx=0) == NO_CODE
    assert fit(860, driver=12090, built=(890,), ptx=800) == DRIVER_TOO_OLD


@needs_library
@without_gpu
def test_errors_of_cuda_come_back_as_exceptions_with_their_text():
    """A launch without a device: the library returns, and the process lives to say so."""
    kernels = ops.CompiledKernels(native.load(native.library_path("cuda"))[0], "cuda")
    layout = WireLayout([Segment(64, 8)], 64)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"zeropp_quantize_cuda: CUDA error \d+, \w+"):
        kernels.run(OPERATORS["quantize"], [torch.zeros(64), layout, 1], (1,), [out])


@needs_cpu_library
def test_a_library_of_older_sources_is_found_out():
    operator = dataclasses.replace(OPERATORS["quantize"], name="quantize_5bit")
    kernels = ops.CompiledKernels(native.cpu_library()[0], "baseline")
    with pytest.raises(RuntimeError, match="the compiled library has no zeropp_quantize_5bit_baseline: reinstall"):
        kernels.run(operator, [torch.zeros(64), WireLayout([Segment(64, 8)], 64), 1], (1,), [torch.zeros(1)])


@needs_cpu_library
def test_equal_layouts_are_copied_to_a_device_once():
    kernels = ops.CompiledKernels(native.cpu_library()[0], "baseline")
    layouts = [WireLayout([Segment(64, 8)], 64) for _ in range(2)]
    assert len({kernels._layout(layout, torch.device("cpu")) for layout in layouts}) == 1


@needs_cpu_library
def test_threads_that_meet_a_layout_at_once_get_one_copy(monkeypatch):
    """The copy that one thread replaced would be freed while a kernel of the other thread still reads it."""
    kernels = ops.CompiledKernels(native.cpu_library()[0], "baseline")
    layout, device = WireLayout([Segment(64, 8)], 64), torch.device("cpu")
    table, both, addresses = WireLayout.table, threading.Barrier(2), []

    def table_of_both(*arguments):
        both.wait(timeout=60)
        return table(*arguments)

    monkeypatch.setattr(WireLayout, "table", table_of_both)
    threads = [threading.Thread(target=lambda: addresses.append(kernels._layout(layout, device))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(addresses) == 2 and len(set(addresses)) == 1
