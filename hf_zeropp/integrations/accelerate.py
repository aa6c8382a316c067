"""Accelerate: ``Accelerator(fsdp_plugin=ZeroPPPlugin())`` shards with FSDP2 and runs ZeRO++ underneath.

Three things that Accelerate does not do by itself are done here:

- On CPU it ignores an FSDP plugin without a word: ``AcceleratorState`` turns to FSDP on accelerators only. The plugin is made
  active on CPU too (``use_plugin``).
- A plugin passed to a second Accelerator is ignored without a word as well. This is an error here.
- On all micro-steps but the last, ``accumulate`` tells FSDP2 not to reduce gradients, so FSDP2 keeps them in full size. The
  setting ``sync_each_batch`` prevents this: FSDP2 then calls the reduction on every micro-step, and ours stays within the node
  until the last. Where they stay on the rank (``qgz_accumulate``) Accelerate's own way stays.

[Note: Accelerate's order of calls]
``accelerator.prepare(model, optimizer)`` does the following under FSDP2 (``Accelerator._prepare_fsdp2``):

1. It calls the plugin's ``set_auto_wrap_policy(model)``.
2. It wraps blocks for activation checkpointing, and compiles the model.
3. It notes the data address of every parameter, and puts placeholders with these addresses into the optimizer.
4. It calls ``set_auto_wrap_policy(model)`` again, shards each block with ``fully_shard``, and then the rest of the model.
5. It puts the sharded parameters into the optimizer, in the places of the placeholders.

Frozen weights are packed and sharded in 1: before 3, because packing changes addresses, and before 4, because ``fully_shard``
of a block takes every parameter that is not sharded yet. Optimizers lose their frozen parameters before 1, while they still
hold parameters and not placeholders. ZeRO++ itself needs the units that exist after 4. Accelerate calls nothing of the
plugin's after that, so ZeRO++ is applied by a hook that runs before the first forward.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import accelerate.accelerator
import torch.distributed as dist
import torch.nn as nn
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hf_zeropp.apply import apply_zeropp, get_handle
from hf_zeropp.comm.backend_variables import set_backend_variables
from hf_zeropp.comm.exchange import exchange, ranks_by, words_of
from hf_zeropp.compat import check_seams
from hf_zeropp.compat.extend import extend
from hf_zeropp.config import ZeroPPConfig, is_enabled
from hf_zeropp.fsdp.sharded_models import without_compile_wrapper
from hf_zeropp.fsdp.weights.first_use import on_first_use
from hf_zeropp.generation import install_generate
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.integrations.accelerate_checkpoints import patch_checkpoints
from hf_zeropp.integrations.accelerate_frozen import patch_prepare, prepare_frozen
from hf_zeropp.integrations.wrap_policy import block_names
from hf_zeropp.step_record import record_steps

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class ZeroPPPlugin(FullyShardedDataParallelPlugin):
    """Accelerate's FSDP2 plugin with ZeRO++ communication.

    Takes every argument of ``FullyShardedDataParallelPlugin`` (and reads the same ``FSDP_*`` environment), with FSDP2
    and wrapping by transformer block as defaults, and one more:

    Args:
        zeropp: a ZeroPPConfig, a mapping of its fields, a preset's name, a YAML/JSON file, or None (``ZEROPP_CONFIG_FILE``
            and ``ZEROPP_<FIELD>`` variables, else the defaults). False leaves FSDP2's communication as it is: the same
            script then measures the difference. ``ZEROPP_ENABLED=0`` does the same from outside. Either changes collectives
            alone: units, and what can be done with the model, stay as they are.

    Raises:
        ValueError: the settings are wrong, or FSDP1 or DeepSpeed is asked for beside it.
        MovedNameError: an installed library has changed in a place that the plugin relies on.

    Example:
        >>> accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=ZeroPPPlugin(zeropp={"qwz_bits": 8}))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> ...
        >>> if handle := accelerator.state.fsdp_plugin.handle_of(model):
        ...     handle.traffic.print()
    """

    zeropp: ZeroPPConfig | Mapping[str, Any] | str | os.PathLike[str] | Literal[False] | None = None

    def __post_init__(self) -> None:
        self._begin()
        if self.auto_wrap_policy is None:
            # A name is enough here: Accelerate checks it, and turns it into a function. Its type says function alone.
            # Accelerate's own default is NO_WRAP. It shards no block by itself, so a forward pass would gather nearly
            # the whole model at once. It has to be replaced before ``super().__post_init__``, which fills it in.
            self.auto_wrap_policy = cast(Any, os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"))
        super().__post_init__()
        self._note_who_chooses_blocks()

    @classmethod
    def in_place_of(cls, stock: FullyShardedDataParallelPlugin, zeropp: Any = None) -> ZeroPPPlugin:
        """Return a plugin with the values of Accelerate's own, and these settings; None stands for the environment.

        Raises:
            ValueError: as for a plugin that is made by its arguments; or ``stock`` is of a class derived from Accelerate's.
        """
        if type(stock) is not FullyShardedDataParallelPlugin:
            raise ValueError(
                f"ZeRO++ takes the place of Accelerate's FullyShardedDataParallelPlugin, got a {type(stock).__name__}, whose "
                "own methods would be lost. Derive it from ZeroPPPlugin."
            )
        # The values are copied, since they do not do as arguments: ``stock`` has turned NO_WRAP into None, which as an argument
        # means our default.
        plugin = cls.__new__(cls)
        vars(plugin).update(vars(stock), zeropp=zeropp)
        plugin._begin()
        plugin._note_who_chooses_blocks()
        return plugin

    @property
    def zeropp_config(self) -> ZeroPPConfig | None:
        """The settings; None with ``zeropp=False``."""
        return self.zeropp if isinstance(self.zeropp, ZeroPPConfig) else None

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Pack and shard the frozen weights of ``model``, and arm ZeRO++ for its first forward.

        Accelerate calls this just before it shards ``model``: see [Note: Accelerate's order of calls].
        """
        # Accelerate keeps a model that Transformers sharded at load as it is. Its blocks have other classes by now
        # (``FSDPLlamaDecoderLayer``), and Accelerate's own method would not find them.
        if not isinstance(without_compile_wrapper(model), FSDPModule):
            self._choose_blocks(model)
        install_generate(model, lambda: self.handle_of(model))
        if self.zeropp_config is None:
            return
        # Accelerate calls this twice per ``prepare``. All that follows may be repeated: frozen weights that are sharded
        # are passed over, and two armed hooks find the same handle.
        prepare_frozen(self, self.zeropp_config, model)
        self._reduce_on_every_micro_step()
        on_first_use(model, lambda: self.handle_of(model))

    def _reduce_on_every_micro_step(self) -> None:
        """Keep ``accumulate`` from turning FSDP2's reduction off, unless gradients are to accumulate on the rank.

        It is called at several moments, because ``GradientState`` is one object for the whole process, and every Accelerator that
        is built replaces these settings by its own.
        """
        if self.zeropp_config is not None and not self.zeropp_config.accumulates_on_rank:
            GradientState().plugin_kwargs["sync_each_batch"] = True

    def _choose_blocks(self, model: nn.Module) -> None:
        """Choose the modules that Accelerate is going to shard as units of their own."""
        if self._finds_blocks:
            self.transformer_cls_names_to_wrap = block_names(model)
            if not self.transformer_cls_names_to_wrap and PartialState().is_main_process:
                logger.warning(
                    "%s has no module of its _no_split_modules, %s: the whole model is one unit, which is gathered at once. Set "
                    "transformer_cls_names_to_wrap to the class of its blocks.",
                    type(model).__name__,
                    getattr(model, "_no_split_modules", None),
                )
        super().set_auto_wrap_policy(model)

    def apply(self, model: nn.Module) -> ZeroPPHandle:
        """Apply ZeRO++ to a sharded model, once, and let its accumulation follow Accelerate's.

        Args:
            model: prepared by Accelerate, or sharded otherwise.

        Returns:
            Its handle.
        """
        handle = apply_zeropp(model, self.zeropp_config)
        self._reduce_on_every_micro_step()
        # It is a function and not a value, because Accelerate changes ``sync_gradients`` on every micro-step, and the
        # reduction reads it in the backward pass.
        handle.set_last_micro_step(lambda: GradientState().sync_gradients)
        return handle

    def handle_of(self, model: nn.Module) -> ZeroPPHandle | None:
        """Return the handle of a prepared model, None with ``zeropp=False``, with ``ZEROPP_ENABLED=0`` and in a single process.

        Where the model had no forward yet, this applies ZeRO++ first. So call it on all ranks.
        """
        if self.zeropp_config is None:
            return None
        # In a single process Accelerate shards nothing, and a warning has said so (``use_plugin``).
        return get_handle(model) or (self.apply(model) if dist.is_initialized() else None)

    def _note_who_chooses_blocks(self) -> None:
        """Note whether the blocks are those of ``block_names``: of each model, where the user wraps by class and names none."""
        # It is noted once, since Accelerate writes the first model's classes to this field, and would look for them in the next.
        # The names may stand in the environment, which Accelerate's ``__post_init__`` has read by now.
        wraps_by_class = self.auto_wrap_policy is transformer_auto_wrap_policy
        self._finds_blocks = wraps_by_class and self.transformer_cls_names_to_wrap is None

    def _begin(self) -> None:
        """Check the surroundings and the settings, and extend Accelerate where the plugin needs it."""
        check_seams()
        if not is_enabled():
            self.zeropp = False
            record_steps()
        if self.zeropp is not False:
            self.zeropp = ZeroPPConfig.resolve(self.zeropp)
        self._require_fsdp2()
        set_backend_variables()
        # On CPU Accelerate drops a plugin in this very function, and calls no method of it before. No public place comes later
        # with the plugin at hand, and a plugin that did nothing there would leave the script on replicas without a word.
        extend(AcceleratorState, "__init__", _initialize_state)
        patch_prepare()
        patch_checkpoints(accelerate.accelerator)

    def _require_fsdp2(self) -> None:
        if self.fsdp_version not in (None, 2):
            raise ValueError(f"ZeroPPPlugin builds on FSDP2: expected fsdp_version=2, got {self.fsdp_version}.")
        if launcher_says("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION") == "1":
            raise ValueError(
                "ZeroPPPlugin builds on FSDP2, but the launcher was configured for FSDP1: set `fsdp_version: 2` under "
                "`fsdp_config:` in the Accelerate config (or pass --fsdp_version 2)."
            )
        if launcher_says("ACCELERATE_USE_DEEPSPEED"):
            raise ValueError("ZeroPPPlugin and DeepSpeed exclude each other: set `distributed_type: FSDP`.")
        self.fsdp_version = 2


