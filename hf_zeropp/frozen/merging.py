"""The weights of a model with adapters, as an inference engine knows them: merged into the base's, or alone.

PEFT's layers are read by their attributes, as in ``adapters.py``. A layer's base weight is found under the layer's own name, a
module that is trained as a full copy (``modules_to_save``) stands for the original, and the other adapters' parameters have no
place of their own in the merged model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from hf_zeropp.frozen.adapters import adapter_modules, wrapped_model
from hf_zeropp.frozen.modules import CODES, SCALES, Packed
from hf_zeropp.frozen.weight import PackedWeight

# Modules that other libraries put around a module, whose names no checkpoint has: PEFT, torch.compile, activation
# checkpointing.
_WRAPPERS = re.compile(r"(^|\.)(base_layer|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")


@dataclasses.dataclass(frozen=True)
class Addend:
    """An adapter that adds to a weight.

    Attributes:
        layer: PEFT's layer.
        adapter: the name of the adapter.
    """

    layer: Any
    adapter: str

    def delta(self) -> Tensor:
        """Return what the adapter adds to the weight, as PEFT's merging computes it. Its parameters must be gathered."""
        return self.layer.get_delta_weight(self.adapter)

    def params(self) -> Iterator[nn.Parameter]:
        """Iterate over the adapter's parameters in this layer."""
        for name in self.layer.adapter_layer_names:
            held = getattr(self.layer, name)
            if self.adapter in held:  # a module, or the matrix itself (embeddings)
                part = held[self.adapter]
                yield from part.parameters() if isinstance(part, nn.Module) else (part,)


@dataclasses.dataclass(frozen=True)
class PublishedWeight:
    """One weight, and where it is read while its unit is gathered.

    Attributes:
        name: in the published model.
        module: the module that holds it.
        leaf: its name there.
        param: the sharded parameter; that of the codes where the weight is packed.
        addends: adapters to add.
    """

    name: str
    module: nn.Module
    leaf: str
    param: nn.Parameter
    addends: tuple[Addend, ...] = ()

    def added_params(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that must be gathered beside the weight's own."""
        for addend in self.addends:
            yield from addend.params()

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the weight, in its own dtype."""
        weight = getattr(self.module, self.leaf)
        weight = weight.decode() if isinstance(weight, PackedWeight) else weight.detach()
        total = weight
        for addend in self.addends:
            total = total.float() + addend.delta().float()  # one rounding, at the end
        return total.to(weight.dtype)


def merged_weights(model: nn.Module) -> list[PublishedWeight]:
    """Return the weights of the base model, in module order, each parameter once, with the active adapters to add.

    Raises:
        ValueError: an active adapter has no merged form.
    """
    root = wrapped_model(model)
    modules = dict(root.named_modules())
    copies = {name: _active_copy(module) for name, module in modules.items() if hasattr(module, "original_module")}
    weights, seen = [], set()
    for name, module in _base_modules(root, modules, copies):
        for leaf, param in _stored(module):
            if id(param) not in seen:
                seen.add(id(param))
                full_name = _published_name(f"{name}.{leaf}" if name else leaf)
                weights.append(PublishedWeight(full_name, module, leaf, param, _addends(modules, name, leaf)))
    return weights


def adapter_weights(model: nn.Module) -> list[PublishedWeight]:
    """Return the weights of the active adapter under the names that PEFT's files give them.

    Raises:
        ValueError: no adapter is active, or several are.
    """
    added, weights = adapter_modules(model), []
    adapters = {adapter for module in model.modules() for adapter in _active(module)}
    if len(adapters) != 1:
        raise ValueError(
            f"expected one active adapter to publish alone, got {sorted(adapters) or 'none'}: activate one with "
            'set_adapter, or publish with adapters="merged".'
        )
    (adapter,) = adapters
    for name, module in model.named_modules():
        holds_adapters = module in added or bool(getattr(module, "adapter_layer_names", ()))
        for leaf, param in module.named_parameters(recurse=False) if holds_adapters else ():
            parts = f"{name}.{leaf}".split(".")
            if adapter in parts:
                published = ".".join(part for part in parts if part not in (adapter, "modules_to_save"))
                weights.append(PublishedWeight(_published_name(published), module, leaf, param))
    return weights


def _base_modules(
    root: nn.Module, modules: dict[str, nn.Module], copies: dict[str, nn.Module | None]
) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules whose own parameters are weights of the merged model."""
    added = adapter_modules(root)
    for name, module in modules.items():
        wrapper = next((each for each in copies if name == each or name.startswith(f"{each}.")), None)
        if wrapper is None:
            if module not in added:
                yield name, module
        elif name == wrapper:
            chosen = copies[wrapper] or modules[f"{wrapper}.original_module"]
            for inner, part in chosen.named_modules():
                yield f"{wrapper}.{inner}" if inner else wrapper, part


def _active(module: Any) -> list[str]:
    """Return the adapters that a module of PEFT's computes with; none where they are off or merged."""
    if not hasattr(module, "adapter_layer_names") or module.disable_adapters or getattr(module, "merged", False):
        return []
    held = {key for attribute in module.adapter_layer_names for key in getattr(module, attribute, {})}
    return [name for name in module.active_adapters if name in held]


def _active_copy(wrapper: Any) -> nn.Module | None:
    """Return the copy of a module that is trained in full and active; None where the original counts."""
    active = _active(wrapper)
    return wrapper.modules_to_save[active[0]] if active else None


def _stored(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over a module's own weights. Codes stand for a packed weight, since its unit is theirs."""
    packed = module.packed_forms if isinstance(module, Packed) else {}
    for leaf, param in module.named_parameters(recurse=False):
        if leaf.removesuffix(CODES) in packed:
            yield leaf.removesuffix(CODES), param
        elif leaf.removesuffix(SCALES) not in packed:
            yield leaf, param


def _addends(modules: dict[str, nn.Module], name: str, leaf: str) -> tuple[Addend, ...]:
    """Return the adapters on the weight ``leaf`` of a module, whose layers are the modules around it."""
    found = []
    while name.endswith("base_layer"):
        name = name.removesuffix("base_layer").removesuffix(".")
        layer: Any = modules[name]
        if getattr(layer, "parameter_name", "weight") == leaf:
            found += [Addend(layer, adapter) for adapter in _active(layer)]
    for addend in found:
        _check_merges(addend, name)
    return tuple(found)


def _check_merges(addend: Addend, name: str) -> None:
    layer, adapter = addend.layer, addend.adapter
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    has_bias = bool(getattr(layer, "lora_bias", {}).get(adapter, False))
    if hasattr(layer, "get_delta_weight") and variant is None and not has_bias:
        return
    kind = type(variant).__name__ if variant is not None else "a bias of its own" if has_bias else type(layer).__name__
    raise ValueError(
        f"expected adapters that add to a weight (LoRA), got {kind} in layer {name}, adapter {adapter!r}. Publish with "
        'adapters="alone", or write merged weights with `hf-zeropp export`.'
    )


def _published_name(name: str) -> str:
    return _WRAPPERS.sub("", name).removeprefix(".")
