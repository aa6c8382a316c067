"""Embeddings and heads of a Transformers model.

They stay in 16 bits while other frozen weights are packed. People train these beside a packed base: the head of a classifier,
tokens that ``resize_token_embeddings`` has added, copies that PEFT makes (``modules_to_save``). A packed weight can neither be
trained nor change its size. So the quantizers of Transformers leave such modules as they are, and packing does too, unless it is
told ``pack_embeddings=True``.

All of this is read as attributes, so that a model of another kind needs no Transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn as nn

GETTERS = ("get_input_embeddings", "get_output_embeddings")


def embeddings(model: nn.Module) -> list[nn.Module]:
    """Return the input and the output embedding that ``model`` names, those of the two that it has."""
    found = (getattr(model, name)() for name in GETTERS if hasattr(model, name) and can_tell(model, name))
    return [module for module in found if isinstance(module, nn.Module)]


def can_tell(model: nn.Module, getter: str) -> bool:
    """Whether ``model`` answers this one of ``GETTERS``. Some models say by an exception that they have no embedding."""
    try:
        getattr(model, getter, lambda: None)()
    except (NotImplementedError, AttributeError):
        return False
    return True


def embeddings_and_heads(model: nn.Module) -> set[nn.Module]:
    """Return the embeddings of ``model``, its heads, and the modules that PEFT trains copies of, with all inside.

    A head is what a Transformers model has beside its base model: ``lm_head``, ``score``, ``classifier``.
    """
    found: set[nn.Module] = {module for module in model.modules() if isinstance(module, nn.Embedding)}
    for whole, base in base_models(model):
        found |= set(whole.modules()) - set(base.modules())
    for module in model.modules():
        for each in (*embeddings(module), getattr(module, "original_module", None)):
            found |= set(each.modules()) if isinstance(each, nn.Module) else set()
    return found


def base_models(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Iterate over the Transformers models in ``model`` that have heads, each with the base model under its heads."""
    for module in model.modules():
        # The class is asked, because PEFT's wrappers pass questions on to the model inside.
        base = dict(module.named_children()).get(getattr(type(module), "base_model_prefix", ""))
        if base is not None:
            yield module, base