def launcher_says(variable: str) -> bool:
    """Return whether Accelerate's launcher has set one of its switches, such as ``ACCELERATE_USE_FSDP``."""
    return os.environ.get(variable, "false").lower() == "true"


def check_all_or_none(plugin: ZeroPPPlugin) -> None:
    """Raise on every rank if ZeRO++ is on for some ranks and off for others. Collective.

    Ranks with ZeRO++ exchange their plans in the first forward pass, and would wait for those without, which train.
    """
    if not dist.is_initialized():
        return
    ranks = ranks_by(enumerate(exchange(plugin.zeropp is not False)))
    if len(ranks) > 1:
        raise ValueError(
            f"Ranks must agree on whether ZeRO++ runs: it is on for {words_of(ranks[True])} and off for "
            f"{words_of(ranks[False])}. Give all ranks the same ZEROPP_ENABLED, and the same zeropp= argument."
        )


def check_ranks_meet() -> None:
    """Raise if a launcher started this process as one of several, and Accelerate takes it for the only one.

    Accelerate does so where it finds no accelerator and was not told to use the CPU. Every rank looks at its own process alone,
    and all of them find the same.

    Raises:
        ValueError: that is so. Each rank would train by itself and write to the same files.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and PartialState().distributed_type == DistributedType.NO:
        raise ValueError(
            f"This process is rank {os.environ.get('RANK', '?')} of {world_size}, but Accelerate takes it for the only one: it "
            "found no accelerator, and was not told to train on CPU. Each rank would train by itself, and all would write to the "
            "same files. To train on CPU, export ACCELERATE_USE_CPU=true (with `use_cpu: true` in its config file `hf-zeropp "
            "launch` does so, and `accelerate launch` does not). Otherwise find out why torch sees no accelerator here."
        )


_stock_plugin_counts_on_cpu = False


def let_stock_plugin_count_on_cpu() -> None:
    """From now on FSDP2 on CPU also works with Accelerate's own plugin, which the Trainer builds from its arguments."""
    global _stock_plugin_counts_on_cpu
    _stock_plugin_counts_on_cpu = True
    extend(AcceleratorState, "__init__", _initialize_state)


