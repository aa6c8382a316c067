"""Transformers' Trainer, and every TRL trainer: settings in ``fsdp_config``, and one callback.

    args = TrainingArguments(..., fsdp=True, fsdp_config={"zeropp": {"qwz_bits": 8}})
    trainer = Trainer(model, args, ..., callbacks=[ZeroPPCallback()])

The Trainer builds Accelerate's FSDP plugin from its arguments. The callback's ``on_init_end`` puts a ZeroPPPlugin with the same
arguments in its place, before anything is sharded. ``on_train_begin`` receives the sharded model.

Two things cannot be done from a callback's events alone:

- *FSDP2 on CPU.* Accelerate turns to FSDP on accelerators only, and the Trainer asks whether it did before it calls any
  callback. But a ZeroPPCallback is constructed before the Trainer it is passed to. So its constructor makes FSDP plugins count
  on CPU (``let_stock_plugin_count_on_cpu``). Transformers' own way, ``use_configured_state``, would require every CPU script
  to build an Accelerator first.
- *What a Trainer does before and around its events*: resuming, checkpoints, an evaluation before training, and the order of
  callbacks. Methods of Trainer's are extended for it as soon as a callback takes part in a Trainer (``_extend_trainers``), and do
  nothing else in those where none does.

[Note: the trackers' order]
The Trainer calls its callbacks one after the other: first its defaults (``transformers.trainer.DEFAULT_CALLBACKS``), then the
trackers (TensorBoard, Weights & Biases), then those the user passed. All receive the same dictionary of figures in ``on_log``.
What a user's callback adds to it comes after the trackers have written theirs. Therefore the ZeroPPCallback moves ahead of the
trackers when training begins (``_put_in_charge``).

A script that passes no callback gets one by ``hf_zeropp.run`` (``launch/default_callback.py``). A Trainer without any is one of
Transformers' alone: nothing reads ``fsdp_config["zeropp"]``, and nothing can say so.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn
import transformers.trainer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import DefaultFlowCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_zeropp.comm.backend_variables import set_backend_variables
from hf_zeropp.compat import check_seams
from hf_zeropp.compat.extend import extend
from hf_zeropp.config import ZeroPPConfig, check_misplaced, is_like_block
from hf_zeropp.fsdp.sharded_models import find_sharded_modules
from hf_zeropp.fsdp.weights.first_use import on_first_use
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.integrations.accelerate import (
    ZeroPPPlugin,
    check_all_or_none,
    check_ranks_meet,
    let_stock_plugin_count_on_cpu,
    use_plugin,
)
from hf_zeropp.integrations.accelerate_checkpoints import patch_checkpoints
from hf_zeropp.integrations.resume import folder_to_resume, save_then_wait, unmark_then_save
from hf_zeropp.integrations.step_log import StepLog

logger = logging.getLogger(__name__)

ENTRY = "zeropp"
"""The key of ``fsdp_config`` under which settings stand."""


class ZeroPPCallback(TrainerCallback):
    """Run a Trainer's model under ZeRO++.

    The settings stand in ``fsdp_config["zeropp"]``: a ZeroPPConfig or a mapping of its fields, a preset's name, a YAML/JSON file,
    True (or nothing) for the environment (``ZEROPP_CONFIG_FILE``, ``ZEROPP_<FIELD>``), or False for stock FSDP2. Models
    that Transformers sharded at load (``DistributedConfig(fsdp_size=...)``) need no ``fsdp=True``.

    The callback logs ``zeropp/cross_node_gb_per_step`` and other figures (step_log.py) through all of the Trainer's trackers,
    and prints a table of the traffic when training ends.

    Args:
        update_folder: for TRL's server mode with a server that takes updates (``trl_server.py``): rank 0 writes versions of the
            weights there. None for ``updates`` in the Trainer's output directory.
        update_place: the same folder as the server sees it, or its URL behind a server of static files. None for the folder
            itself.

    Attributes:
        handle: the trained model's handle, from ``on_train_begin`` on; None with ``zeropp: False``.

    Raises:
        MovedNameError: an installed library has changed in a place that the callback relies on.

    Example:
        >>> trainer = DPOTrainer(model, ref_model, args=args, callbacks=[callback := ZeroPPCallback()], ...)
        >>> callback.attach(trainer)  # only for further sharded models, here the reference
        >>> trainer.train()
    """

    _settings: Any = None
    """The ZeRO++ settings for a Trainer whose arguments have none. None: those of the environment."""

    def __init__(self, *, update_folder: str | os.PathLike[str] | None = None, update_place: str | None = None) -> None:
        self._update_folder, self._update_place = update_folder, update_place
        self.handle: ZeroPPHandle | None = None
        self._args: TrainingArguments | None = None
        self._plugin: ZeroPPPlugin | None = None
        self._auxiliary: list[ZeroPPHandle] = []
        self._log: StepLog | None = None
        self._begin()

    def _begin(self) -> None:
        """Check the surroundings, and do what comes too late when a Trainer calls its callbacks."""
        check_seams()
        set_backend_variables()
        let_stock_plugin_count_on_cpu()

    @property
    def _active_plugin(self) -> ZeroPPPlugin | None:
        """The plugin, or None with ``zeropp: False`` and before the Trainer is built."""
        return None if self._plugin is None or self._plugin.zeropp_config is None else self._plugin

    def attach(self, trainer: Trainer) -> ZeroPPCallback:
        """Shard the trainer's model now, and run its further sharded models under ZeRO++ too. Call it on all ranks.

        A trainer with further sharded models, such as TRL's reference models, needs this: no event shows them, and they would
        run FSDP2's own collectives. Those in eval mode are frozen, so that their weights cross the network once and not after
        every optimizer step.

        Args:
            trainer: the Trainer that this callback was passed to.

        Returns:
            This callback.

        Raises:
            ValueError: the callback was passed to another Trainer.
        """
        if self._args is not trainer.args:
            raise ValueError("attach: this callback was not passed to that trainer. Use Trainer(callbacks=[callback]).")
        if not is_sharded(_model_of(trainer)):
            _shard(trainer)
        if (plugin := self._active_plugin) is not None:
            models = _auxiliary_models(trainer)
            for model in models:
                if not model.training:  # an optimizer step then leaves its secondary shards fresh
                    model.requires_grad_(False)
            self._auxiliary = [plugin.apply(model) for model in models]
        return self

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Put a ZeroPPPlugin in the place of the Trainer's FSDP plugin.

        Raises:
            ValueError: the Trainer would not shard with FSDP2, or its TRL has no way to feed vLLM within the node.
        """
        _check_arguments(args, model)
        own = _settings_of(args)
        plugin = ZeroPPPlugin(**(args.fsdp_plugin_args or {}), zeropp=self._settings if own is None else own)
        # Trackers write the arguments as JSON, on the first rank alone. An error there would leave the others waiting.
        if isinstance(args.fsdp_config, dict) and isinstance(settings := args.fsdp_config.get(ENTRY), ZeroPPConfig):
            args.fsdp_config[ENTRY] = settings.to_dict()
        self._take_part(args, plugin)
        # A model that Transformers sharded at load is not prepared by Accelerate. The plugin's own hook is never armed
        # for it, and there may be no FSDP plugin to replace.
        if is_sharded(model):
            on_first_use(model, lambda: plugin.handle_of(model))
        if plugin_in_force() is not None:
            use_plugin(plugin)
        else:
            check_all_or_none(plugin)

    def _take_part(self, args: TrainingArguments, plugin: ZeroPPPlugin) -> None:
        self._args, self._plugin = args, plugin
        _extend_trainers()
        if self._active_plugin is not None and feeds_engine(args):
            from hf_zeropp.rollouts.callback import take_over_syncs

            take_over_syncs(args, self._update_folder, self._update_place)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Apply ZeRO++ to the model, which is sharded by now. Its weights may just have been loaded from a checkpoint.

        Raises:
            ValueError: the callback was added after the Trainer had been built.
        """
        if self._plugin is None:
            raise ValueError(
                "ZeroPPCallback must be there when the Trainer is built: pass it as Trainer(callbacks=[...]), not to "
                "add_callback."
            )
        if (plugin := self._active_plugin) is None:
            return
        self.handle = handle = plugin.apply(model)
        # Micro-steps of an earlier ``train`` that was interrupted do not belong to this one, and the traffic of an
        # evaluation before it is none of training. A checkpoint's weights may have been written without moving a
        # version counter.
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
        """Follow the schedule of ``qgz_until``. Progress depends on the step alone, so that a resumed run follows the same."""
        if self._log is not None:
            self._log.trained.set_progress(state.global_step / max(state.max_steps, 1))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Drop secondary shards of reference models that TRL has just mixed new weights into; warn once if vLLM was not fed."""
        if self._log is None:
            return
        if feeds_engine(args) and self._log.trained.traffic.steps == 1 and state.is_world_process_zero:
            from hf_zeropp.rollouts.trl_sync import warn_if_unused

            warn_if_unused(args, model)
        syncs_every = getattr(args, "ref_model_sync_steps", 0) if getattr(args, "sync_ref_model", False) else 0
        if syncs_every and state.global_step % syncs_every == 0:
            # TRL writes through ``.data``, which moves no version counter, and before or after this callback. Either way no
            # forward lies in between.
            for handle in self._auxiliary:
                handle.invalidate()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Reshard what the evaluation left gathered.

        Training or the loading of a full state dict (best model, checkpoint) comes next, and both take gathered parameters
        for shards.
        """
        if self._plugin is None or not is_sharded(model):
            return
        if (plugin := self._active_plugin) is not None:
            plugin.apply(model).reshard()
        else:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    on_predict = on_evaluate  # type: ignore[assignment]  # it is told metrics as well, as one more keyword

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print the traffic. Weights are gathered anew from here on, because the best model may just have been loaded."""
        if self._log is None:
            return
        self.invalidate()
        if state.is_world_process_zero and self._log.trained.is_active:
            self._log.print_summary(args.gradient_accumulation_steps)
        self._log = None

    def invalidate(self) -> None:
        """Gather all weights across nodes again at their next use, after they were changed through ``.data``.

        Call it on all ranks.
        """
        for handle in (self.handle, *self._auxiliary):
            if handle is not None:
                handle.invalidate()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Add the figures of the steps since the last log, per step: see [Note: the trackers' order]."""
        is_evaluation = not {"loss", "train_loss"} & logs.keys()  # the steps wait for the next figures of training
        if self._log is None or not self._log.trained.is_active or is_evaluation:
            return
        entries = self._log.since_last_log()
        logs.update(entries)  # for the trackers, which come later
        state.log_history[-1].update(entries)  # a copy that the Trainer made of the figures before


def _extend_trainers() -> None:
    """Extend methods of all Trainers. In those where no callback takes part they keep to what they did."""
    patch_checkpoints(transformers.trainer)
    extend(Trainer, "train", _train)
    _extend_served("evaluation_loop", _evaluate)
    _extend_served("_save_checkpoint", unmark_then_save)
    _extend_served("_save_rng_state", save_then_wait)


def _extend_served(name: str, extended: Callable[..., Any]) -> None:
    """Extend a method of those Trainers in which a callback takes part."""

    def call(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
        return extended(original, self, *args, **kwargs) if _is_served(self) else original(self, *args, **kwargs)

    extend(Trainer, name, call)


def _settings_of(args: TrainingArguments) -> Any:
    """Return ``fsdp_config["zeropp"]``; None stands for the environment."""
    config = args.fsdp_config or {}
    if isinstance(config, str):  # the Trainer reads the file only with fsdp=True
        with open(config) as file:
            config = json.load(file)
    settings = entry_of(config)
    return None if settings is True else settings


def entry_of(fsdp_config: Mapping[str, Any]) -> Any:
    """Return what stands under ``"zeropp"``; None where nothing does.

    Raises:
        ValueError: settings stand beside it, or under a misspelt key. Transformers keeps such keys, and nobody reads them.
    """
    for key in fsdp_config:
        if key != ENTRY and is_like_block(key):
            raise ValueError(f'unknown key {key!r} in fsdp_config. Settings of ZeRO++ stand under "{ENTRY}".')
    check_misplaced(fsdp_config, "in fsdp_config", f'in it under "{ENTRY}"')
    return fsdp_config.get(ENTRY)


def feeds_engine(args: TrainingArguments) -> bool:
    """Return whether the Trainer sends weights to an inference engine."""
    # Trainers without the flag that know a server (TRL's AsyncGRPOTrainer) use it always.
    return getattr(args, "use_vllm", hasattr(args, "vllm_server_base_url"))


def _check_arguments(args: TrainingArguments, model: nn.Module) -> None:
    """Check that the ranks meet, and that the Trainer will shard with FSDP2 or the model is sharded.

    Raises:
        ValueError: one of these does not hold.
    """
    check_ranks_meet()
    state = AcceleratorState()
    if args.deepspeed or state.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("ZeroPPCallback and DeepSpeed exclude each other: drop `deepspeed`, set `fsdp=True`.")
    if plugin_in_force() is None and not is_sharded(model) and _settings_of(args) is not False:
        raise ValueError(
            f"ZeroPPCallback needs a model sharded by FSDP2, got fsdp={args.fsdp!r} in {state.num_processes} processes of "
            f'{state.distributed_type!s}. Set TrainingArguments(fsdp=True, fsdp_config={{"zeropp": {{...}}}}) (on the command '
            'line: --fsdp --fsdp_config zeropp.json), leave fsdp_config["version"] at 2, and start several processes with '
            "`hf-zeropp launch`."
        )


def _warn_of_inexact_resume(handle: ZeroPPHandle) -> None:
    if handle.config.sends_deltas and plugin_in_force() is None:
        logger.warning(
            "This model was sharded at loading, and the Trainer saves its optimizer without Accelerate's FSDP functions: what "
            "qwz_mode='delta' must do at a checkpoint is not done, and a resumed run differs a little. "
            "Set fsdp=True for checkpoints that resume bit for bit, or call handle.save_state after saving and handle.invalidate "
            "after loading."
        )


def _warn_of_strangers(model: nn.Module, handles: list[ZeroPPHandle]) -> None:
    """Warn if this process holds sharded models that run FSDP2's own collectives."""
    # This is a warning and not an error, because another rank may hold other models. If one rank alone raised, the
    # others would wait for it.
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


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 has sharded the model, or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _in_charge(trainer: Trainer) -> ZeroPPCallback | None:
    """Return the ZeroPPCallback that the user passed to a Trainer, else that of the defaults, which come before the user's."""
    own = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ZeroPPCallback)]
    return own[-1] if own else None


