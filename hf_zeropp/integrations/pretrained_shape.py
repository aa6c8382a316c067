"""The shape of a Transformers model for ``hf-zeropp estimate``, built on the meta device: without weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_zeropp.estimate.model_shape import ModelShape, ParamShape, UnitShape


def pretrained_shape(source: str) -> ModelShape:
    """Return the shape of the model that a Hugging Face config describes.

    Args:
        source: a hub name, or the path of a folder with a ``config.json``.

    Raises:
        ValueError: Transformers finds no config there.
    """
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source!r} is neither a parameter count (7B, 350M) nor a model Transformers finds: {error}"
        ) from error
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config)
        except ValueError:  # the config is of another kind of model
            model = AutoModel.from_config(config)
    return ModelShape(source, units_of(model))


def units_of(model: PreTrainedModel) -> tuple[UnitShape, ...]:
    """Return the units that Accelerate makes of a Transformers model.

    They are each block, the embeddings unless they are tied to the head, the final norm with the head, and the rest. The
    last two are not resharded after the forward pass, because the backward pass needs them first.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    blocks = {name: module for name, module in model.named_modules() if _is_block(model, module)}
    # Parameters are told apart by identity: a tied weight is one parameter under two names, and must be counted once.
    # The order below decides who gets it, so blocks come first and the rest comes last.
    taken: set[int] = set()
    units = [_unit(name, block.parameters(), taken) for name, block in blocks.items()]
    # Accelerate's final norm is the last one outside the blocks. Norms inside blocks are gathered with their blocks.
    norms = [module for name, module in _outside(model, blocks) if "norm" in name.rpartition(".")[2]]
    # Tied embeddings are gathered with the head: FSDP2 (torch 2.13) raises if two units share a parameter.
    if head is None or head.weight is not embedding.weight:
        units.append(_unit("embeddings", embedding.parameters(), taken))
    tail = [*norms[-1:], *(() if head is None else (head,))]
    units.append(_unit("head", (param for module in tail for param in module.parameters()), taken, reshards=False))
    units.append(_unit("rest", model.parameters(), taken, reshards=False))
    return tuple(unit for unit in units if unit.params)


def _is_block(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Return whether Accelerate gives the module a unit of its own: it reads the same attribute of the model."""
    return type(module).__name__ in (getattr(model, "_no_split_modules", None) or ())


def _outside(model: torch.nn.Module, blocks: Iterable[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules, with their names, that are no blocks and lie in none."""
    prefixes = tuple(f"{name}." for name in blocks)
    return ((name, module) for name, module in model.named_modules() if not f"{name}.".startswith(prefixes))


def _unit(name: str, params: Iterable[torch.nn.Parameter], taken: set[int], *, reshards: bool = True) -> UnitShape:
    """Return a unit of the parameters that no earlier unit has taken. Tied weights belong to the first that has them."""
    own = [param for param in params if id(param) not in taken]
    taken.update(map(id, own))
    return UnitShape(name, tuple(ParamShape(tuple(param.shape), param.requires_grad) for param in own), reshards)
