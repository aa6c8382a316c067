"""Which CPU kernels run: by default, by request, and without the compiled library."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
from op_cases import COMPILED

from hf_zeropp import ops
from hf_zeropp.ops import native
from hf_zeropp.ops.kernels import _choose_at_import

pytestmark = [pytest.mark.usefixtures("restore_kernels"), pytest.mark.one_rank]


@pytest.mark.parametrize("name", ["reference", *COMPILED])
def test_environment_forces_kernels(name, recwarn):
    _choose_at_import({"ZEROPP_KERNELS": name})
    assert ops.kernel_info().cpu == name and not recwarn


def test_environment_is_read_at_import():
    code = "import warnings; warnings.simplefilter('error'); from hf_zeropp import ops; print(ops.kernel_info().cpu)"
    name = (COMPILED or ["reference"])[-1]
    environment = {**os.environ, "ZEROPP_KERNELS": name}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == name, run.stderr


def test_without_library_the_reference_runs_with_one_warning(monkeypatch):
    monkeypatch.setattr(native, "library_path", lambda device_type: None)
    native.cpu_library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="ZEROPP_KERNELS=avx2.*compiler.*available here: reference"):
            ops.set_kernels("avx2")
        with pytest.warns(UserWarning, match="C\\+\\+ compiler") as caught:
            _choose_at_import({})
        assert len(caught) == 1 and ops.kernel_info().cpu == "reference" and ops.kernel_info().library is None
        monkeypatch.setenv("LOCAL_RANK", "1")  # one rank of a machine warns for all
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _choose_at_import({})
    finally:
        monkeypatch.undo()
        native.cpu_library.cache_clear()
