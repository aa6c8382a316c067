"""In a training step nothing of ours makes the host wait for a GPU: a check of the source, for machines without one.

It knows the ways to wait that have a name. `tests/gpu/test_gpu_training.py` lets CUDA itself look for the others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hf_zeropp"
# Modules in which the host may wait for the device: they run before training begins, compute with numbers of the host alone, or
# compare weights where a user asked for it.
OFF_PATH = {"comm.agreement", "comm.topology", "fsdp.gradients.plain", "fsdp.meshes", "fsdp.questions"}
OFF_PATH |= {"fsdp.weights.frozen_copies", "fsdp.weights.low_rates", "fsdp.weights.secondary_check"}
OPERATORS = ("ops.wire", "ops.kernels", "ops.native", "ops.frozen_format")
# Methods of tensors, streams and events for which the host waits, and conversions of a tensor to a number.
WAITING_METHODS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize", "is_nonzero", "equal", "allclose"}
CONVERSIONS = {"bool", "int", "float"}
# Conversions of what is a number already: module, function.
NUMBERS = {("fsdp.gradients.reduce", "scale_of"), ("fsdp.gradients.param_gradients", "gets_gradient")}
MEANT = {
    # With CPU offload FSDP2 waits for the same copies.
    ("fsdp.gradients.pending", "_wait_for_offloaded_gradients"),
    # With qwz_mode="exact" the host has to know how much to send: once per step, for all units.
    ("comm.two_hop_gather", "exchange_sizes"),
    # It looks at memory of the host once an event says that it is there, and waits where the device is several passes behind.
    ("fsdp.weights.fingerprint", "has_found"),
    # It waits only where there are no streams.
    ("comm.two_hop_gather", "_encode"),
}


def waits(tree: ast.AST, module: str) -> Iterator[str]:
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Module)) or (module, getattr(function, "name", "")) in MEANT:
            continue
        for call in calls_of(function):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            is_conversion = isinstance(call.func, ast.Name) and name in CONVERSIONS and call.args
            if is_conversion and (module, getattr(function, "name", "")) in NUMBERS:
                continue
            if is_conversion or (isinstance(call.func, ast.Attribute) and name in WAITING_METHODS):
                yield f"{module}.py:{call.lineno}: {ast.unparse(call)}"


def calls_of(function: ast.AST) -> Iterator[ast.Call]:
    """Calls in a function, without those in functions within it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef):
            yield from calls_of(node)


def test_the_hot_path_does_not_wait():
    found, num_modules = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        if module in OPERATORS or module.startswith(("comm.", "fsdp.")) and module not in OFF_PATH:
            found += waits(ast.parse(path.read_text()), module)
            num_modules += 1
    assert found == [] and num_modules > 40


@pytest.mark.parametrize(
    "code", ["loss.item()", "x.cpu()", "stream.synchronize()", "torch.cuda.synchronize()", "float(norm)", "x.tolist()"]
)
def test_the_check_can_fail(code):
    assert len(list(waits(ast.parse(f"def step(x):\n    return {code}"), "module"))) == 1
