"""Whether a call of an operator may pass PyTorch's dispatcher by, and run its kernel at once.

The dispatcher serves what can stand between a call and its kernel: ``torch.compile``, which records the call; fake tensors and
other dispatch modes, which replace it; the profiler, which times it; autograd. In a training step none of them is there, and the
dispatcher costs as much as the rest of the call: layouts become text and layouts again, and every argument is boxed twice. The
gather and the reduction of a unit make six such calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def runs_directly(arguments: Iterable[Any], outs: Iterable[torch.Tensor]) -> bool:
    """Return whether nothing stands between a call that fills ``outs`` and its kernel."""
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
