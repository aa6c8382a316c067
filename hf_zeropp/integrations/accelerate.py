"""Accelerate: ``Accelerator(fsdp_plugin=ZeroPPPlugin())`` shards with FSDP2 and runs ZeRO++ underneath.

Accelerate shards inside ``prepare``; the plugin is called just before (``set_auto_wrap_policy``) and applies ZeRO++ at
the first forward after it. Three things Accelerate does not do by itself are done here:

- On CPU a plugin is silently ignored: ``AcceleratorState`` turns to FSDP on accelerators only. We turn it.
- A plugin passed to a second Accelerator is silently ignored too. We raise.
- On all micro-steps but the last, ``accumulate`` tells FSDP2 not to reduce, which keeps full-size gradients. We ask for
  ``sync_each_batch``: FSDP2 calls our reduction each time, and that stays within the node until the last micro-step.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import accelerate.accelerator
import torch
import torch.nn as nn
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hf_zeropp.apply import ZeroPPHandle, apply_zeropp, get_handle
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.units import on_first_use
from hf_zeropp.generation import install_generate
from hf_zeropp.integrations.accelerate_checkpoints import watch_checkpoints
from hf_zeropp.integrations.accelerate_frozen import prepare_frozen, watch_prepare

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class ZeroPPPlugin(FullyShardedDataParallelPlugin):
    """Accelerate's FSDP2 plugin with ZeRO++ communication.

    Takes every argument of ``FullyShardedDataParallelPlugin`` (and reads the same ``FSDP_*`` environment), with FSDP2
    and wrapping by transformer block as defaults, and one more:

    Args:
        zeropp: a ZeroPPConfig, a mapping of its fields, a YAML/JSON file, or None (``ZEROPP_CONFIG_FILE`` and
            ``ZEROPP_<FIELD>`` variables, else the defaults). False leaves FSDP2's communication as it is: the same
            script then measures the difference.

    Example:
        >>> accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=ZeroPPPlugin(zeropp={"qwz_bits": 8}))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> ...
        >>> accelerator.state.fsdp_plugin.handle_of(model).traffic.print()
    """

    zeropp: ZeroPPConfig | Mapping[str, Any] | str | os.PathLike[str] | Literal[False] | None = None
    scaler: torch.amp.GradScaler | None = dataclasses.field(default=None, init=False, repr=False)
    """The Accelerator's, with fp16: ``prepare`` sets it."""

    def __post_init__(self) -> None:
        if self.zeropp is not False:
            self.zeropp = ZeroPPConfig.resolve(self.zeropp)
        self._require_fsdp2()
        if self.auto_wrap_policy is None:
            # Any of the names that Accelerate takes, in any case: it checks them.
            self.auto_wrap_policy = cast(Any, os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"))
        super().__post_init__()
        watch_accelerator_state()
        watch_prepare()
        watch_checkpoints(accelerate.accelerator)

    @property
    def zeropp_config(self) -> ZeroPPConfig | None:
        """The settings; None with ``zeropp=False``."""
        return self.zeropp if isinstance(self.zeropp, ZeroPPConfig) else None

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Accelerate calls this just before it shards ``model``: pack and shard its frozen weights, and arm ZeRO++ for
        its first forward."""
        super().set_auto_wrap_policy(model)
        if self.zeropp_config is None:
            return
        device = PartialState().device
        assert device is not None  # it is set with the process group
        prepare_frozen(self, self.zeropp_config, model, device.type)
        GradientState().plugin_kwargs["sync_each_batch"] = True
        on_first_use(model, lambda: self.handle_of(model))
        install_generate(model, lambda: self.handle_of(model))

    def apply(self, model: nn.Module) -> ZeroPPHandle:
        """Apply ZeRO++ to a sharded model, once, and let its accumulation follow Accelerate's."""
        handle = apply_zeropp(model, self.zeropp_config)
        GradientState().plugin_kwargs["sync_each_batch"] = True
        handle.set_last_micro_step(lambda: GradientState().sync_gradients)
        if self.scaler is not None and handle.config.error_feedback_decay is not None:
            handle.set_loss_scale(self.scaler.get_scale)
        return handle

    def handle_of(self, model: nn.Module) -> ZeroPPHandle | None:
        """The handle of a prepared model, None with ``zeropp=False``. Applies ZeRO++ where no forward did: call it on
        all ranks."""
        return None if self.zeropp_config is None else get_handle(model) or self.apply(model)

    def _require_fsdp2(self) -> None:
        if self.fsdp_version not in (None, 2):
            raise ValueError(f"ZeroPPPlugin builds on FSDP2: expected fsdp_version=2, got {self.fsdp_version}.")
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and os.environ.get("FSDP_VERSION") == "1":
            raise ValueError(
                "ZeroPPPlugin builds on FSDP2, but the launcher was configured for FSDP1: set `fsdp_version: 2` under "
                "`fsdp_config:` in the Accelerate config (or pass --fsdp_version 2)."
            )
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            raise ValueError("ZeroPPPlugin and DeepSpeed exclude each other: set `distributed_type: FSDP`.")
        self.fsdp_version = 2


_stock_counts_on_cpu = False


def let_stock_plugin_count_on_cpu() -> None:
    """From now on FSDP2 on CPU also works with Accelerate's own plugin, which the Trainer builds from its arguments."""
    global _stock_counts_on_cpu
    _stock_counts_on_cpu = True
    watch_accelerator_state()


def watch_accelerator_state() -> None:
    """Wrap ``AcceleratorState.__init__`` once, the one place where Accelerate decides whether a plugin counts."""
    original: Callable[..., None] = AcceleratorState.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialize(
        self: AcceleratorState, *args: Any, fsdp_plugin: FullyShardedDataParallelPlugin | None = None, **kwargs: Any
    ) -> None:
        existed = bool(AcceleratorState._shared_state)
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if isinstance(fsdp_plugin, ZeroPPPlugin):
            _check_plugin_counts(self, fsdp_plugin, existed)
            use_plugin(fsdp_plugin)
        elif _stock_counts_on_cpu and fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            use_plugin(fsdp_plugin)

    AcceleratorState.__init__ = initialize  # type: ignore[method-assign]


def _check_plugin_counts(state: AcceleratorState, plugin: ZeroPPPlugin, existed: bool) -> None:
    if existed and getattr(state, "fsdp_plugin", None) is not plugin:
        raise ValueError(
            "An Accelerator was built before, without this ZeroPPPlugin, so Accelerate would ignore it. Pass the "
            "plugin to the first Accelerator of the process, or call AcceleratorState._reset_state() before."
        )


def use_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Make ``plugin`` the active FSDP plugin of the AcceleratorState that exists, on CPU too.

    Raises:
        ValueError: the process was started for another kind of distribution (DeepSpeed, Megatron, TPU).
    """
    state = AcceleratorState()
    if state.distributed_type == DistributedType.NO:
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
    if state.mixed_precision != "no":  # keeps a policy that is set
        plugin.set_mixed_precision(state.mixed_precision)
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
