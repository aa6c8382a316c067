"""Checkpoints of Accelerate (``save_state``) and of the Trainer: a model's handle is told of them.

A resumed run is exact only if the run that saved goes on with whole weights too (``ZeroPPHandle.save_state``). Accelerate and the
Trainer have no common hook for it. But both write and read an FSDP optimizer with one function of Accelerate's, whose arguments
include the model. Each of the two modules imported that function under its own name, so it is replaced in each of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import accelerate.utils

from hf_zeropp.compat.extend import extend


def patch_checkpoints(module: ModuleType) -> None:
    """Tell a model's handle whenever ``module`` saves or loads its optimizer. Repeated calls change nothing.

    Args:
        module: ``accelerate.accelerator`` or ``transformers.trainer``.
    """
    _call_after(module, "save_fsdp_optimizer", "save_state")
    _call_after(module, "load_fsdp_optimizer", "invalidate")


def _call_after(module: ModuleType, name: str, method: str) -> None:
    """Call the handle's ``method`` after the function ``name`` of ``module``."""
    # Accelerate's own, because another library may have replaced the module's by a function with other parameter names.
    signature = inspect.signature(getattr(accelerate.utils, name))

    def follow(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The original comes first, because it may raise.
        result = original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        # Only a ZeroPPPlugin has ``handle_of``. It applies ZeRO++ to a model that had no forward yet, as in a resumed
        # run.
        handle_of = getattr(call.arguments["fsdp_plugin"], "handle_of", None)
        handle = handle_of and handle_of(call.arguments["model"])
        if handle is not None:
            getattr(handle, method)()
        return result

    extend(module, name, follow)
