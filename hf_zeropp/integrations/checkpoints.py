"""Checkpoints of Accelerate (``save_state``) and of the Trainer: error feedback goes with the optimizer's states.

Both write and read an FSDP optimizer with one function of Accelerate's each, which is told the folder and the model; the Trainer
has no other moment at which a folder to resume from is known to others. We wrap the two names where both look them up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import accelerate.accelerator
import transformers.trainer

SAVE, LOAD = "save_fsdp_optimizer", "load_fsdp_optimizer"
PLACES: tuple[ModuleType, ...] = (accelerate.accelerator, transformers.trainer)


def watch_checkpoints() -> None:
    """From now on a model's handle saves and loads its state with its optimizer's. Once per process."""
    for place in PLACES:
        _follow(place, SAVE, lambda handle, folder, index: handle.save_state(folder, index))
        _follow(place, LOAD, lambda handle, folder, index: handle.load_state(folder, index))


def _follow(place: ModuleType, name: str, action: Callable[..., None]) -> None:
    """Let ``action`` come after the function ``name`` of ``place``."""
    original = getattr(place, name)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def followed(
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        folder: Any,
        optimizer_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = original(fsdp_plugin, accelerator, optimizer, model, folder, optimizer_index, *args, **kwargs)
        handle_of = getattr(fsdp_plugin, "handle_of", None)
        if handle_of is not None and (handle := handle_of(model)) is not None:
            action(handle, folder, optimizer_index)
        return result

    setattr(place, name, followed)
