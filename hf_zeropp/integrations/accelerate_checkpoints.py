"""Checkpoints of Accelerate (``save_state``) and of the Trainer: error feedback goes with the optimizer's states.

Both write and read an FSDP optimizer with one function of Accelerate's each, which is told the folder and the model; the Trainer
has no other moment at which a folder to resume from is known to others. We wrap the names where each of the two looks them up.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import accelerate.utils

SAVE, LOAD = "save_fsdp_optimizer", "load_fsdp_optimizer"
_MARK = "_zeropp_follows"


def watch_checkpoints(place: ModuleType) -> None:
    """From now on models that ``place`` saves and loads take their handle's state along. Once per module."""
    _follow(place, SAVE, "save_state", "output_dir")
    _follow(place, LOAD, "load_state", "input_dir")


def _follow(place: ModuleType, name: str, method: str, folder: str) -> None:
    """Let the handle's ``method`` come after the function ``name`` of ``place``, whose argument ``folder`` says where."""
    original = getattr(place, name)
    if hasattr(original, _MARK):
        return
    signature = inspect.signature(getattr(accelerate.utils, name))  # whoever else has wrapped it, with whatever names

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        handle_of = getattr(call.arguments["fsdp_plugin"], "handle_of", None)
        handle = handle_of and handle_of(call.arguments["model"])
        if handle is not None:
            getattr(handle, method)(call.arguments[folder], call.arguments["optimizer_index"])
        return result

    setattr(followed, _MARK, True)
    setattr(place, name, followed)