def _is_served(trainer: Trainer) -> bool:
    callback = _in_charge(trainer)
    return callback is not None and callback._plugin is not None


def plugin_in_force() -> FullyShardedDataParallelPlugin | None:
    """Return the FSDP plugin in Accelerate's state, which all Trainers share."""
    plugin: FullyShardedDataParallelPlugin | None = getattr(AcceleratorState(), "fsdp_plugin", None)
    return plugin


def _use_own_plugin(trainer: Trainer) -> None:
    """Put the trainer's plugin back. All Trainers share Accelerate's state, where one that was built later has put its own."""
    active, callback = plugin_in_force(), _in_charge(trainer)
    if active is not None and callback is not None and callback._plugin is not None:
        AcceleratorState().fsdp_plugin = callback._plugin
    elif isinstance(active, ZeroPPPlugin) and trainer.args.fsdp_plugin_args is not None:
        # This Trainer runs without ZeRO++, and has kept nothing of the plugin that it built from its arguments.
        use_plugin(FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args))


def _put_in_charge(trainer: Trainer) -> None:
    """Let one ZeroPPCallback serve the trainer, ahead of the trackers."""
    callback, callbacks = _in_charge(trainer), trainer.callback_handler.callbacks
    for other in [each for each in callbacks if isinstance(each, ZeroPPCallback) and each is not callback]:
        trainer.remove_callback(other)
    # The callback that tells the Trainer when to log stays the first.
    callbacks.sort(key=lambda each: (not isinstance(each, DefaultFlowCallback), each is not callback))


