"""Transformers' Trainer, and every TRL trainer: settings in ``fsdp_config``, and one callback.

    args = TrainingArguments(..., fsdp=True, fsdp_config={"zeropp": {"qwz_bits": 8}})
    trainer = Trainer(model, args, ..., callbacks=[ZeroPPCallback()])

The Trainer builds Accelerate's FSDP plugin from its arguments. ``on_init_end`` puts a ZeroPPPlugin with the same
arguments in its place, before anything is sharded; ``on_train_begin`` receives the sharded model.

Two things a callback cannot do from its events alone:

- *CPU.* Accelerate turns to FSDP on accelerators only, and the Trainer asks whether it did before any callback runs.
  ``use_configured_state`` would need every CPU script to build an Accelerator first. But the callback is constructed
  before the Trainer it is passed to, so its constructor lets FSDP plugins count on CPU too: see
  ``let_stock_plugin_count_on_cpu``.
- *Trackers.* TensorBoard and its like stand before the user's callbacks, so what ``on_log`` adds comes too late for
  them. Importing this module therefore adds a small callback to the Trainer's defaults, which stand before trackers.
  It also notices zeropp settings for which nobody passed a ZeroPPCallback.
"""

from __future__ import annotations

import json
import logging
import weakref
from typing import Any, cast

import torch.nn as nn
import transformers.trainer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_zeropp.apply import ZeroPPHandle
from hf_zeropp.fsdp.units import find_sharded_modules, on_first_use
from hf_zeropp.integrations.accelerate import ZeroPPPlugin, let_stock_plugin_count_on_cpu, use_plugin
from hf_zeropp.integrations.accelerate_checkpoints import watch_checkpoints
from hf_zeropp.integrations.step_log import StepLog

logger = logging.getLogger(__name__)

_callbacks: weakref.WeakSet[ZeroPPCallback] = weakref.WeakSet()


