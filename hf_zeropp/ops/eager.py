"""Whether a call of an operator has to go through PyTorch's dispatcher.

The dispatcher exists for those who stand between a call and its kernel: ``torch.compile``, which writes the call down; fake
tensors and other dispatch modes, which take its place; the profiler, which times it; autograd. In a training step nobody stands
there. The way through the dispatcher then ends where it began, and costs as much as the rest of the call: layouts become text and
layouts again, and every argument is boxed twice. Six such calls make the gather and the reduction of a unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def runs_directly(arguments: Iterable[Any], outs: Iterable[torch.Tensor]) -> bool:
    """Return whether nobody has to see a call that fills ``outs``, so that its kernel may be called at once."""
    # This comes first, since ``torch.compile`` traces this function too, and ends here: it knows the answer.
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return False
    if torch.autograd._profiler_enabled():
        return False
    return all(_is_plain(value) for value in (*arguments, *outs) if isinstance(value, torch.Tensor))


def _is_plain(tensor: torch.Tensor) -> bool:
    # A subclass may be fake, or a wrapper around something else. Autograd warns where an operator has no derivative. Meta tensors
    # have no memory, and that of a negative view holds other numbers than its elements.
    has_own_way = tensor.requires_grad or tensor.is_meta or tensor.is_neg()
    return type(tensor) is torch.Tensor and not has_own_way
