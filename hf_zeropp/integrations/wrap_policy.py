"""Accelerate: which modules become units, where Accelerate's own choice fails.

Accelerate shards the classes that a model lists in ``_no_split_modules``, then the input embedding, then the final norm with the
output embedding, and the rest with the model. For some models this raises, under stock FSDP2 as well:

- A model with parts (LLaVA, Gemma 3) lists classes for all of its parts. Those that it does not contain are errors.
- The input embedding lies within a block (``ViTEmbeddings``). It cannot be sharded once more.
- An embedding shares its weight, or the head its bias, with a third module (T5, BERT). All users of a parameter have to be in one
  unit, so these embeddings get no unit of their own, and belong to the unit of the whole model.
- Single tokens are trained (PEFT's ``trainable_token_indices``, ``TrainableTokensConfig``). Accelerate compares the weights of
  the embeddings, which PEFT then computes of the base, sharded over a node here, and of the tokens. Tied ones share the tokens,
  and would be two units.
- A model has no input embedding and says so by an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from hf_zeropp.heads import GETTERS, can_tell, embeddings


def block_names(model: nn.Module) -> list[str]:
    """Return the names of ``_no_split_modules`` that name modules of ``model``, none of which contains an embedding."""
    listed = set(getattr(model, "_no_split_modules", None) or ())
    of_model = set(embeddings(model))
    found: dict[str, bool] = {}  # whether one of the class contains an embedding
    for module in model.modules():
        if (name := type(module).__name__) in listed:
            inside = set(module.modules()) - {module}
            found[name] = found.get(name, False) or bool(inside & of_model)
    return sorted(name for name, contains in found.items() if not contains)


@contextlib.contextmanager
def embeddings_found(model: nn.Module) -> Iterator[None]:
    """Keep Accelerate from making units of embeddings that must have none, while it shards."""
    has_none = _shares_with_a_third(model) or _trains_tokens(model)
    hidden = GETTERS if has_none else [name for name in GETTERS if not can_tell(model, name)]
    for name in hidden:
        vars(model)[name] = lambda: None
    try:
        yield
    finally:
        for name in hidden:
            vars(model).pop(name, None)


def _trains_tokens(model: nn.Module) -> bool:
    """Whether single tokens of the embeddings are trained."""
    inside = (module for embedding in embeddings(model) for module in embedding.modules())
    return any(hasattr(module, "trainable_tokens_delta") for module in inside)


def _shares_with_a_third(model: nn.Module) -> bool:
    """Whether a parameter of the embeddings is also used by a module outside of them."""
    own = {module for embedding in embeddings(model) for module in embedding.modules()}
    params = {param for module in own for param in module.parameters(recurse=False)}
    others = (param for module in model.modules() if module not in own for param in module.parameters(recurse=False))
    return any(param in params for param in others)
