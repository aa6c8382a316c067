"""The weights of a model with adapters, as an inference engine knows them: merged into the base's, or alone.

PEFT's layers are read by their attributes, as in ``adapters.py``. A layer's base weight is found under the layer's own name, a
module that is trained as a full copy (``modules_to_save``) stands for the original, rows that are trained
(``trainable_token_indices``) stand for the original's, and the other adapters' parameters have no place of their own in the
merged model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from hf_zeropp.frozen.adapters import adapter_modules, initial_that_changed_base, wrapped_model
from hf_zeropp.frozen.modules import CODES, SCALES, Packed
from hf_zeropp.frozen.weight import PackedWeight

# Modules that torch.compile and activation checkpointing put around a module, whose names no checkpoint has.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")
# PEFT's, whose name the files of a base do not have. Those of an adapter do: one of two on the same fused experts lies behind it.
_BASE_LAYER = re.compile(r"(^|\.)(token_adapter\.)?base_layer(?=\.|$)")
# PEFT's packages of adapters whose ``get_delta_weight`` returns what is added to the weight. That of others (OFT, HRA, HiRA, ...)
# returns a factor.
_ADDING = "c3a deft delora fourierft gralora loha lokr lora osf psoft randlora shira vblora vera waveft".split()
# The packages among them whose ``get_delta_weight`` has the layout of a Linear's weight, also for a layer of Conv1D, which stores
# its weight transposed.
_ADDING_TO_LINEAR = ("fourierft", "waveft")
# PEFT's types of adapters whose files hold their parameters and nothing else. Those of others (VeRA, SHiRA, ...) hold projections
# that layers share, or the places of single weights, without which an engine would compute with others.
_ALONE = (
    "adalora beft boft c3a deft fourierft gralora hira hra ia3 ln_tuning loha lokr lora miss oft osf peanut psoft road "
    "trainable_tokens waveft"
).split()
_TOKENS = "trainable_tokens"
"""The package of PEFT's that trains single rows. An adapter holds the rows themselves, not what is added to them."""
_MAGNITUDES = "lora_magnitude_vector"
"""DoRA's, which PEFT's files name as the parameter that it was before it became a module."""


@dataclasses.dataclass(frozen=True)
class Addend:
    """An adapter that adds to a weight, or takes the place of some of its rows.

    Attributes:
        layer: PEFT's layer.
        adapter: the name of the adapter.
    """

    layer: Any
    adapter: str

    @property
    def method(self) -> str:
        """The name of PEFT's package that the layer is of; of the layer's class, where it is of none."""
        # FSDP2 puts a class of its own in front of PEFT's.
        modules = [cls.__module__ for cls in type(self.layer).__mro__ if cls.__module__.startswith("peft.tuners.")]
        return modules[0].split(".")[2] if modules else type(self.layer).__name__

    def add_to(self, weight: Tensor) -> Tensor:
        """Return a weight, in fp32, with the adapter merged into it. The adapter's parameters must be gathered."""
        if self.method != _TOKENS:
            return weight + self.delta().float()
        index = torch.tensor(self.layer.token_indices[self.adapter], device=weight.device)
        return weight.index_copy(0, index, self.layer.trainable_tokens_delta[self.adapter].to(weight))

    def delta(self) -> Tensor:
        """Return what the adapter adds to the weight, as the weight lies. The adapter's parameters must be gathered."""
        # On a CPU, PEFT before 0.20 casts 16-bit adapters to fp32 and back in place, which would detach them from the memory
        # that FSDP2 gathers into: training would go on with the adapters of now.
        parts, memory = dict(self._parts()), [(param, param.data) for param in self.params()]
        try:
            delta = self.layer.get_delta_weight(self.adapter)
            return delta.T if self.method in _ADDING_TO_LINEAR and self.layer.fan_in_fan_out else delta
        finally:
            for name, part in parts.items():
                if getattr(self.layer, name)[self.adapter] is not part:
                    getattr(self.layer, name)[self.adapter] = part
            for param, data in memory:
                if param.data_ptr() != data.data_ptr():
                    param.data = data

    def params(self) -> Iterator[nn.Parameter]:
        """Iterate over the adapter's parameters in this layer."""
        for _, part in self._parts():
            yield from part.parameters() if isinstance(part, nn.Module) else (part,)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Iterate over the names and parts of the adapter: modules, or the matrices themselves (embeddings)."""
        for name in self.layer.adapter_layer_names:
            held = getattr(self.layer, name)
            if self.adapter in held:
                yield name, held[self.adapter]


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

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, which need not be gathered."""
        form = self.module.packed_forms.get(self.leaf) if isinstance(self.module, Packed) else None
        return tuple(self.param.shape) if form is None else (*self.param.shape[:-1], form.columns)

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
            total = addend.add_to(total.float())  # rounded to the weight's dtype once, at the end
        return total.to(weight.dtype)


