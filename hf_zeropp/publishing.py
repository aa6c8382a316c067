"""``publish_weights(model)``: the full weights of a sharded model, one after the other, for an inference engine.

``param.full_tensor()`` gathers each parameter over the whole world, in the dtype of the masters. Here a weight is decoded from
the secondary shards of the node, in the dtype that forward passes compute in. So nothing crosses nodes but what the next forward
pass would send first in any case, and an engine that is fed this way computes with the very weights of training.

One unit is gathered at a time. Adapters are merged on the way, weight by weight, and nothing of the model changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn as nn

from hf_zeropp.frozen.merging import PublishedWeight, adapter_weights, merged_weights
from hf_zeropp.fsdp.units import Unit, without_compile_wrapper
from hf_zeropp.generation import generation_mode, handle_of


def publish_weights(
    model: nn.Module, *, adapters: Literal["merged", "alone"] = "merged"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the names and the full weights of ``model``. Call it on all ranks, and let each go to the end.

    Args:
        model: prepared by Accelerate with a ZeroPPPlugin, or passed to ``apply_zeropp``.
        adapters: ``"merged"`` yields the weights of the base model under its own names, with the active PEFT adapters added to
            them. ``"alone"`` yields the weights of the active adapters and no others, under the names of PEFT's files.

    Yields:
        The name of a weight, and the weight in the dtype in which it is gathered; packed weights are decoded. It is valid
        until the next one is asked for: clone it to keep it. Tied weights come once, under their first name. Buffers do
        not come.

    Raises:
        ValueError: the model is not under ZeRO++, or tensor parallelism cuts its weights; an adapter has no merged form (DoRA, a
            bias of its own, one place of a tied weight) or, alone, trains biases of the base; there is no active adapter; or
            ``adapters`` is another word.

    Example:
        >>> for name, weight in publish_weights(model):
        ...     engine.load_weights([(name, weight)])
    """
    if adapters not in ("merged", "alone"):
        raise ValueError(f"expected adapters 'merged' or 'alone', got {adapters!r}")
    model = without_compile_wrapper(model)
    handle = handle_of(model)
    for unit in handle.units:
        if unit.has_other_parallelism:  # on all ranks, before anything is gathered
            raise ValueError(
                f"publish_weights yields full weights, but other parallelism cuts those of unit {unit.name}. Read "
                "`model.state_dict()` with `full_tensor()` instead, which gathers over both."
            )
    # Inside, weights must not change, and all cross hops that are due have been started for all units at once.
    with generation_mode(model), contextlib.ExitStack() as gathered:
        units = [*handle.frozen_units, *handle.units]
        for unit in units:
            if unit.is_unsharded:  # the modules show the sharded parameters, by which units are told apart
                unit.reshard()
        weights = adapter_weights(model) if adapters == "alone" else merged_weights(model)
        unit_of = {id(param): unit for unit in units for param in unit.params}
        # A merged weight needs its adapters too. Where they have units of their own, these stay gathered, being small.
        pairs = ((weight.param, param) for weight in weights for param in weight.added_params())
        units_of_pairs = ((unit_of.get(id(base)), unit_of.get(id(added))) for base, added in pairs)
        kept = {added: None for base, added in units_of_pairs if added is not None and added is not base}
        for unit in kept:
            gathered.enter_context(unit.kept_gathered())
        yield from _by_unit(weights, unit_of, set(kept))


def _by_unit(
    weights: list[PublishedWeight], unit_of: dict[int, Unit], kept: set[Unit]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights unit by unit: all ranks hold the same units, and gather them in the same order."""
    groups: dict[Unit | None, list[PublishedWeight]] = {}
    for weight in weights:
        groups.setdefault(unit_of.get(id(weight.param)), []).append(weight)
    for unit, members in groups.items():
        # A parameter of no unit is not sharded, and is there already.
        with contextlib.nullcontext() if unit is None or unit in kept else unit.kept_gathered():
            for weight in members:
                yield weight.name, weight.read()