class ZeroPPCallback(TrainerCallback):
    """Runs a Trainer's model under ZeRO++.

    The settings stand in ``fsdp_config["zeropp"]``: a mapping of ZeroPPConfig's fields, a YAML/JSON file of them, True
    (or nothing) for the environment (``ZEROPP_CONFIG_FILE``, ``ZEROPP_<FIELD>``), or False for stock FSDP2. Models
    that Transformers sharded at load (``DistributedConfig(fsdp_size=...)``) need no ``fsdp=True``.

    It logs, through all of the Trainer's trackers, ``zeropp/cross_node_gb_per_step`` and its siblings (step_log.py),
    and prints a table of the traffic when training ends.

    Attributes:
        handle: the trained model's, from ``on_train_begin`` on; None with ``zeropp: False``.

    Example:
        >>> trainer = DPOTrainer(model, ref_model, args=args, callbacks=[callback := ZeroPPCallback()], ...)
        >>> callback.attach(trainer)  # only for further sharded models, here the reference
        >>> trainer.train()
    """

    def __init__(self) -> None:
        self.handle: ZeroPPHandle | None = None
        self._args: TrainingArguments | None = None
        self._plugin: ZeroPPPlugin | None = None
        self._auxiliary: list[ZeroPPHandle] = []
        self._log: StepLog | None = None
        _callbacks.add(self)
        let_stock_plugin_count_on_cpu()
        watch_checkpoints(transformers.trainer)

    @property
    def _active_plugin(self) -> ZeroPPPlugin | None:
        """None with ``zeropp: False``, and before the Trainer is built."""
        return None if self._plugin is None or self._plugin.zeropp_config is None else self._plugin

    def serves(self, args: TrainingArguments) -> bool:
        return self._args is args

    def attach(self, trainer: Trainer) -> ZeroPPCallback:
        """Shard the trainer's model now, and take in the models that no event shows. Call it on all ranks.

        Needed for two things: ``evaluate`` or ``predict`` before ``train`` (with FSDP2 the Trainer itself can shard
        only together with an optimizer, and raises), and further sharded models, such as TRL's reference models, that
        would run FSDP2's own collectives. Those in eval mode are frozen by it: they then cross the network once
        instead of after every optimizer step.
        """
        if not self.serves(trainer.args):
            raise ValueError("attach: this callback was not passed to that trainer. Use Trainer(callbacks=[callback]).")
        if not _is_sharded(_model_of(trainer)):
            _shard(trainer)
        if (plugin := self._active_plugin) is not None:
            self._auxiliary = [plugin.apply(_frozen_in_eval(model)) for model in _auxiliary_models(trainer)]
        return self

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        _check_arguments(args, model)
        self._args = args
        self._plugin = plugin = ZeroPPPlugin(**(args.fsdp_plugin_args or {}), zeropp=_settings_of(args))
        if _is_sharded(model):
            on_first_use(model, lambda: plugin.handle_of(model))
        if getattr(AcceleratorState(), "fsdp_plugin", None) is not None:
            use_plugin(plugin)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """The model is sharded, and its weights may just have been loaded from a checkpoint."""
        if self._plugin is None:
            raise ValueError(
                "ZeroPPCallback must be there when the Trainer is built: pass it as Trainer(callbacks=[...]), not to "
                "add_callback."
            )
        if (plugin := self._active_plugin) is None:
            return
        self.handle = handle = plugin.apply(model)
        handle.discard_accumulated()
        handle.traffic.reset()
        self.invalidate()
        if state.is_world_process_zero:
            _warn_of_inexact_resume(handle)
            _warn_of_strangers(model, [handle, *self._auxiliary])
        self._log = StepLog([handle, *self._auxiliary])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Progress is a function of the step alone, so that a resumed run follows the same schedule."""
        if self._log is not None:
            self._log.trained.set_progress(state.global_step / max(state.max_steps, 1))
            self._log.step_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._log is None:
            return
        self._log.step_ends()
        syncs_every = getattr(args, "ref_model_sync_steps", 0) if getattr(args, "sync_ref_model", False) else 0
        if syncs_every and state.global_step % syncs_every == 0:
            for handle in self._auxiliary:  # TRL mixes weights in through `.data`, before or after this callback
                handle.invalidate()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Loading a full state dict (best model, checkpoint) comes next, or training: both want shards."""
        if (plugin := self._active_plugin) is not None and _is_sharded(model):
            plugin.apply(model).reshard()

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self.on_evaluate(args, state, control, model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The best model may just have been loaded."""
        if self._log is None:
            return
        self.invalidate()
        if state.is_world_process_zero and self._log.trained.is_active:
            self._log.print_summary(args.gradient_accumulation_steps)
        self._log = None

    def invalidate(self) -> None:
        """Gather all weights across nodes again. For weights that were changed through ``.data``, on all ranks."""
        for handle in (self.handle, *self._auxiliary):
            if handle is not None:
                handle.invalidate()

    def log_entries(self) -> dict[str, float]:
        """What happened since the last call, per step."""
        return {} if self._log is None or not self._log.trained.is_active else self._log.since_last_log()


class _DefaultCallback(TrainerCallback):
    """Part of every Trainer built after this module was imported, ahead of trackers and of the user's callbacks."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if _wants_zeropp(args) and not _callbacks:
            raise ValueError(_NO_CALLBACK)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if _wants_zeropp(args) and not any(callback.serves(args) for callback in _callbacks):
            raise ValueError(_NO_CALLBACK)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if not {"loss", "train_loss"} & logs.keys():  # an evaluation's: leave the steps for the next training log
            return
        for callback in _callbacks:
            if callback.serves(args):
                entries = callback.log_entries()
                logs.update(entries)
                state.log_history[-1].update(entries)


cast(list[type[TrainerCallback]], transformers.trainer.DEFAULT_CALLBACKS).append(_DefaultCallback)

_NO_CALLBACK = (
    'fsdp_config["zeropp"] is set but no ZeroPPCallback was passed to this Trainer, so it would train on stock FSDP2. '
    "Use Trainer(callbacks=[ZeroPPCallback()]), or remove the setting."
)


def _settings_of(args: TrainingArguments) -> Any:
    """``fsdp_config["zeropp"]``, None for the environment."""
    config = args.fsdp_config or {}
    if isinstance(config, str):  # the Trainer reads the file only with fsdp=True
        with open(config) as file:
            config = json.load(file)
    settings = config.get("zeropp")
    return None if settings is True else settings


def _wants_zeropp(args: TrainingArguments) -> bool:
    return isinstance(args.fsdp_config, dict) and bool(args.fsdp_config.get("zeropp"))


def _check_arguments(args: TrainingArguments, model: nn.Module) -> None:
    """Raises: ValueError: the Trainer would not shard with FSDP2."""
    state = AcceleratorState()
    if args.deepspeed or state.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("ZeroPPCallback and DeepSpeed exclude each other: drop `deepspeed`, set `fsdp=True`.")
    if getattr(state, "fsdp_plugin", None) is None and not _is_sharded(model) and _settings_of(args) is not False:
        raise ValueError(
            "ZeroPPCallback needs a model sharded by FSDP2: set TrainingArguments(fsdp=True, "
            'fsdp_config={"zeropp": {...}}) (on the command line: --fsdp --fsdp_config zeropp.json), leave '
            'fsdp_config["version"] at 2, and start several processes with `accelerate launch` or `hf-zeropp launch`.'
        )


def _warn_of_inexact_resume(handle: ZeroPPHandle) -> None:
    has_state = handle.config.qwz_mode == "delta" or handle.config.error_feedback_decay is not None
    if has_state and getattr(AcceleratorState(), "fsdp_plugin", None) is None:
        logger.warning(
            "This model was sharded at loading, and the Trainer saves its optimizer without Accelerate's FSDP functions: what "
            "qwz_mode='delta' and qgz_error_feedback keep is not part of its checkpoints, and a resumed run differs a little. "
            "Set fsdp=True for checkpoints that resume bit for bit, or call handle.save_state and handle.load_state."
        )


def _warn_of_strangers(model: nn.Module, handles: list[ZeroPPHandle]) -> None:
    known = {id(module) for handle in handles for unit in handle.units for module in unit.modules}
    known |= {id(module) for module in model.modules()}
    strangers = {type(module).__name__ for module in find_sharded_modules() if id(module) not in known}
    if strangers:
        logger.warning(
            "Sharded models besides the trained one (%s) run FSDP2's own collectives. If they belong to this "
            "Trainer (a reference model), call ZeroPPCallback.attach(trainer) before train().",
            ", ".join(sorted(strangers)),
        )


def _model_of(trainer: Trainer) -> nn.Module:
    assert trainer.model is not None
    return trainer.model


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _shard(trainer: Trainer) -> None:
    """What ``train`` does first; it recognizes the result and keeps it."""
    trainer.create_optimizer()
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model


def _auxiliary_models(trainer: Trainer) -> list[nn.Module]:
    """Sharded models among a trainer's attributes and in its lists, without the trained one."""
    values = [item for value in vars(trainer).values() for item in (value if isinstance(value, list) else [value])]
    trained = set(_model_of(trainer).modules())
    models = [value for value in values if isinstance(value, nn.Module) and value not in trained]
    return [model for model in dict.fromkeys(models) if _is_sharded(model) and trained.isdisjoint(model.modules())]


def _frozen_in_eval(model: nn.Module) -> nn.Module:
    return model if model.training else model.requires_grad_(False)
