"""Gradients that are not complete yet, and say so when they are used.

FSDP2 adds what a reduction returns to ``param.grad`` at once. Ours has nothing to return yet in two cases: on a micro-step that
is not the last, whose sums wait within the node for the others, and while a reduction overlaps with the rest of the backward
pass. FSDP2 then receives zeros, and zeros look like gradients: code that reads, clips or scales them would work with wrong
numbers, and nothing would tell.

So ``param.grad`` says what it is. Its local tensor is a `PendingGradient`, a tensor without memory:

- an operation on it raises, and names the two ways to a complete gradient. No collective runs, because one rank may look alone;
- zeroing it drops what is pending, since that is what zeroing a gradient means;
- a gradient that is set to None, or replaced, takes its pending part with it: a contribution belongs to the tensor object
  that it was added to, and to nothing else.

An optimizer's step completes gradients before it reads them, on all ranks together (decisions.py).

While FSDP2 adds zeros it finds None in ``.grad``, and what it makes of the zeros is dropped. So a gradient that waits takes no
memory, and a complete one from before keeps its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_zeropp.dtensors import local_tensor_of, set_local_tensor

# ``zero_grad(set_to_none=False)`` runs the second for all gradients at once, unless ``foreach`` is switched off.
_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class PendingGradient(torch.Tensor):
    """Stands for the local tensor of a gradient that is not complete.

    Attributes:
        plain: what is complete of it; None for nothing.
        drop: forgets what is pending for it, which it is called with, and returns the tensor that takes its place.
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, *_: Any) -> PendingGradient:
        """Make a tensor with the metadata of ``like`` and no storage, so that nothing can read numbers from it."""
        return torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, layout=like.layout, device=like.device
        )

    def __init__(
        self, like: torch.Tensor, plain: torch.Tensor | None, drop: Callable[[PendingGradient], torch.Tensor]
    ) -> None:
        self.plain = plain
        self.drop = drop

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    # The work is done in ``__torch_dispatch__``, which also sees what DTensor and the optimizers' foreach loops run inside.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it for callers, without defaults
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Drop what is pending if the gradient is zeroed.

        Raises:
            RuntimeError: it is used in any other way.
        """
        if func not in _ZEROING:
            raise RuntimeError(
                f"{func} uses a gradient that is not complete (rank {dist.get_rank()}): its sums wait within the node for the "
                "last micro-step, or are still being reduced. Before gradients are read, clipped or scaled, let a last one "
                "come (handle.set_last_micro_step(True) before its backward pass), or call handle.deliver() on all ranks. An "
                "optimizer's step does so by itself, before it calls a closure: let the closure's backward pass be a last "
                "micro-step. A gradient that was taken before it was complete stays so: read param.grad anew."
            )
        # ``torch._foreach_zero_`` takes a list of gradients, so arguments are looked through as trees.
        return func(*pytree.tree_map_only(PendingGradient, lambda one: one.drop(one), args), **(kwargs or {}))


class PendingGradients:
    """The gradients of one unit that wait for a reduction to end, by parameter."""

    def __init__(self) -> None:
        # A tensor's hash is its identity, and no operator is run on parameters to find them here.
        self._waiting: dict[DTensor, PendingGradient] = {}
        self._aside: dict[DTensor, torch.Tensor | None] = {}  # while FSDP2 finds None in their places
        self._gets_zeros = False

    def make_way(self, params: Iterable[DTensor], *, for_zeros: bool) -> None:
        """FSDP2 is about to add its output to the gradients of these parameters. ``close`` comes behind that.

        Args:
            params: the parameters.
            for_zeros: whether the output is zeros, for which something else will come.
        """
        self._gets_zeros = for_zeros
        for param in params:
            waiting = self._waiting.get(param) if self.waits(param) else None
            if for_zeros or (waiting is not None and waiting.plain is None):
                self._aside[param], param.grad = param.grad, None
            elif waiting is not None:
                assert isinstance(param.grad, DTensor) and waiting.plain is not None
                set_local_tensor(param.grad, waiting.plain)

    def close(self) -> None:
        """Put placeholders into the gradients for which FSDP2 was given zeros, and back into those that wait still."""
        for param, before in self._aside.items():
            made = param.grad
            if self._gets_zeros:
                self._take_zeros(param, before, made)
            # A hook may have used the gradient already, and dropped it. Or it has stepped, and that completed all that waited.
            elif isinstance(made, DTensor) and param in self._waiting:
                param.grad = before
                self.add(param, local_tensor_of(made))
        self._aside.clear()
        for param, waiting in self._waiting.items():
            if self.waits(param):
                assert isinstance(param.grad, DTensor)
                set_local_tensor(param.grad, waiting)

    def add(self, param: DTensor, result: torch.Tensor) -> None:
        """Add a result to what is complete of a gradient. Only where ``waits(param)``."""
        waiting = self._waiting[param]
        result = result.view(waiting.shape)
        if waiting.plain is None:
            waiting.plain = result.to(waiting.device, waiting.dtype)
            return
        if waiting.device != result.device:
            _wait_for_offloaded_gradients()
        waiting.plain += result.to(waiting.plain)

    def clear(self) -> None:
        """Nothing is pending any more: leave plain tensors in ``.grad``, and None where there is nothing."""
        for param, waiting in self._waiting.items():
            if not self.waits(param):
                continue
            assert isinstance(param.grad, DTensor)
            if waiting.plain is None:
                param.grad = None
            else:
                set_local_tensor(param.grad, waiting.plain)
        self._waiting.clear()

    def waits(self, param: DTensor) -> bool:
        """Return whether something is pending for ``param`` and still wanted: its gradient is the one that was noted."""
        waiting = self._waiting.get(param)
        if waiting is None or not isinstance(param.grad, DTensor):
            return False
        local = local_tensor_of(param.grad)
        return local is waiting or (local is waiting.plain and waiting.plain is not None)

    def _take_zeros(self, param: DTensor, before: torch.Tensor | None, made: torch.Tensor | None) -> None:
        """Drop what FSDP2 made of zeros, but for the DTensor where there was none, and let the gradient wait."""
        if isinstance(made, DTensor) and not isinstance(before, DTensor):
            self._hold(param, made, None)
            return
        param.grad = before
        if isinstance(made, DTensor) and isinstance(before, DTensor):
            if not isinstance(plain := local_tensor_of(before), PendingGradient):
                self._hold(param, before, plain)

    def _hold(self, param: DTensor, grad: DTensor, plain: torch.Tensor | None) -> None:
        waiting = PendingGradient(local_tensor_of(grad), plain, functools.partial(self._drop, param))
        self._waiting[param] = waiting
        set_local_tensor(grad, waiting)

    def _drop(self, param: DTensor, waiting: PendingGradient) -> torch.Tensor:
        plain = waiting.plain
        if plain is None:
            plain = torch.empty_strided(waiting.size(), waiting.stride(), dtype=waiting.dtype, device=waiting.device)
        # Another gradient may wait by now, in the place of one that was taken from the parameter and is zeroed here.
        if self._waiting.get(param) is waiting:
            if self.waits(param):
                assert isinstance(param.grad, DTensor)
                set_local_tensor(param.grad, plain)
            del self._waiting[param]
        return plain


def _wait_for_offloaded_gradients() -> None:
    # FSDP2 copies gradients to the CPU without waiting, and waits for them at the end of the backward pass itself. This
    # happens only with CPU offload, for units that took no part in the last micro-step.
    torch.accelerator.synchronize()
