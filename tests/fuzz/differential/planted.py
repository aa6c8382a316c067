"""Bugs put into our side on purpose: the fuzz must find each, or its silence would prove nothing.

They use what FSDP2 and torch offer in public, so that they stay where they are when the package changes inside.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from differential.sharded_sides import Ours
from differential.sides import Observation


class ScaledGradients(Ours):
    """All gradients are off by one percent."""

    def _backward(self, loss: torch.Tensor, times: int = 1) -> None:
        super()._backward(loss, times)
        for param in self.params.values():
            if param.grad is not None:
                param.grad.mul_(1.01)


class OneShardIsNotUpdated(Ours):
    """The optimizer's update does not last on rank 0. It is undone behind every counter."""

    def step(self, optimizer: int) -> Observation:
        before = {name: self._rows(name, param).clone() for name, param in self.params.items()}
        super().step(optimizer)
        if self.rank == 0:
            for name, param in self.params.items():
                np.copyto(self._rows(name, param).numpy(), before[name].numpy())
        return {**self.gradients(), **self.weights()}


class NormIsOff(Ours):
    """The total norm, and with it what clipping does, is off by a thousandth."""

    def clip(self, norm: float, foreach: bool | None) -> Observation:
        seen = super().clip(norm, foreach)
        return seen | {"norm": seen["norm"] * 1.001}


class Hangs(Ours):
    """Rank 0 waits for a message that is never sent."""

    def read_grads(self) -> Observation:
        if self.rank == 0:
            dist.recv(torch.empty(1), src=1)
        return super().read_grads()


class RaisesOnOneRank(Ours):
    def read_grads(self) -> Observation:
        if self.rank == 1:
            raise ArithmeticError("planted")
        return super().read_grads()


class DiesOnOneRank(Ours):
    def read_grads(self) -> Observation:
        if self.rank == 1:
            os._exit(7)
        return super().read_grads()


class NoErrorWhereOneIsDue(Ours):
    """Ranks that skip different layers train on as if nothing were wrong."""

    def train_apart(self, data: int, model: int, rank: int, block: int, other: int | None) -> Observation:
        return self.train(data, model % len(self.nets), None, 1, 1, False)


class StaleGather(Ours):
    """Every third gather of a unit gives what the first one gave."""

    def __init__(self, *args: Any) -> None:
        install = FSDPModule.set_custom_all_gather
        with mock.patch.object(
            FSDPModule, "set_custom_all_gather", lambda module, comm: install(module, _StaleAllGather(comm))
        ):
            super().__init__(*args)


class _StaleAllGather(AllGather):
    def __init__(self, inner: AllGather) -> None:
        self._inner = inner
        self._num_calls = 0

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        work = self._inner(output_tensor, input_tensor, group, async_op)
        if work is not None:
            work.wait()
        if self._num_calls == 0:
            self._first = output_tensor.clone()
        elif self._num_calls % 3 == 0 and output_tensor.shape == self._first.shape:
            output_tensor.copy_(self._first)
        self._num_calls += 1


PLANTS: dict[str, type[Ours]] = {plant.__name__: plant for plant in Ours.__subclasses__()}
