"""The optimizers of the fuzz: torch's own, and those that write weights behind every counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from differential.cases import OptimizerSpec
from differential.extension import local

# AdamW divides by sqrt(v) + eps: with a large eps, gradients that differ by rounding give updates that differ by little.
_ADAMW: dict[str, Any] = {"lr": 0.03, "eps": 1e-2, "weight_decay": 0.01}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.2, foreach=False),
    "sgd_foreach": lambda params: torch.optim.SGD(params, lr=0.2, foreach=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False, **_ADAMW),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, foreach=True, **_ADAMW),
    "adamw_fused": lambda params: torch.optim.AdamW(params, fused=True, **_ADAMW),
    "writes_data": lambda params: WritesData(params),
    "writes_memory": lambda params: WritesPointers(params),
}
_PARTS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}


def make_optimizer(spec: OptimizerSpec, groups: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
    """Make an optimizer with these groups of parameters, or with its part of each."""
    return KINDS[spec.kind]([{"params": params[_PARTS[spec.part]] or params} for params in groups])


class WritesData(torch.optim.Optimizer):
    """Writes through ``.data``, as many published optimizers do: no version counter moves."""

    def __init__(self, params: Any, lr: float = 0.2) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group["lr"])
        return loss

    def update(self, param: torch.Tensor, lr: float) -> None:
        param.data.add_(param.grad, alpha=-lr)


class WritesPointers(WritesData):
    """Writes into the storage from outside of torch, as fused kernels that are called through ctypes do."""

    def update(self, param: torch.Tensor, lr: float) -> None:
        memory, grad = (local(tensor).numpy() for tensor in (param, param.grad))
        np.subtract(memory, lr * grad, out=memory)


class RaisesHalfway(torch.optim.Optimizer):
    """Updates the first half of each group of its parameters in one ``foreach`` call, then raises."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.2})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            half = params[: (len(params) + 1) // 2]
            if half:
                torch._foreach_add_(half, [param.grad for param in half], alpha=-group["lr"])
        raise ArithmeticError("an optimizer that fails halfway")
