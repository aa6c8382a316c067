"""A ZeroPPCallback among the Trainer's default callbacks, for scripts that pass none (run_clm.py, TRL's sft.py).

``hf_zeropp.run`` puts it among the defaults (``serve_scripts``), which all Trainers built later share. It takes part in a Trainer
whose arguments hold zeropp settings, and in one whose Accelerator got a ZeroPPPlugin from ``hf_zeropp.run``. Where the user
passed a ZeroPPCallback too, this one is removed when the Trainer is used (trainer.py): a callback does not know the others.
"""

from __future__ import annotations

from typing import Any, cast

import torch.nn as nn
import transformers.trainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_zeropp.config import is_enabled
from hf_zeropp.integrations.accelerate import ZeroPPPlugin
from hf_zeropp.integrations.trainer import ZeroPPCallback, entry_of, is_sharded, plugin_in_force


class DefaultCallback(ZeroPPCallback):
    """Part of every Trainer that is built after ``serve_scripts``: see above."""

    def _begin(self) -> None:
        """Leave everything as it is, because most Trainers have nothing to do with ZeRO++."""

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Take part if the arguments, or ``hf_zeropp.run``, ask for ZeRO++."""
        active, wants = plugin_in_force(), _wants_zeropp(args)
        # Accelerate has no plugin for a model that Transformers sharded at load.
        is_sharded_at_load = wants is None and is_enabled() and is_sharded(model)
        # The plugin that stands already has the settings of the environment, or those that a script gave its own
        # Accelerator. The arguments' settings go over both.
        if wants is None and isinstance(active, ZeroPPPlugin):
            self._take_part(args, active)
        elif wants or isinstance(active, ZeroPPPlugin) or is_sharded_at_load:
            super().on_init_end(args, state, control, model=model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Train as a ZeroPPCallback where this one takes part."""
        if self._plugin is not None:
            super().on_train_begin(args, state, control, model=model)


def serve_scripts(settings: Any) -> None:
    """Let every Trainer that is built from now on have a ZeroPPCallback.

    Args:
        settings: for models that are sharded already where the Trainer's arguments hold none.
    """
    DefaultCallback._settings = settings
    defaults = cast(list[type[TrainerCallback]], transformers.trainer.DEFAULT_CALLBACKS)
    if DefaultCallback not in defaults:
        defaults.append(DefaultCallback)


def _wants_zeropp(args: TrainingArguments) -> bool | None:
    """Return whether ``fsdp_config`` turns ZeRO++ on or off; None where it says nothing."""
    # A path is left unread: the Trainer itself has read it if it uses FSDP at all.
    settings = entry_of(args.fsdp_config) if isinstance(args.fsdp_config, dict) else None
    return None if settings is None else settings is not False
