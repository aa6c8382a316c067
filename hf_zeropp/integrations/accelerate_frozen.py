"""Accelerate: a model's frozen weights are packed and sharded within the node before Accelerate shards the rest.

Accelerate calls the plugin's ``set_auto_wrap_policy(model)`` first thing in ``prepare``. There the frozen weights are taken
care of; what Accelerate then finds unsharded is trainable. Two of its habits need attention:

- *Memory-efficient loading.* Only rank 0 holds the weights; Accelerate moves the model to ``meta``, shards it, and sends full
  tensors afterwards. With parameters that are sharded already it cannot. So everything is sent here, unit by unit, before it
  is sharded, and Accelerate is told that there is nothing left to do.
- *Optimizers.* Accelerate finds an optimizer's parameters again by the address of their data, which packing and sharding
  change for frozen ones. An optimizer never touches those: they are taken out of it, and where it would keep the 16-bit
  weights alive that were to be packed, that is an error.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from hf_zeropp.comm.topology import detect_ranks_per_node, get_topology
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.frozen.modules import adapter_modules, convert_frozen, quantize_frozen, refuse_foreign_quantizer
from hf_zeropp.frozen.units import broadcast_parameters, shard_frozen
from hf_zeropp.ops.frozen_format import FrozenFormat

if TYPE_CHECKING:
    from hf_zeropp.integrations.accelerate import ZeroPPPlugin

logger = logging.getLogger(__name__)


def prepare_frozen(plugin: ZeroPPPlugin, config: ZeroPPConfig, model: nn.Module, device_type: str) -> None:
    """Pack (``frozen_bits``) and shard the frozen weights of ``model``. Nothing happens the second time."""
    if isinstance(model, torch.distributed.fsdp.FSDPModule):  # it is sharded already: `prepare` for a second training
        return
    has_frozen = any(not param.requires_grad for param in model.parameters())
    if not has_frozen or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    refuse_foreign_quantizer(model)
    ranks_per_node = detect_ranks_per_node(config.ranks_per_node, dist.get_world_size())
    node_mesh = get_topology(ranks_per_node, device_type).mesh["node"]
    from_rank_0 = bool(plugin.cpu_ram_efficient_loading)
    if config.frozen_bits is not None:
        pack_base(model, config.frozen_bits, is_source=not from_rank_0 or dist.get_rank() == 0)
    policy = cast(MixedPrecisionPolicy | None, plugin.mixed_precision_policy)  # FSDP2's, by now, as is
    offload = cast(OffloadPolicy | None, plugin.cpu_offload or None)
    shard_frozen(
        model,
        _blocks(plugin, model),
        node_mesh,
        param_dtype=None if policy is None else policy.param_dtype,
        offload_policy=offload,
        from_rank_0=from_rank_0,
    )
    if from_rank_0:
        broadcast_parameters(_unsharded(model))
        plugin.cpu_ram_efficient_loading = False


def pack_base(model: nn.Module, bits: int, *, is_source: bool = True) -> None:
    """Pack what is frozen and not packed yet, but for what ``ZeroPPQuantConfig(skip=...)`` left in 16 bits at loading."""
    configs = (getattr(getattr(module, "config", None), "quantization_config", None) for module in model.modules())
    skip = {part for config in configs for part in getattr(config, "skip", ())}
    if is_source:
        quantize_frozen(model, bits, skip=skip)
    else:
        convert_frozen(model, FrozenFormat(bits), skip)  # shapes alone: rank 0 sends the codes


def _blocks(plugin: ZeroPPPlugin, model: nn.Module) -> list[nn.Module]:
    """The modules Accelerate is going to shard as units of their own."""
    is_block = fsdp2_prepare_auto_wrap_policy(plugin, model)
    return [module for module in model.modules() if is_block is not None and is_block(module)]


def _unsharded(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not isinstance(module, torch.distributed.fsdp.FSDPModule)]


def watch_prepare() -> None:
    """Wrap ``Accelerator._prepare_fsdp2`` once: there model and optimizers are seen together."""
    original = Accelerator._prepare_fsdp2
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def prepare(self: Accelerator, *objects: Any) -> Any:
        config = getattr(self.state.fsdp_plugin, "zeropp_config", None)
        if config is not None:
            self.state.fsdp_plugin.scaler = self.scaler
            for optimizer in (obj for obj in objects if isinstance(obj, torch.optim.Optimizer)):
                models = [obj for obj in objects if isinstance(obj, nn.Module)]
                drop_frozen(optimizer, models, config.frozen_bits)
        return original(self, *objects)

    Accelerator._prepare_fsdp2 = prepare  # type: ignore[method-assign]


def drop_frozen(optimizer: torch.optim.Optimizer, models: list[nn.Module], frozen_bits: int | None) -> None:
    """Take frozen parameters out of an optimizer, which has no use for them.

    Raises:
        ValueError: it holds weights that are packed or about to be, or such that the model does not have (any more).
    """
    names = {param: name for model in models for name, param in model.named_parameters()}
    kept = {
        param for model in models for module in adapter_modules(model) for param in module.parameters(recurse=False)
    }
    held = [param for group in optimizer.param_groups for param in group["params"]]
    frozen = [param for param in held if not param.requires_grad and param not in kept]
    packed = [param for param in frozen if frozen_bits is not None or not param.is_floating_point()]
    foreign = [param for param in frozen if param not in names]
    if packed or foreign:
        example = names.get((packed or foreign)[0], "one that is no parameter of the model any more")
        raise ValueError(
            f"The optimizer holds {len(packed or foreign)} frozen parameters ({example}, ...), which would keep their 16-bit "
            "values in memory after packing. Build it from the trainable ones, after packing: "
            "AdamW(param for param in model.parameters() if param.requires_grad)."
        )
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param.requires_grad or param in kept]
