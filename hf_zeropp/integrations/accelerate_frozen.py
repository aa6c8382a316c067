"""Accelerate: a model's frozen weights are packed, and sharded within the node, before Accelerate shards the others.

When this happens is told in [Note: Accelerate's order of calls] (accelerate.py). Two habits of Accelerate need attention:

- *Memory-efficient loading.* Only rank 0's weights count. Accelerate moves the model to ``meta``, shards it, and sends full
  tensors afterwards, which does not work for parameters that are sharded already. So all parameters are sent here, frozen ones
  unit by unit before they are sharded, and Accelerate is told that nothing is left to send.
- *Optimizers.* Accelerate finds an optimizer's parameters again by the address of their data, and packing and sharding change
  it for frozen ones. An optimizer never updates those, so they are taken out of it. An optimizer that holds weights which are
  packed would keep their 16-bit values in memory, so this is an error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from hf_zeropp.comm.exchange import exchange, ranks_by, words_of
from hf_zeropp.comm.hosts import agree_on_nodes
from hf_zeropp.comm.topology import get_topology
from hf_zeropp.compat.extend import extend
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.frozen.adapters import adapter_modules
from hf_zeropp.frozen.packing import convert_frozen, dense_modules, quantize_frozen, refuse_foreign_quantizer
from hf_zeropp.frozen.units import broadcast_rest, frozen_parameters, is_sharded, shard_frozen
from hf_zeropp.integrations.lora import peft_targets  # noqa: F401 - lets PEFT make adapters on packed weights
from hf_zeropp.integrations.wrap_policy import embeddings_found
from hf_zeropp.ops.frozen_format import FrozenFormat

logger = logging.getLogger(__name__)


def prepare_frozen(plugin: FullyShardedDataParallelPlugin, config: ZeroPPConfig, model: nn.Module) -> None:
    """Pack (``frozen_bits``) and shard the frozen weights of ``model``. A second call for the same model does nothing.

    Args:
        plugin: Accelerate's, whose policies hold for frozen weights too. Its ``ignored_modules`` are the frozen parameters from
            then on, and ``cpu_ram_efficient_loading`` is off when this function has sent the weights. ``_prepare`` puts both
            back for the next model.
        config: the ZeRO++ settings.
        model: not sharded yet.

    Raises:
        ValueError: another library quantized the model, or some ranks have frozen weights and others none.
    """
    # Sharded already: Accelerate asks twice, and ``prepare`` may be called again.
    if isinstance(model, FSDPModule) or is_sharded(model):
        return
    device = PartialState().device
    assert device is not None  # it is set with the process group
    user_ignored = get_parameters_from_modules(plugin.ignored_modules or (), model, device)
    frozen = {param for param in model.parameters() if not param.requires_grad} - user_ignored
    if not dist.is_initialized() or dist.get_world_size() == 1 or not _agree_on_frozen(bool(frozen)):
        return
    refuse_foreign_quantizer(model)
    # Frozen weights never change, so each node keeps all of them: a gather of them stays within the node in every step.
    # The groups of all nodes are made here already, and ranks that differed in N would wait in there for ever.
    node_mesh = get_topology(agree_on_nodes(config.ranks_per_node), device.type).mesh["node"]
    from_rank_0 = bool(plugin.cpu_ram_efficient_loading)
    if config.frozen_bits is not None:
        # Packing comes before sharding, so that FSDP2 shards codes and scales and gathers them as they are. Ranks other
        # than 0 hold no values under memory-efficient loading, but need the same shapes to receive them.
        has_values = not from_rank_0 or dist.get_rank() == 0
        pack_base(model, config.frozen_bits, pack_embeddings=config.pack_embeddings, has_values=has_values)
    # By now Accelerate has turned both settings into FSDP2's own objects; the field types name FSDP1's as well.
    policy = cast(MixedPrecisionPolicy | None, plugin.mixed_precision_policy)
    offload = cast(OffloadPolicy | None, plugin.cpu_offload or None)
    shard_frozen(
        model,
        _blocks(plugin, model),
        node_mesh,
        param_dtype=None if policy is None else policy.param_dtype,
        offload_policy=offload,
        from_rank_0=from_rank_0,
        ignored=user_ignored,
    )
    plugin.ignored_modules = [_Ignored(model, user_ignored)]
    if from_rank_0:
        # ``shard_frozen`` has sent the frozen units. The trainable parameters follow, which are not sharded yet.
        broadcast_rest(model)
        # Left on, Accelerate would move the model to ``meta`` and send full tensors once more, which fails for the
        # frozen parameters: they are sharded already.
        plugin.cpu_ram_efficient_loading = False


class _Ignored(nn.Module):
    """The parameters that Accelerate must not shard, in the form in which it asks for them: a module that holds them.

    Args:
        model: holds sharded frozen parameters.
        user_ignored: the parameters of ``model`` in the plugin's ``ignored_modules``, as the user has set them.
    """

    def __init__(self, model: nn.Module, user_ignored: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it does not become a submodule
        self._user_ignored = list(user_ignored)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the parameters to ignore."""
        yield from self._user_ignored
        yield from frozen_parameters(self._model[0])


