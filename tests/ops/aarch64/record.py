"""A plugin of pytest: it writes down what the tests of the operators let the compiled baseline kernels compute.

    ZEROPP_RECORD=calls.pickle pytest -p record tests/ops/test_wire.py

``replay.py`` makes the same calls on another processor, and compares every byte.
"""

from __future__ import annotations

import collections
import os
import pickle
from typing import Any

import pytest
import torch

from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.kernels import _DTYPE_CODES, CompiledKernels

MAX_BYTES = 200_000  # of one call
MAX_CALLS = 1500  # of one operator: the tests make some of them thousands of times

_calls: list[tuple[str, list[tuple[str, Any]], list[bytes], list[bytes]]] = []
_counts: collections.Counter[str] = collections.Counter()
_run = CompiledKernels.run


def record(self: CompiledKernels, operator: Any, arguments: Any, counts: Any, outs: Any) -> None:
    """Run a kernel as before, and keep its arguments, and its memory before and after."""
    tensors = [value for value in (*arguments, *outs) if isinstance(value, torch.Tensor)]
    is_wanted = self.name == "baseline" and sum(tensor.nbytes for tensor in tensors) <= MAX_BYTES
    if not is_wanted or _counts[operator.name] >= MAX_CALLS:
        _run(self, operator, arguments, counts, outs)
        return
    _counts[operator.name] += 1
    memory = {tensor.data_ptr(): tensor for tensor in tensors}  # ``out`` may be one of the arguments
    places = {address: index for index, address in enumerate(memory)}
    values: list[tuple[str, Any]] = []
    for argument, value in zip(operator.arguments, arguments, strict=True):
        if isinstance(value, torch.Tensor):
            values.append(("memory", places[value.data_ptr()]))
            values += [("int", _DTYPE_CODES[value.dtype])] if argument.has_dtype_code else []
        elif isinstance(value, WireLayout):
            numbers = (len(value.parts), value.numel, value.nbytes, value.block, _DTYPE_CODES[value.raw_dtype])
            values.append(("layout", (_bytes(value.table(torch.device("cpu"))), numbers)))
        elif value is None or isinstance(value, float):
            values.append(("null" if value is None else "float", value))
        else:
            values.append(("int", _DTYPE_CODES[value] if isinstance(value, torch.dtype) else int(value)))
    values += [("int", count) for count in counts]
    values += [("memory", places[out.data_ptr()]) for out in outs]
    before = [_bytes(tensor) for tensor in memory.values()]
    _run(self, operator, arguments, counts, outs)
    _calls.append((operator.name, values, before, [_bytes(tensor) for tensor in memory.values()]))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# Bytes behind the wire of changed words are arbitrary. One thread leaves the same there on every machine.
torch.set_num_threads(1)
CompiledKernels.run = record  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write all calls down."""
    with open(os.environ["ZEROPP_RECORD"], "wb") as file:
        pickle.dump(_calls, file)
    print(f"\nrecorded: {dict(sorted(_counts.items()))}")