def _train(
    original: Callable[..., Any], self: Trainer, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Extend ``train``: with the settings of its own Trainer, and resuming from a checkpoint that all ranks see whole."""
    _use_own_plugin(self)
    if _is_served(self):
        _put_in_charge(self)
        if getattr(self, "_lora_sync", False):  # a server takes adapters, so TRL sends nothing else
            from hf_zeropp.rollouts.trl_sync import count_as_published

            count_as_published(_model_of(self))
        resume_from_checkpoint = folder_to_resume(self, resume_from_checkpoint)
    return original(self, resume_from_checkpoint, *args, **kwargs)


def _evaluate(original: Callable[..., Any], self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Extend ``evaluate`` and ``predict``. Before ``train`` the Trainer would shard a model alone, which FSDP2 refuses."""
    _put_in_charge(self)
    if self.is_fsdp_enabled and not is_sharded(_model_of(self)):
        _shard(self)
    return original(self, *args, **kwargs)


def _shard(trainer: Trainer) -> None:
    """Do what ``train`` does first. ``train`` recognizes a model that is prepared, and keeps it."""
    _use_own_plugin(trainer)
    trainer.create_optimizer()
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model


def _auxiliary_models(trainer: Trainer) -> list[nn.Module]:
    """Return the sharded models among a trainer's attributes and in its lists, without the trained one."""
    # Trainers name their further models as they like (TRL's reference model is ``ref_model``), so every attribute is
    # looked at. A wrapper of the trained model (``model_wrapped``) shares modules with it, and is left out for that.
    values = [item for value in vars(trainer).values() for item in (value if isinstance(value, list) else [value])]
    trained = set(_model_of(trainer).modules())
    models = [value for value in values if isinstance(value, nn.Module) and value not in trained]
    return [model for model in dict.fromkeys(models) if is_sharded(model) and trained.isdisjoint(model.modules())]