def _agree_on_frozen(has_frozen: bool) -> bool:
    """Return ``has_frozen``, which must be the same on all ranks. Collective over the world.

    Raises:
        ValueError: on all ranks, if it is not.
    """
    # The caller makes process groups next, and all ranks have to take part in that. A rank without frozen parameters would
    # not, and the others would wait for it.
    ranks = ranks_by(enumerate(exchange(has_frozen)))
    if len(ranks) > 1:
        raise ValueError(
            f"Ranks must freeze the same parameters: frozen ones are on {words_of(ranks[True])}, and none on "
            f"{words_of(ranks[False])}. Freeze them, or add the adapter, on all ranks."
        )
    return has_frozen


def pack_base(model: nn.Module, bits: int, *, pack_embeddings: bool = False, has_values: bool = True) -> None:
    """Pack the frozen weights of ``model`` that are not packed yet.

    Modules that ``ZeroPPQuantConfig(skip=...)`` left in 16 bits at loading stay so.

    Args:
        model: a Transformers model, with or without adapters.
        bits: 8 or 4.
        pack_embeddings: whether embeddings and heads are packed too.
        has_values: whether this rank holds the weights. If not, codes get their shapes alone, and rank 0 sends the values.
    """
    # PEFT may have wrapped the model, and the settings stand on the wrapped one. So all modules are asked.
    configs = (getattr(getattr(module, "config", None), "quantization_config", None) for module in model.modules())
    skip = {part for config in configs for part in getattr(config, "skip", ())}
    if has_values:
        quantize_frozen(model, bits, skip=skip, pack_embeddings=pack_embeddings)
    else:
        convert_frozen(model, FrozenFormat(bits), dense_modules(model, skip, pack_embeddings=pack_embeddings))


def _blocks(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[nn.Module]:
    """Return the modules that Accelerate is going to shard as units of their own."""
    is_block = fsdp2_prepare_auto_wrap_policy(plugin, model)
    blocks = [module for module in model.modules() if is_block is not None and is_block(module)]
    embedding = getattr(model, "get_input_embeddings", lambda: None)()  # Accelerate makes it a unit as well
    return blocks if embedding is None else [*blocks, embedding]


def patch_prepare() -> None:
    """Extend ``Accelerator._prepare_fsdp2``, where a model and its optimizers are seen together. Repeated calls do nothing.

    Optimizers lose their frozen parameters before Accelerate notes where each parameter's data lies.
    """
    # The class is patched and not an instance, because a plugin is constructed before the Accelerator that uses it.
    extend(Accelerator, "_prepare_fsdp2", _prepare)


def _prepare(original: Callable[..., Any], self: Accelerator, *objects: Any) -> Any:
    plugin = self.state.fsdp_plugin
    if not hasattr(plugin, "zeropp_config"):  # Accelerate's own
        return original(self, *objects)
    config = plugin.zeropp_config
    models = [obj for obj in objects if isinstance(obj, nn.Module)]
    for optimizer in (obj for obj in objects if isinstance(obj, torch.optim.Optimizer) and config is not None):
        # The original replaces an optimizer's parameters by placeholders, which do not tell whether a parameter was frozen. So
        # frozen ones are taken out before.
        drop_frozen(optimizer, models, config.frozen_bits)
    # ``prepare_frozen`` changes these for one model. Accelerate reads them until the original returns.
    as_set = plugin.ignored_modules, plugin.cpu_ram_efficient_loading
    try:
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(embeddings_found(model))
            return original(self, *objects)
    finally:
        plugin.ignored_modules, plugin.cpu_ram_efficient_loading = as_set


def drop_frozen(optimizer: torch.optim.Optimizer, models: list[nn.Module], frozen_bits: int | None) -> None:
    """Take frozen parameters out of an optimizer, which has no use for them. Adapters stay, frozen or not.

    Args:
        optimizer: changed in place.
        models: the models it may train.
        frozen_bits: bits in which frozen weights are going to be packed; None: not at all.

    Raises:
        ValueError: it holds weights that are packed or about to be, or frozen ones that belong to none of the models.
    """
    names = {param: name for model in models for name, param in model.named_parameters()}
    # PEFT freezes adapters that are not active, and trains them once they are activated. They have to stay in the
    # optimizer.
    adapters = {
        param for model in models for module in adapter_modules(model) for param in module.parameters(recurse=False)
    }
    held = [param for group in optimizer.param_groups for param in group["params"]]
    frozen = [param for param in held if not param.requires_grad and param not in adapters]
    packed = [param for param in frozen if frozen_bits is not None or not param.is_floating_point()]
    # A frozen parameter outside the models may be a dense weight whose module was packed after the optimizer was built.
    # The optimizer alone keeps its memory then.
    foreign = [param for param in frozen if param not in names]
    if packed or foreign:
        example = names.get((packed or foreign)[0], "one that is not a parameter of the model any more")
        raise ValueError(
            f"The optimizer holds {len(packed or foreign)} frozen parameters ({example}, ...). Weights that are packed cannot be "
            "in it, and dense ones that will be packed would stay in memory. Build it from the trainable parameters: "
            "AdamW(param for param in model.parameters() if param.requires_grad)."
        )
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param.requires_grad or param in adapters]
    if frozen and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%d frozen parameters (%s, ...) were taken out of the %s. Those that shall train must be trainable before prepare.",
            len(frozen),
            names[frozen[0]],
            type(optimizer).__name__,
        )
