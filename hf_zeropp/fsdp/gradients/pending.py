"""Gradients that are not complete yet, and that complete themselves when they are looked at.

FSDP2 adds what a reduction returns to ``param.grad`` at once. Ours has nothing to return yet in two cases: on a micro-step that
is not the last, whose sums wait within the node for the others, and while a reduction overlaps with the rest of the backward
pass. FSDP2 then receives zeros. Zeros look like gradients: code that reads, clips, scales or zeroes them before the true value
arrives would work with wrong numbers, and nothing would tell.

So ``param.grad`` says what it is. Its local tensor is replaced by a `PendingGradient`, a tensor that holds no numbers:

- an operation on it first delivers all pending gradients of the model (the hop across nodes, on all ranks, like any collective
  that a DTensor runs), and then runs on the true values;
- zeroing it drops what is pending, since that is what zeroing a gradient means;
- a gradient that is set to None, or replaced, takes its pending part with it: a contribution belongs to the tensor object
  that it was added to, and to nothing else.

PyTorch's AsyncCollectiveTensor, which waits for its collective when it is first used, is the same idea.

FSDP2 must see plain tensors while it adds to them, so `PendingGradients` takes the wrappers off before FSDP2's
``post_backward`` and puts them back after it.

Between micro-steps the zeros themselves are worth nothing, and would take 4 bytes for each element of the shard. So a wrapper
lets go of a tensor that holds nothing but zeros, and FSDP2 finds None in ``.grad`` and puts its next output there. The gradient
itself stays the same object, in which the wrapper then stands for the new tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_zeropp.fsdp.units import Unit, local_tensor_of, set_local_tensor

# ``zero_grad(set_to_none=False)`` runs the second for all gradients at once, unless ``foreach`` is switched off.
_ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class PendingGradient(torch.Tensor):
    """Stands for the local tensor of a gradient that is not complete.

    Attributes:
        complete: delivers what is pending, for all parameters of the model.
        drop: forgets what is pending for it, which it is called with.
        is_orphan: whether the parameter has let go of it, so that nothing will complete it.
        is_zeros: whether ``plain`` is known to hold nothing but zeros.
    """

    @staticmethod
    def __new__(cls, plain: torch.Tensor, *_: Any) -> PendingGradient:
        """Make a tensor with the metadata of ``plain`` and no storage."""
        # Without storage, an operation that slips past the dispatch below cannot read zeros in place of the gradient.
        return torch.Tensor._make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            layout=plain.layout,
            device=plain.device,
        )

    def __init__(
        self, plain: torch.Tensor, complete: Callable[[], None], drop: Callable[[PendingGradient], None]
    ) -> None:
        self._plain: torch.Tensor | None = plain
        self.complete = complete
        self.drop = drop
        self.is_orphan = False
        self.is_zeros = False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe it without completing it: a debugger must not start collectives."""
        return f"PendingGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def plain(self) -> torch.Tensor:
        """The tensor that FSDP2 adds to, without what is pending."""
        if self._plain is None:
            with torch.inference_mode(False):  # a look may come in that mode, and training adds to the gradient
                empty = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=self.device)
                self._plain = empty.zero_()
        return self._plain

    @plain.setter
    def plain(self, plain: torch.Tensor) -> None:
        self._plain = plain

    @property
    def is_empty(self) -> bool:
        """Whether no memory is held. ``plain`` makes zeros when it is asked for."""
        return self._plain is None

    def empty(self) -> None:
        """Let go of zeros."""
        if self.is_zeros:
            self._plain = None

    # The work is done in ``__torch_dispatch__``, which also sees what DTensor and the optimizers' foreach loops run
    # inside. The default ``__torch_function__`` would turn results into pending gradients again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it for callers, without defaults
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Complete every pending gradient among the arguments, or drop it if it is zeroed; then run on plain tensors."""
        # ``torch._foreach_*`` operations take lists of gradients, so arguments are looked through as trees.
        leaves = pytree.tree_leaves((args, kwargs or {}))
        pending = [leaf for leaf in leaves if isinstance(leaf, PendingGradient)]
        for gradient in pending:
            if func in _ZEROING:
                gradient.drop(gradient)
            else:
                gradient.complete()
                if gradient.is_orphan:
                    raise RuntimeError(
                        "A gradient is used that was taken from a parameter while it was pending: setting `param.grad` to None, "
                        "or replacing it, has dropped what was still to be added. Use gradients before they are cleared."
                    )
        # Results were added to ``plain`` in place, so it holds the true values by now. The wrapper itself may be off
        # ``.grad`` already, while the caller still holds it.
        plain_args, plain_kwargs = pytree.tree_map_only(PendingGradient, lambda one: one.plain, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


class PendingGradients:
    """The gradients of one unit that wait for a reduction to end, by parameter.

    Args:
        unit: the unit.
        complete: delivers everything that is pending in the model.
    """

    def __init__(self, unit: Unit, complete: Callable[[], None]) -> None:
        self._unit = unit
        self._complete = complete
        # A tensor's hash is its identity, and no operator is run on parameters to find them here.
        self._waiting: dict[DTensor, PendingGradient] = {}
        self._is_held = False
        self._aside: dict[DTensor, DTensor] = {}  # gradients without memory, while FSDP2 finds None in their place
        self._new: set[DTensor] = set()  # the parameters for which FSDP2 finds None, and puts zeros there

    def make_way(self, reduced: Callable[[], Iterable[DTensor]]) -> None:
        """Let FSDP2 find plain tensors, or None, in ``.grad``.

        Args:
            reduced: returns the parameters to whose gradients it is about to add its output.
        """
        self._new.clear()
        if not self._is_held:  # nearly always on accelerators, and nothing is asked
            return
        self._forget_orphans()
        with_output = frozenset(reduced())
        for param, waiting in self._waiting.items():
            grad = param.grad
            assert isinstance(grad, DTensor)
            if waiting.is_empty and param in with_output:
                self._aside[param] = grad
                param.grad = None
            else:
                set_local_tensor(grad, waiting.plain)
        self._is_held = False

    def expect_zeros(self, reduced: Iterable[DTensor]) -> None:
        """FSDP2 is about to add zeros to the gradients of these parameters."""
        self._new = {param for param in reduced if param.grad is None}

    def expect_values(self) -> None:
        """FSDP2 is about to add more than zeros."""
        for waiting in self._waiting.values():
            waiting.is_zeros = False

    def hold(self) -> None:
        """Put a `PendingGradient` in the place of every gradient of the unit. Something is pending for each of them."""
        self._take_back()
        for param in self._unit.params:
            grad = param.grad
            if not isinstance(grad, DTensor):
                continue
            plain = local_tensor_of(grad)
            if isinstance(plain, PendingGradient):
                continue
            waiting = self._waiting.get(param)
            # A wrapper is made once for each tensor that FSDP2 adds to, and put back after every micro-step. Its
            # identity is how a gradient that was replaced is told from one that stayed.
            if waiting is None or waiting.plain is not plain:
                waiting = PendingGradient(plain, self._complete, functools.partial(self._drop, param))
                self._waiting[param] = waiting
            waiting.is_zeros = waiting.is_zeros or param in self._new
            set_local_tensor(grad, waiting)
        self._is_held = True
        self._new.clear()

    def empty(self) -> None:
        """Let go of the memory of gradients that hold nothing but zeros. The sums they wait for are in a partial."""
        if self._is_held:
            for waiting in self._waiting.values():
                waiting.empty()

    def release(self) -> None:
        """Take the wrappers off, and forget the parameters whose gradients were zeroed, set to None or replaced."""
        self._take_back()
        self._new.clear()  # results are about to be added
        self._forget_orphans()
        if self._is_held:
            for param, waiting in self._waiting.items():
                assert isinstance(param.grad, DTensor)
                set_local_tensor(param.grad, waiting.plain)
                waiting.is_zeros = False  # user code may write to it now
        self._is_held = False

    def clear(self) -> None:
        """Nothing is pending any more: leave plain tensors in ``.grad``."""
        if not self.is_clear:
            self.release()
            self._waiting.clear()

    @property
    def is_clear(self) -> bool:
        """Whether no gradient waits, or waited and is to be given back."""
        return not (self._waiting or self._is_held or self._aside)

    def plain_of(self, param: DTensor) -> torch.Tensor:
        """Return the tensor to which the result for ``param`` is added. Only where ``waits(param)``."""
        waiting = self._waiting[param]
        waiting.is_zeros = False
        return waiting.plain

    def waits(self, param: DTensor) -> bool:
        """Return whether what is pending for ``param`` is still wanted."""
        if param in self._aside:
            return True
        waiting = self._waiting.get(param)
        if waiting is None or not isinstance(param.grad, DTensor):
            return False
        return local_tensor_of(param.grad) is (waiting if self._is_held else waiting.plain)

    def _forget_orphans(self) -> None:
        if not self._is_held:
            return
        for param, waiting in list(self._waiting.items()):
            # User code may have zeroed, cleared or replaced the gradient since ``hold``. A contribution to the old one
            # must not reach the new one, so it is forgotten with its wrapper.
            if not self.waits(param):
                waiting.is_orphan = True
                del self._waiting[param]

    def _take_back(self) -> None:
        """Put the gradients that were set aside back, with what FSDP2 put in their place."""
        for param, grad in self._aside.items():
            waiting = self._waiting[param]
            if isinstance(param.grad, DTensor):
                waiting.plain = local_tensor_of(param.grad)
            set_local_tensor(grad, waiting.plain)
            param.grad = grad
        self._aside.clear()

    def _drop(self, param: DTensor, waiting: PendingGradient) -> None:
        # Another gradient may wait by now, in the place of one that was taken from the parameter and is zeroed here.
        if self._waiting.get(param) is waiting:
            # ``waits`` is False for the parameter from here on, and the reduction leaves its part out.
            del self._waiting[param]
            if isinstance(param.grad, DTensor) and local_tensor_of(param.grad) is waiting:
                set_local_tensor(param.grad, waiting.plain)  # which the operation that called this then zeroes


def renew_gradients(params: Iterable[torch.Tensor]) -> None:
    """Put a new DTensor around the local tensor of every complete gradient, for a compiled optimizer step.

    PyTorch's compiler cannot trace a DTensor whose local tensor was replaced, as it is while a gradient is pending.
    """
    for param in params:
        grad = param.grad
        if isinstance(grad, DTensor):
            # A reference to the old one sees the same memory.
            shape, stride = grad.shape, grad.stride()
            local = local_tensor_of(grad)
            param.grad = DTensor.from_local(local, grad.device_mesh, grad.placements, shape=shape, stride=stride)
