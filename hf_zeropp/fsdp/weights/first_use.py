"""An action that runs once, before the first forward pass of a model or of any part of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from hf_zeropp.fsdp.sharded_models import without_compile_wrapper

_FIRST_USES = "_zeropp_first_uses"
"""The attribute of a module that holds what waits for the first use of the models it is in."""

_num_running = 0  # actions under way


def is_running() -> bool:
    """Return whether the caller runs inside of such an action."""
    return _num_running > 0


def on_first_use(model: nn.Module, action: Callable[[], object]) -> None:
    """Run ``action`` once, before the first forward of the model or of any of its submodules."""
    members = weakref.WeakSet(model.modules())

    def run() -> None:
        global _num_running
        _num_running += 1
        try:
            action()
        finally:
            _num_running -= 1

    # The action refers to the model. So the modules hold it, and the hook below, which outlives a model that is never
    # used, holds it weakly. It lives as long as any module of the model: a rank must not lose it when its garbage
    # collector happens to run, because it is collective.
    for module in members:
        vars(module).setdefault(_FIRST_USES, []).append(run)
    waiting = weakref.ref(run)
    del run

    # A global pre-hook runs ahead of FSDP2's own, and it also sees calls that bypass the root, such as ``generate`` on a
    # PEFT model.
    def before_forward(module: nn.Module, args: Any) -> None:
        first_use = waiting()
        if first_use is None:  # the model is gone, and was never used
            handle.remove()
        elif without_compile_wrapper(module) in members:
            handle.remove()
            for member in members:
                vars(member)[_FIRST_USES].remove(first_use)
            first_use()

    handle = nn.modules.module.register_module_forward_pre_hook(before_forward)
