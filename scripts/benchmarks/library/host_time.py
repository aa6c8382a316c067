"""The time that the host spends in gathers and reductions of FSDP2 units: two sides in one process, on a fake process group.

PyTorch's fake process group stands for all other ranks. Its collectives copy this rank's input into the output, once for each
rank of the group, and return. So the host never waits. What it does in between must be done on a GPU as well, before the
kernels of the unit can start; the collectives and the kernels of this package it only launches there, so their time is kept
apart.

The clock is wrapped around methods of FSDP2, which call the comm objects of either side. What this package does outside of them
(at the beginning of a forward pass, at the end of a backward pass) has names of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_zeropp import apply, apply_zeropp
from hf_zeropp.comm import hop, topology
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.units import DefaultAllGather, DefaultReduceScatter, find_units
from hf_zeropp.fsdp.weights.gather import ZeroPPAllGather
from hf_zeropp.ops.kernels import CompiledKernels

GATHER, REDUCE, AGREEMENT, STEP = "gather", "reduce", "agreement", "step"
GATHER_COMM, REDUCE_COMM = "gather, comm object", "reduce, comm object"

# The parameters of a layer: seven matrices, their biases where a model has them, norms. Thirteen, as in Qwen2.5.
MATRICES, VECTORS = 8, 5
SETTINGS = {
    # On GPUs FSDP2's streams overlap reductions with compute, and this package starts nothing ahead: `overlap` is off.
    "as on GPUs": {"overlap": False, "qwz_intra_bits": None, "qgz_intra_bits": None},
    "as on GPUs, INT8 within nodes": {"overlap": False},
    "as on CPUs": {"overlap": True},
}
"""The sides that are compared with stock FSDP2."""
GATHERS_PER_STEP = 2
_COLLECTIVES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")


class HostClock:
    """Times calls by category. The time of collectives and kernels inside of a call is kept apart.

    A category that is entered inside of itself counts once.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, float, float]] = []
        self._open: set[str] = set()
        self._apart_s = 0.0

    def take(self) -> list[tuple[str, float, float]]:
        """Return (category, seconds, seconds of collectives and kernels in them) of each call since the last ``take``."""
        calls, self._calls = self._calls, []
        return calls

    def timed(self, category: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its calls counted as ``category``."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if category in self._open:
                return function(*args, **kwargs)
            self._open.add(category)
            apart_s, start = self._apart_s, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self._calls.append((category, seconds, self._apart_s - apart_s))
                self._open.discard(category)

        return call

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective, or a kernel, whose time is kept apart in the calls around it."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._apart_s += time.perf_counter() - start

        return call

    def wrap(self, owner: Any, name: str, category: str) -> None:
        """Time a function of a module, class or object from now on."""
        setattr(owner, name, self.timed(category, getattr(owner, name)))

    def wrap_all(self) -> None:
        """Time what both sides have in common, and this package's own work. ``wrap_units`` is for each model."""
        for name in (*_COLLECTIVES, "all_to_all_single"):
            if hasattr(dist, name):
                setattr(dist, name, self.apart(getattr(dist, name)))
        hop._all_gather_buffers = self.apart(hop._all_gather_buffers)
        hop._reduce_scatter_rows = self.apart(hop._reduce_scatter_rows)
        hop._all_gather_rows = self.apart(hop._all_gather_rows)
        CompiledKernels._call = self.apart(CompiledKernels._call)  # type: ignore[method-assign]
        for owner in (DefaultAllGather, ZeroPPAllGather):
            self.wrap(owner, "__call__", GATHER_COMM)
        for owner in (DefaultReduceScatter, ZeroPPReduceScatter):
            self.wrap(owner, "__call__", REDUCE_COMM)
        self.wrap(ZeroPPAllGather, "start", GATHER)
        self.wrap(ZeroPPAllGather, "land", GATHER)  # on streams it follows at once
        self.wrap(Decisions, "_end_backward", REDUCE)
        self.wrap(Decisions, "enter_forward", AGREEMENT)

    def wrap_units(self, model: nn.Module) -> None:
        """Time FSDP2's gathers and reductions of a model. Call it behind ``apply_zeropp``, which wraps methods too."""
        for unit in find_units(model):
            self.wrap(unit._group, "unshard", GATHER)
            self.wrap(unit._group, "post_backward", REDUCE)


class Layer(nn.Module):
    """A unit of 13 parameters whose forward and backward passes cost next to nothing.

    Args:
        num_ranks: ranks in the world: the length of each parameter, so that each rank holds a row of it.
        width: the second dimension of matrices.
    """

    def __init__(self, num_ranks: int, width: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(num_ranks, width) for _ in range(MATRICES))
        self.vectors = nn.ParameterList(torch.randn(num_ranks) for _ in range(VECTORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` plus the sum of all parameters."""
        return x + torch.stack([param.sum() for param in self.parameters()]).sum()


class Side:
    """One model that trains on the fake process group: on FSDP2's own collectives, or on ours.

    Args:
        num_units: layers.
        settings: of ``apply_zeropp``; None for stock FSDP2.
        clock: times it.
        width: the second dimension of matrices.
    """

    def __init__(self, num_units: int, settings: dict[str, Any] | None, clock: HostClock, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(dist.get_world_size(), width) for _ in range(num_units)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in self.model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        if settings is not None:
            apply_zeropp(self.model, settings)
        clock.wrap_units(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self._clock = clock
        self._steps: list[list[tuple[str, float, float]]] = []

    def step(self, *, counts: bool) -> None:
        """Run a step of one micro-step. ``counts`` is whether its times are kept."""
        start = time.perf_counter()
        self.model(torch.zeros(1, requires_grad=True)).backward()
        seconds = time.perf_counter() - start
        self._optimizer.step()
        self._optimizer.zero_grad()
        calls = self._clock.take()
        if counts:
            self._steps.append([*calls, (STEP, seconds, 0.0)])

    def has(self, category: str) -> bool:
        """Return whether a step calls anything of a category."""
        return any(name == category for name, _, _ in self._steps[0])

    def microseconds(self, category: str, *, launched: bool) -> tuple[float, float]:
        """Return the time of one step's calls of a category, in microseconds, as (least, median).

        Each call of a step is compared with the same call of all other steps, and the least and the median are added up over the
        calls: a whole step without interruption is rare on a busy machine.

        Args:
            category: the category.
            launched: whether the time of collectives and kernels counts.
        """
        rows = [
            [seconds - (0.0 if launched else inside) for name, seconds, inside in step if name == category]
            for step in self._steps
        ]
        table = np.array(rows) * 1e6
        return float(table.min(axis=0).sum()), float(np.median(table, axis=0).sum())


def measure(ranks_per_node: int, num_units: int, width: int, steps: int) -> dict[str, Side]:
    """Run steps of stock FSDP2 and of ``SETTINGS`` in turns in a fake world, and return the sides by name. Once in a process.

    Args:
        ranks_per_node: of the emulated nodes.
        num_units: layers.
        width: the second dimension of matrices.
        steps: that count; three more go before them.
    """
    clock = HostClock()
    clock.wrap_all()
    common = {"ranks_per_node": ranks_per_node, "shared_memory": False}
    sides = {"FSDP2": Side(num_units, None, clock, width)}
    for name, settings in SETTINGS.items():
        sides[name] = Side(num_units, common | settings, clock, width)
    gc.disable()  # it would run in one side's calls for what the other has left
    for step in range(steps + 3):
        for side in sides.values():
            side.step(counts=step >= 3)
        gc.collect()
    gc.enable()
    return sides


def figures(side: Side, num_units: int, kind: int) -> dict[str, float]:
    """Return microseconds per unit by what they are of. ``kind`` is 0 for the least and 1 for the median."""

    def per_unit(category: str, *, launched: bool = True, times: int = 1) -> float:
        return side.microseconds(category, launched=launched)[kind] / (num_units * times)

    found = {}
    for part, gather, reduce in (("comm object", GATHER_COMM, REDUCE_COMM), ("whole", GATHER, REDUCE)):
        for launched, suffix in ((True, ""), (False, ", without collectives and kernels")):
            gathers = per_unit(gather, launched=launched, times=GATHERS_PER_STEP)
            reduces = per_unit(reduce, launched=launched)
            rows = {"gather": gathers, "reduce": reduces, "gather and reduce": gathers + reduces}
            found |= {f"{what}, {part}{suffix}": value for what, value in rows.items()}
    found["agreement, and the cross hops that it starts"] = per_unit(AGREEMENT) if side.has(AGREEMENT) else 0.0
    found["forward and backward pass"] = per_unit(STEP)
    return found


@contextlib.contextmanager
def fake_world(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``num_ranks``, of which the others exist only in the fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)

    def new_cpu_group(shard_groups: Any) -> dist.ProcessGroup:
        return dist.new_group(list(shard_groups[0]))

    try:
        # Gloo would wait for the other ranks, and the fake group has no timeout.
        with mock.patch.object(apply, "new_cpu_group", new_cpu_group):
            with mock.patch.object(topology, "world_timeout", lambda: timedelta(minutes=1)):
                yield
    finally:
        dist.destroy_process_group()
