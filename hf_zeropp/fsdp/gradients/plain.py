"""Parameters of a sharded model that are no part of a unit: whether anybody averages their gradients.

An adapter that is added to a sharded model consists of plain tensors, whole on every rank. FSDP2 knows nothing of them, so each
rank would train its own on its own batches, in silence. Transformers averages their gradients for models that it shards at load,
and a script may do it too. So ranks compare what an optimizer is about to use: before its first step with gradients, and no more.

A parameter that differs between ranks already is not a copy, such as a weight of an expert that a script gives to a single rank,
and is let be. One that begins with the same values on all ranks is taken for a copy, whatever it belongs to.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

TOLERANCE = 1e-3
"""Sums and norms that differ by less of the norm are taken for equal: averages may be rounded in another order on each rank."""

NAMED = 3
"""Parameters that an error names."""

Figures = tuple[float, float]
"""Sum and norm of a tensor."""

Pair = tuple[Figures, Figures]
"""The sum and the norm of a parameter, then the sum and the norm of its gradient."""


class PlainParameters:
    """The plain parameters of one model, as its optimizers come to use them.

    Args:
        model: is not kept alive.
        is_any: tells whether something holds on any rank, given what ranks are about to do, in words which they compare.
        tell: returns what all ranks tell, once they have agreed to.
    """

    def __init__(
        self, model: nn.Module, is_any: Callable[[str, bool], bool], tell: Callable[[list[Pair]], list[list[Pair]]]
    ) -> None:
        self._model = weakref.ref(model)
        self._is_any, self._tell = is_any, tell
        self._num_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the plain parameters that an optimizer trains, the first time that it has gradients of them.

        Collective if there are any. A rank that has none meets the others in their question by another one, and all raise.

        Raises:
            ValueError: on all ranks, if each rank has gradients of its own for parameters that are equal.
        """
        # In nearly all steps this loop is all that happens.
        held = (param for group in optimizer.param_groups for param in group["params"])
        plain = [param for param in held if param.requires_grad and not isinstance(param, DTensor)]
        if len(plain) == self._num_known.get(optimizer, 0):
            return
        names = self._names_of(plain)
        own = [(_figures(param), _figures(param.grad)) for param in names]
        # PyTorch makes an optimizer's states by a step with gradients of zeros, before it loads them. NaNs cannot be compared.
        has_gradients = any(gradient != (0, 0) and all(map(math.isfinite, gradient)) for _, gradient in own)
        if own:
            action = (
                f"step an optimizer that trains parameters which are not sharded: {_in_words(list(names.values()))}"
            )
            if not self._is_any(action, has_gradients):
                return
            self._refuse_copies(optimizer, list(names.values()), self._tell(own))
        self._num_known[optimizer] = len(plain)

    def _names_of(self, plain: Sequence[torch.Tensor]) -> dict[nn.Parameter, str]:
        ids, model = set(map(id, plain)), self._model()
        params = () if model is None else model.named_parameters()
        return {param: name for name, param in params if id(param) in ids}

    def _refuse_copies(
        self, optimizer: torch.optim.Optimizer, names: Sequence[str], told: Sequence[Sequence[Pair]]
    ) -> None:
        # All ranks have all figures, and raise alike.
        drifting = []
        for name, of_ranks in zip(names, zip(*told, strict=True), strict=True):
            weights, gradients = zip(*of_ranks, strict=True)
            if _are_equal(weights) and not _are_equal(gradients):
                drifting.append(name)
        if drifting:
            raise ValueError(
                f"{type(optimizer).__name__} is about to train parameters that are not sharded: {_in_words(drifting)}. Each rank "
                "has gradients of its own for them, which nobody averages, so each rank would train another model. Add adapters "
                "and other modules before the model is sharded (before accelerator.prepare or the Trainer, before "
                "fully_shard), or average these gradients over the ranks before the step."
            )


def _in_words(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _figures(tensor: torch.Tensor | None) -> Figures:
    if tensor is None or tensor.is_meta:
        return 0.0, 0.0
    values = tensor.detach().double()
    return values.sum().item(), values.norm().item()


def _are_equal(figures: Sequence[Figures]) -> bool:
    largest = max(norm for _, norm in figures)
    pairs = itertools.combinations(figures, 2)
    return all(abs(a - b) <= TOLERANCE * largest for one, other in pairs for a, b in zip(one, other, strict=True))
