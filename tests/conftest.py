import os
import sys

import pytest
import torch

# Test modules import helpers by name, and so do the ranks that helpers/harness.py starts.
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "helpers"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def restore_kernels():
    """For tests that set kernels."""
    from hf_zeropp import ops

    name = ops.kernel_info().cpu
    yield
    ops.set_kernels(name)