def _initialize_state(
    original: Callable[..., None],
    self: AcceleratorState,
    *args: Any,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    **kwargs: Any,
) -> None:
    """Extend the function in which Accelerate decides whether a plugin counts."""
    # All AcceleratorStates share one dictionary, which the first of them fills. So this has to be asked before the original runs,
    # and the original ignores the plugin of any later one.
    existed = bool(AcceleratorState._shared_state)
    original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    is_on_cpu = self.distributed_type == DistributedType.MULTI_CPU
    if isinstance(fsdp_plugin, ZeroPPPlugin):
        # A later Accelerator finds the plugin in force. ``use_plugin`` runs a collective, and one rank alone may build it.
        if not existed:
            use_plugin(fsdp_plugin)
        elif getattr(self, "fsdp_plugin", None) is not fsdp_plugin:
            raise ValueError(
                "An Accelerator was built before, without this ZeroPPPlugin, so Accelerate would ignore it. Pass the "
                "plugin to the first Accelerator of the process, or call AcceleratorState._reset_state() before."
            )
    # A Trainer hands over Accelerate's own plugin. It only has to count as FSDP here; ``ZeroPPCallback.on_init_end`` replaces it.
    elif _stock_plugin_counts_on_cpu and fsdp_plugin is not None and is_on_cpu:
        use_plugin(fsdp_plugin)


def use_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Make ``plugin`` the active FSDP plugin of the AcceleratorState that exists, on CPU too.

    Raises:
        ValueError: the process was started for another kind of distribution (DeepSpeed, Megatron, TPU), or as one of several
            ranks, each of which Accelerate takes for the only one.
    """
    state = AcceleratorState()
    if state.distributed_type == DistributedType.NO:
        check_ranks_meet()
        logger.warning(
            "ZeroPPPlugin: this is a single process, there is nothing to shard. Start with `accelerate launch` or "
            "`hf-zeropp launch` for more."
        )
        return
    if state.distributed_type not in (DistributedType.FSDP, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ValueError(
            f"ZeroPPPlugin needs `distributed_type: FSDP`, but this process runs as {state.distributed_type}. Change "
            "the Accelerate config."
        )
    # Accelerate does this for the plugin it is given, on accelerators. It does not do it on CPU, nor for a plugin that
    # replaces that one.
    if state.mixed_precision != "no":  # a policy that the plugin was given stays as it is
        plugin.set_mixed_precision(state.mixed_precision)
    if isinstance(plugin, ZeroPPPlugin):
        check_all_or_none(plugin)
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    # Each call of ``AcceleratorState()`` copies PartialState's values over its own.
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