def merged_weights(model: nn.Module) -> list[PublishedWeight]:
    """Return the weights of the base model, in module order, each parameter once, with the active adapters to add.

    Raises:
        ValueError: an active adapter has no merged form.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"expected adapters that add to a weight (LoRA), got {config.peft_type.value}, which adds inputs."
            )
    modules = dict(wrapped_model(model).named_modules())
    weights: dict[int, PublishedWeight] = {}
    added = set()
    for name, module in _base_modules(model):
        for leaf, param in _stored(module):
            weight = PublishedWeight(_base_name(name, leaf), module, leaf, param, _addends(modules, name, leaf))
            added |= {addend.layer for addend in weight.addends}
            if (first := weights.setdefault(id(param), weight)) is not weight:
                _check_tied(first, weight)
    for name, module in modules.items():
        if hasattr(module, "base_layer") and _active(module) and module not in added:
            raise ValueError(
                f"expected adapters that add to a module's weight, got one on {name}, which has other weights. Leave it out of "
                'target_modules, or publish with adapters="alone".'
            )
    return list(weights.values())


def base_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the floating-point buffers that the base model's files hold, with their names there, each once."""
    seen: set[int] = set()
    for name, module in _base_modules(model):
        for leaf, buffer in module.named_buffers(recurse=False):
            is_stored = buffer.is_floating_point() and leaf not in module._non_persistent_buffers_set
            if is_stored and id(buffer) not in seen:
                seen.add(id(buffer))
                yield _base_name(name, leaf), buffer


def adapter_weights(model: nn.Module) -> list[PublishedWeight]:
    """Return the weights of the active adapter under the names that PEFT's files give them.

    Raises:
        ValueError: no adapter is active, or several are, or an engine needs more than its parameters.
    """
    added, weights = adapter_modules(model), []
    adapters = {adapter for module in model.modules() for adapter in _active(module)}
    if len(adapters) != 1:
        raise ValueError(
            f"expected one active adapter to publish alone, got {sorted(adapters) or 'none'}: activate one with "
            'set_adapter, or publish with adapters="merged".'
        )
    (adapter,) = adapters
    _check_is_complete(model, adapter)
    for name, module in model.named_modules():
        holds_adapters = module in added or bool(getattr(module, "adapter_layer_names", ()))
        for leaf, param in module.named_parameters(recurse=False) if holds_adapters else ():
            parts = f"{name}.{leaf}".split(".")
            if adapter in parts:
                published = ".".join(part for part in parts if part not in (adapter, "modules_to_save"))
                if published.endswith(_MAGNITUDES + ".weight"):
                    published = published.removesuffix(".weight")
                weights.append(PublishedWeight(_published_name(published), module, leaf, param))
    return weights


def _base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules whose own parameters are weights of the merged model."""
    root = wrapped_model(model)
    modules, added = dict(root.named_modules()), adapter_modules(root)
    copies = {
        name: _active_copy(module)
        for name, module in modules.items()
        if "original_module" in dict(module.named_children())  # where PEFT trains single tokens, it is no child
    }
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
    if addend.method in (*_ADDING, _TOKENS) and variant is None and not has_bias:
        return
    kind = type(variant).__name__ if variant is not None else "a bias of its own" if has_bias else addend.method
    raise ValueError(
        f"expected adapters that add to a weight (LoRA), got {kind} in layer {name}, adapter {adapter!r}. Publish with "
        'adapters="alone", or merge it into the dense model with PEFT.'
    )


def _check_tied(first: PublishedWeight, other: PublishedWeight) -> None:
    """Raise ValueError where adapters add to one place of a tied weight and not to the other: merged, the two differ."""
    # Trained rows are the same ones in both places, if PEFT has found both.
    if set(map(id, first.added_params())) != set(map(id, other.added_params())):
        raise ValueError(
            f"expected no adapters on tied weights, got some on {first.name} or {other.name}, which are one parameter: merged, "
            'they would be two. Leave both out of target_modules, or publish with adapters="alone".'
        )


def _check_is_complete(model: Any, adapter: str) -> None:
    """Raise ValueError where an engine needs more than an adapter's own parameters: other tensors, or changes of the base."""
    config = getattr(model, "peft_config", {}).get(adapter)
    kind = getattr(config, "peft_type", "lora").lower()
    if kind not in _ALONE:
        raise ValueError(
            f"expected an adapter that needs its own parameters alone (LoRA), got {kind}, which needs other tensors beside them. "
            'Publish with adapters="merged", or write the files with save_pretrained.'
        )
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise ValueError(
            f'adapters="alone" publishes an adapter\'s own weights, but adapter {adapter!r} also trains biases of the base '
            f'(bias={bias!r}). Publish with adapters="merged".'
        )
    if (initial := initial_that_changed_base(config)) is not None:
        raise ValueError(
            f'adapters="alone" publishes an adapter\'s own weights, but init_lora_weights={initial!r} has changed the base of '
            f"adapter {adapter!r}: an engine would add to the one on disk what the adapter took out of its own. "
            'Publish with adapters="merged".'
        )


def _base_name(module: str, leaf: str) -> str:
    return _published_name(_BASE_LAYER.sub("", f"{module}.{leaf}" if module else leaf))


def _published_name(name: str) -> str:
    return _WRAPPERS.sub("", name).removeprefix(".")
