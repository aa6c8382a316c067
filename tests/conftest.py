import importlib.util
import os
import sys

import pytest
import torch

# Test modules import helpers by name, and so do the ranks that helpers/harness.py starts.
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "helpers"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `vllm` are skipped where there is none, those marked `long` unless they are asked for, and say so."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("vllm") and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="no vLLM: `bash scripts/test_vllm.sh` installs it and runs these"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("long") and "long" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="long: run it with `-m long`"))


@pytest.fixture
def restore_kernels():
    """For tests that set kernels."""
    from hf_zeropp import ops

    name = ops.kernel_info().cpu
    yield
    ops.set_kernels(name)
