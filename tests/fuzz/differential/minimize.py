"""A failing program made short: fewer operations, smaller models, fewer ranks, plainer arguments."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from differential.cases import OPERATIONS, Case, ModelSpec, Operation, OptimizerSpec, differing


def minimize(case: Case, fails: Callable[[Case], bool], limit_s: float) -> Case:
    """The smallest case found within ``limit_s`` seconds that still fails.

    Args:
        fails: whether a case shows the failure that is looked into, and no other.
    """
    deadline = time.monotonic() + limit_s
    case = _fewer_operations(case, fails, deadline)
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for smaller in _simpler(case):
            if time.monotonic() > deadline:
                break
            if fails(smaller):
                case, progress = smaller, True
                break
    return _fewer_operations(case, fails, deadline)


def _fewer_operations(case: Case, fails: Callable[[Case], bool], deadline: float) -> Case:
    """Leave out runs of operations: halves first, single ones last."""
    size = max(1, len(case.operations) // 2)
    while size >= 1:
        start = 0
        while start < len(case.operations):
            if time.monotonic() > deadline:
                return case
            operations = case.operations[:start] + case.operations[start + size :]
            shorter = dataclasses.replace(case, operations=operations)
            if operations and fails(shorter):
                case = shorter
            else:
                start += size
        size //= 2
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one thing, the largest savings first."""
    yield from _smaller_worlds(case)
    if len(case.models) > 1:
        yield from (dataclasses.replace(case, models=(model,), joined=False) for model in case.models)
    if case.joined:
        yield dataclasses.replace(case, joined=False)
    for key, _ in case.settings:
        yield dataclasses.replace(case, settings=tuple(pair for pair in case.settings if pair[0] != key))
    if case.optimizers != (OptimizerSpec(),):
        yield dataclasses.replace(case, optimizers=(OptimizerSpec(),))
    if len(case.optimizers) > 1:
        yield from (dataclasses.replace(case, optimizers=(optimizer,)) for optimizer in case.optimizers)
    for index, model in enumerate(case.models):
        for simpler in _simpler_models(model):
            yield dataclasses.replace(case, models=_with(case.models, index, simpler))
    for index, operation in enumerate(case.operations):
        for plainer in _plainer(operation):
            yield dataclasses.replace(case, operations=_with(case.operations, index, plainer))


def _smaller_worlds(case: Case) -> Iterator[Case]:
    if case.mesh:
        yield dataclasses.replace(case, mesh="", groups=1)
    for world, ranks_per_node in ((2, 1), (3, 1), (4, 2)):
        if world < case.world or (world == case.world and ranks_per_node < case.ranks_per_node):
            settings = tuple(pair for pair in case.settings if pair[0] != "hpz_size" or pair[1] in ("node", None))
            yield dataclasses.replace(case, world=world, ranks_per_node=ranks_per_node, settings=settings)


def _simpler_models(model: ModelSpec) -> Iterator[ModelSpec]:
    for index in range(len(model.blocks) - (model.ends == "none")):
        yield dataclasses.replace(model, blocks=model.blocks[:index] + model.blocks[index + 1 :])
    for field in differing(model):
        yield dataclasses.replace(model, **{field.name: field.default})
    for index, block in enumerate(model.blocks):
        for field in differing(block):
            plainer = dataclasses.replace(block, **{field.name: field.default})
            yield dataclasses.replace(model, blocks=_with(model.blocks, index, plainer))


def _plainer(operation: Operation) -> Iterator[Operation]:
    for key, _ in operation.args:
        yield Operation(operation.name, tuple(pair for pair in operation.args if pair[0] != key))
    for key, value in operation.args:
        if type(OPERATIONS[operation.name][key]) is int and type(value) is int and value > 1:
            args = {**dict(operation.args), key: 1}
            yield Operation.of(operation.name, **args)


def _with(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
