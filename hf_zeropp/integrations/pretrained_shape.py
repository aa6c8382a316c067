"""The shape of a Transformers model for ``hf-zeropp estimate``, built on the meta device: without weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn as nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hf_zeropp.estimate.model_shape import ModelShape, Packing, ParamShape, UnitShape
from hf_zeropp.frozen.packing import dense_modules, packable_weights
from hf_zeropp.frozen.units import Place, find_frozen_units
from hf_zeropp.heads import GETTERS, embeddings_and_heads
from hf_zeropp.integrations.lora.quantizer import ZeroPPQuantConfig
from hf_zeropp.integrations.lora.stored_tensors import METHOD, check_version
from hf_zeropp.integrations.wrap_policy import block_names, embeddings_found

CHOSEN_EXPERTS = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"
)  # fmt: skip
"""Names under which configs of mixtures say how many experts a token meets."""

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names under which they say how many there are."""


def pretrained_shape(source: str, *, lora_rank: int | None = None) -> ModelShape:
    """Return the shape of the model that a Hugging Face config describes.

    Args:
        source: a hub name, or the path of a folder with a ``config.json``.
        lora_rank: freezes the model, and has PEFT put LoRA adapters of this rank on its linear layers ("all-linear").

    Raises:
        ValueError: Transformers finds no config there, or PEFT makes no adapters for the model.
    """
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source!r} is neither a parameter count (7B, 350M) nor a model Transformers finds: {error}"
        ) from error
    with torch.device("meta"):
        model: nn.Module = build_model(config)
        if lora_rank is not None:
            model = _with_lora(model, lora_rank)
    packing, active = _packing(config), active_share(model, config)
    if packing is None:
        return ModelShape(source, units_of(model), frozen_units_of(model), active=active)
    check_version(packing.version, source)
    packed = Packing(packing.format, packing.pack_embeddings)
    return ModelShape(source, units_of(model), frozen_units_of(model, packing.skip), packed, active)


def build_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of a config, with a head for language models where its kind has one."""
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError:  # the config is of another kind of model
        return AutoModel.from_config(config)


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    if importlib.util.find_spec("peft") is None:
        raise ValueError("--lora needs peft for a model with a config: pip install peft.")
    from peft import LoraConfig, get_peft_model  # an optional dependency

    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


def _packing(config: PretrainedConfig) -> ZeroPPQuantConfig | None:
    """Return how the weights of a checkpoint are packed; None where they are not, or not by this package."""
    stored = getattr(config, "quantization_config", None)
    is_ours = isinstance(stored, dict) and stored.get("quant_method") == METHOD
    return ZeroPPQuantConfig.from_dict(stored) if is_ours else None


def active_share(model: nn.Module, config: PretrainedConfig) -> float:
    """Return the share of a model's parameters that one token meets: of the experts those to which it is sent, and the rest.

    Args:
        model: on any device.
        config: its own, in the names of its family. Where it does not say how many experts a token meets, all count.
    """
    # The dictionary has the names of the family. Attributes may stand for several layers that differ, and raise then.
    settings = config.get_text_config().to_dict()
    settings |= settings.get("ffn_config") or {}  # DBRX
    chosen, experts = (
        next((value for name in names if isinstance(value := settings.get(name), int) and value > 0), None)
        for names in (CHOSEN_EXPERTS, EXPERTS)
    )
    if chosen is None or experts is None:
        return 1.0
    total = routed = 0
    for name, param in model.named_parameters():
        # Shared experts, which every token meets, have another name. Routed ones are modules, or one parameter for all.
        is_routed = "experts" in name.split(".") or (param.ndim == 3 and len(param) == experts)
        total += param.numel()
        routed += param.numel() if is_routed else 0
    return 1 - routed / total * (1 - min(1.0, chosen / experts))


def frozen_units_of(model: nn.Module, skip: Iterable[str] = ()) -> tuple[UnitShape, ...]:
    """Return the units that the Accelerate plugin makes of the frozen parameters of a Transformers model.

    Args:
        model: not sharded, with or without adapters.
        skip: modules that stay in 16 bits where others are packed.
    """
    dense = dense_modules(model, skip, pack_embeddings=True)
    packable = {id(_param(places)) for places in packable_weights(model, dense, frozen_only=True)}
    of_embeddings = {id(param) for module in embeddings_and_heads(model) for param in module.parameters(recurse=False)}
    embedding, _ = _embedding_and_head(model)
    units = []
    for unit in find_frozen_units(model, [*_blocks(model).values(), *([] if embedding is None else [embedding])]):
        params = map(_param, unit.params)
        shapes = tuple(
            ParamShape(tuple(param.shape), False, id(param) in packable, id(param) in of_embeddings) for param in params
        )
        units.append(UnitShape(type(unit.owner).__name__, shapes, spans_model=unit.owner is model))
    return tuple(units)


def _param(places: list[Place]) -> nn.Parameter:
    module, name = places[0]
    return cast(nn.Parameter, getattr(module, name))


def units_of(model: nn.Module) -> tuple[UnitShape, ...]:
    """Return the units that Accelerate makes of a Transformers model.

    They are each block, the embeddings unless they are tied to the head, the final norm with the head, and the rest. The
    last two are not resharded after the forward pass, because the backward pass needs them first.
    """
    embedding, head = _embedding_and_head(model)
    # Parameters are told apart by identity: a tied weight is one parameter under two names, and must be counted once.
    # The order below decides who gets it, so blocks come first and the rest comes last. Of nested blocks the inner come first.
    taken: set[int] = set()
    units = [_unit(name, block.parameters(), taken) for name, block in reversed(_blocks(model).items())][::-1]
    # Accelerate's final norm is the last one among the children of the base model. Other norms lie in blocks, or in the rest.
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    norms = [module for module in base.children() if "Norm" in type(module).__name__]
    # Tied embeddings are gathered with the head: FSDP2 (torch 2.13) raises if two units share a parameter.
    if embedding is not None and (head is None or head.weight is not embedding.weight):
        units.append(_unit("embeddings", embedding.parameters(), taken))
    tail = [*norms[-1:], *(() if head is None else (head,))]
    units.append(_unit("head", (param for module in tail for param in module.parameters()), taken, reshards=False))
    units.append(_unit("rest", model.parameters(), taken, reshards=False))
    return tuple(unit for unit in units if unit.params)


def _embedding_and_head(model: nn.Module) -> list[nn.Module | None]:
    """Return the input and output embeddings, as Accelerate finds them when the plugin prepares a model."""
    with embeddings_found(model):
        return [getattr(model, name, lambda: None)() for name in GETTERS]


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules, by name, that become units of their own: the plugin gives Accelerate the same class names."""
    classes = block_names(model)
    return {name: module for name, module in model.named_modules() if type(module).__name__ in classes}


def _unit(name: str, params: Iterable[nn.Parameter], taken: set[int], *, reshards: bool = True) -> UnitShape:
    """Return a unit of the parameters that no earlier unit has taken. Tied weights belong to the first that has them."""
    own = [param for param in params if id(param) not in taken]
    taken.update(map(id, own))
    return UnitShape(name, tuple(ParamShape(tuple(param.shape), param.requires_grad) for param in own), reshards)
