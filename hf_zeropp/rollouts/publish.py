"""``publish_weights(model)``: the full weights of a sharded model, one after the other, for an inference engine.

``param.full_tensor()`` gathers each parameter over the whole world, in the dtype of the masters. Here a weight is decoded from
the secondary shards of the node, in the dtype that forward passes compute in. So nothing crosses nodes but what the next forward
pass would send first in any case, and an engine that is fed this way computes with the very weights of training.

Names and forms are those of ``save_pretrained``, which engines load. Transformers holds some models in other forms than their
files do: the experts of a layer in one tensor, where files have a tensor for each. Each unit is converted back by itself.

One unit is gathered at a time. Adapters are merged on the way, weight by weight, and nothing of the model changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn as nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_zeropp.frozen.adapters import wrapped_model
from hf_zeropp.frozen.published import PublishedWeight, adapter_weights, base_buffers, merged_weights
from hf_zeropp.fsdp.meshes import has_other_parallelism
from hf_zeropp.fsdp.sharded_models import without_compile_wrapper
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.generation import generation_mode, handle_of, units_of

NamedWeights = Iterator[tuple[str, torch.Tensor]]


def publish_weights(model: nn.Module, *, adapters: Literal["merged", "alone"] = "merged") -> NamedWeights:
    """Iterate over the names and the full weights of ``model``. Call it on all ranks, and let each go to the end.

    Args:
        model: prepared by Accelerate with a ZeroPPPlugin, or passed to ``apply_zeropp``.
        adapters: ``"merged"`` yields the weights of the base model under its own names, with the active PEFT adapters added to
            them. ``"alone"`` yields the weights of the active adapters and no others, under the names of PEFT's files.

    Yields:
        The name of a weight as ``save_pretrained`` writes it, and the weight in the dtype in which it is gathered; packed
        weights are decoded. It is valid until the next one is asked for: clone it to keep it. Tied weights come once, under
        their first name. Behind the merged weights come the floating-point buffers of these files, which some trainings change
        (``e_score_correction_bias``): each rank's own, in their dtype.

    Raises:
        ValueError: the model is not under ZeRO++, or tensor parallelism cuts its weights; an adapter has no merged form (DoRA, a
            bias of its own, one place of a tied weight) or, alone, needs more than its own parameters (VeRA, biases of the
            base, a base that PiSSA has changed); there is no active adapter; a tensor of the files is made of weights of
            several units; or ``adapters`` is another word.

    Example:
        >>> for name, weight in publish_weights(model):
        ...     engine.load_weights([(name, weight)])
    """
    if adapters not in ("merged", "alone"):
        raise ValueError(f"expected adapters 'merged' or 'alone', got {adapters!r}")
    model = without_compile_wrapper(model)
    units = units_of(model, handle_of(model))
    for unit in units:
        if has_other_parallelism(unit):  # on all ranks, before anything is gathered
            raise ValueError(
                f"publish_weights yields full weights, but other parallelism cuts those of unit {unit.name}. Read "
                "`model.state_dict()` with `full_tensor()` instead, which gathers over both."
            )
    # Inside, weights must not change, and all cross hops that are due have been started for all units at once.
    with generation_mode(model), contextlib.ExitStack() as gathered:
        for unit in units:
            if unit.is_unsharded:  # the modules show the sharded parameters, by which units are told apart
                unit.reshard()
        is_alone = adapters == "alone"
        weights = adapter_weights(model) if is_alone else merged_weights(model)
        unit_of = {id(param): unit for unit in units for param in unit.params}
        # A merged weight needs its adapters too. Where they have units of their own, these stay gathered, being small.
        pairs = ((weight.param, param) for weight in weights for param in weight.added_params())
        units_of_pairs = ((unit_of.get(id(base)), unit_of.get(id(added))) for base, added in pairs)
        kept = {each: None for base, each in units_of_pairs if each is not None and each is not base}
        for added in kept:
            gathered.enter_context(added.kept_gathered())
        groups = _by_unit(weights, unit_of)
        # PEFT's files hold adapters as they are.
        converted = None if is_alone else _converted_model(wrapped_model(model), groups)
        for owner, members in groups.items():
            # A parameter of no unit is not sharded, and is there already.
            with contextlib.nullcontext() if owner is None or owner in kept else owner.kept_gathered():
                yield from _read(members, converted)
        if not is_alone:
            yield from _buffers(model, converted)


def _buffers(model: nn.Module, converted: PreTrainedModel | None) -> NamedWeights:
    """Yield the buffers of ``converted``'s files, or of the model's. FSDP2 leaves them whole on every rank."""
    for name, buffer in base_buffers(model):
        named = {name: buffer.detach()}
        yield from (named if converted is None else revert_weight_conversion(converted, named)).items()


Groups = dict[Unit | None, list[PublishedWeight]]


def _by_unit(weights: list[PublishedWeight], unit_of: dict[int, Unit]) -> Groups:
    """Return the weights of each unit, and of none: all ranks hold the same units, and gather them in the same order."""
    groups: Groups = {}
    for weight in weights:
        groups.setdefault(unit_of.get(id(weight.param)), []).append(weight)
    return groups


def _read(members: list[PublishedWeight], converted: PreTrainedModel | None) -> NamedWeights:
    """Yield the weights of a gathered unit, in the forms of ``converted``'s files, or as they are."""
    if converted is None:
        for weight in members:
            yield weight.name, weight.read()
    else:
        yield from revert_weight_conversion(converted, {weight.name: weight.read() for weight in members}).items()


def _converted_model(model: nn.Module, groups: Groups) -> PreTrainedModel | None:
    """Return ``model`` if its files have other forms than its parameters; None if they have the same.

    Raises:
        ValueError: a tensor of the files is made of weights of several units.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    # Tensors without memory show what is converted, before anything is gathered, on all ranks alike.
    shapes = [
        {weight.name: torch.empty(weight.shape, device="meta") for weight in members} for members in groups.values()
    ]
    whole = {name: tensor for group in shapes for name, tensor in group.items()}
    saved = revert_weight_conversion(model, whole)
    if all(saved.get(name) is tensor for name, tensor in whole.items()):
        return None
    alone: dict[str, torch.Tensor] = {}
    for group in shapes:
        alone |= revert_weight_conversion(model, group)
    if different := {name for name in saved.keys() | alone.keys() if _shape(saved, name) != _shape(alone, name)}:
        raise ValueError(
            f"publish_weights converts weights unit by unit, but {min(different)} is made of weights of several units. Let the "
            "wrap policy shard whole layers (transformer_based_wrap), or read `model.state_dict()` with `full_tensor()`."
        )
    return model


def _shape(tensors: dict[str, torch.Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
