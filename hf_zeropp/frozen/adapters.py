"""Adapters on frozen weights, as PEFT lays them out.

PEFT wraps a layer in a module of its own. The wrapped layer is the attribute ``base_layer`` or ``original_module``; the
modules with the adapters' parameters are the attributes that the class lists in ``adapter_layer_names``. These names are read
as attributes, so that a model without PEFT needs no PEFT.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn

MERGE_DENSE = (
    "To merge an adapter, merge it into the dense model, in one process: "
    'base = AutoModelForCausalLM.from_pretrained(BASE, dtype="bfloat16"), or of a packed folder base = base.dequantize(); '
    "PeftModel.from_pretrained(base, ADAPTER).merge_and_unload().save_pretrained(FOLDER). hf_zeropp.publish_weights gives merged "
    "weights without changing the model."
)
"""The end of errors that refuse a merge, because the frozen weights are packed or sharded: how PEFT merges instead."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Methods of PEFT's ``init_lora_weights`` that also change the base: they move a part of its weights into the new adapter.

The setting may have more behind the name, such as ``"pissa_niter_16"``.
"""


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Return all modules of ``model`` that PEFT added.

    They do not count as frozen, whatever their parameters say: PEFT freezes the adapters that are not active, and makes them
    trainable again when one of them is activated.
    """
    added: set[nn.Module] = set()
    for module in model.modules():
        names = getattr(module, "adapter_layer_names", ())
        children = dict(module.named_children())
        # A module that PEFT trains a full copy of (modules_to_save). Where it trains single tokens, this is no child.
        if "original_module" in children:
            names = [name for name in children if name != "original_module"]
        for part in (getattr(module, name, None) for name in names):
            added |= set(part.modules()) if isinstance(part, nn.Module) else set()
    return added


def wrapped_model(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wraps; without PEFT ``model`` itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def initial_that_changed_base(config: Any) -> str | None:
    """Return ``init_lora_weights`` of an adapter's config, in lower case, if it changed the base as well; None if not."""
    initial = str(getattr(config, "init_lora_weights", "")).lower()
    return initial if initial.startswith(_CHANGES_BASE) else None


def entrances(model: nn.Module) -> set[nn.Module]:
    """Return the modules through which a computation may enter ``model``, itself among them.

    These are the model that PEFT wraps, also where a module of the user's holds PEFT's wrapper, and what ``generate`` calls by
    itself before the forward pass: the encoder of an encoder-decoder, and the parts that make features of images and sounds.
    """
    wrappers = (each for each in model.modules() if callable(getattr(each, "get_base_model", None)))
    found = {model, *(part for wrapper in wrappers for part in (wrapper, wrapped_model(wrapper)))}
    inner = wrapped_model(model)
    get_encoder = getattr(inner, "get_encoder", None)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) and callable(get_encoder):
        found.add(get_encoder())
    if any(hasattr(inner, f"get_{kind}_features") for kind in ("image", "audio", "video")):
        found |= {part for child in (inner, *inner.children()) for part in child.children()}
    return found
