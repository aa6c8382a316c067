"""Generation inside the node: ``model.generate`` on a model under ZeRO++.

A generated token needs every layer's weights once, and nothing changes them meanwhile. Frozen units never leave the node;
trainable ones crossed it when they last changed, and their secondary shards stay. So a token costs the node hop per layer, within
the node. Three things have to be seen to:

- *Cross hops first.* They are started for all stale units at once on entry, by all ranks. After that no rank needs another node.
- *Uneven stops.* Ranks that gather together must go on together until the last of them is done. Transformers asks all ranks
  of the world, by an all-reduce for every token, over the slow network. Here the node's ranks ask each other.
- *Adapters.* PEFT's ``generate`` calls the forward pass of the base model and never that of the PeftModel, which is FSDP2's root
  and gathers the weights that no block owns. ``generate`` therefore runs inside a method that is registered as a forward method
  of the root.

``install_generate`` makes ``model.generate`` do all this by itself. ``generation_mode(model, memory_budget=...)`` in addition
keeps units gathered for as long as it lasts, as many as fit: several calls of ``generate``, or one with many tokens, then
gather those once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from hf_zeropp.apply import get_handle
from hf_zeropp.fsdp.sharded_models import find_units, without_compile_wrapper
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.sizes import parse_bytes

T = TypeVar("T")
# Attributes of the model (the last one: of its ``generate``), for the reason that the handle is one: they go when it
# goes.
_APPLY = "_zeropp_apply"
_IN_ROOT = "_zeropp_in_root"
_WRAPPED = "__wrapped_by_zeropp__"
# Models inside ``generation_mode``. ``model.generate`` enters it by itself, also inside a block that the user has
# opened; the inner one must neither agree again nor end what the outer one keeps.
_active: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def generation_mode(model: nn.Module, memory_budget: int | str | None = None) -> Iterator[nn.Module]:
    """Generate with ``model`` inside: nothing crosses nodes after the first token. Enter it on all ranks.

    Args:
        model: prepared by Accelerate with a ZeroPPPlugin, or passed to ``apply_zeropp``. Where ZeRO++ is turned off, FSDP2's own
            gathers cross nodes for every token.
        memory_budget: bytes (or "1.5GB", "800MB") of gathered weights to keep on each rank while this lasts. Packed
            frozen weights count as what they are stored in. None keeps none.

    Raises:
        ValueError: the model is under no ZeroPPPlugin, or a budget is given inside another ``generation_mode`` of the model.

    Example:
        >>> with generation_mode(model, memory_budget="4GB"):
        ...     completions = model.generate(**prompts, max_new_tokens=256)
    """
    model = without_compile_wrapper(model)
    if model in _active:
        if memory_budget is not None:
            raise ValueError(
                f"memory_budget={memory_budget!r}: generation_mode is on for this model already, and the outermost one says "
                "which weights are kept gathered. Pass the budget there."
            )
        yield model
        return
    handle = handle_of(model)
    with ExitStack() as stack:
        _active.add(model)
        stack.callback(_active.discard, model)
        if handle is not None:
            stack.enter_context(handle.traffic.in_rollout())
        # FSDP2 decides which module is the root, and makes the streams that all units share, when the first forward
        # begins. Units cannot be gathered before. And the first must be the model's own: a block whose forward ran
        # first would be taken for a root, and the model's forward would raise from then on.
        _enter_root(model, lambda: None)
        # The order matters. First all ranks agree on stale weights and start their cross hops. With secondary shards
        # this is the last time that ranks of other nodes are needed. Units are kept gathered only after it, from
        # fresh weights.
        if handle is not None:
            stack.enter_context(handle.generating())
            if (group := handle.lockstep_group()) is not None:
                stack.enter_context(_stop_together(model, group))
        # These gathers are collective. All ranks choose the same units in the same order, because sizes are those of
        # whole units and the sort is stable. How much memory is free is not asked: ranks would get different answers.
        for unit in _fitting(units_of(model, handle), parse_bytes(memory_budget)):
            stack.enter_context(unit.kept_gathered())
        yield model


def install_generate(model: nn.Module, apply: Callable[[], ZeroPPHandle | None]) -> None:
    """Make ``model.generate`` run in ``generation_mode``. Once; models without ``generate`` are left alone.

    Args:
        model: the model, sharded now or before its first call of ``generate``.
        apply: applies ZeRO++ if no forward did yet.
    """
    setattr(model, _APPLY, apply)
    # A second call must not wrap the wrapper. It is an attribute of the instance: Accelerate's plugin installs it
    # before the model is sharded, and ``fully_shard`` then gives the model another class, but leaves its attributes
    # alone.
    original = getattr(model, "generate", None)
    if original is None or hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with generation_mode(model):
            # A model that generates by itself calls its own forward, the root's, for every token. PEFT's wrapper
            # calls the base model instead, so the root is entered around the whole call.
            call = functools.partial(original, *args, **kwargs)
            return _enter_root(model, call) if _bypasses_root(model) else call()

    setattr(generate, _WRAPPED, True)
    vars(model)["generate"] = generate


def handle_of(model: nn.Module) -> ZeroPPHandle | None:
    """Return the handle of a model that generates; None where a plugin of ours is turned off.

    ZeRO++ is applied now where the first forward pass would do it.

    Raises:
        ValueError: neither a plugin of ours nor ``apply_zeropp`` knows the model.
    """
    if (handle := find_handle(model)) is None and _APPLY not in vars(without_compile_wrapper(model)):
        raise ValueError(
            "Generation and publishing need a model under ZeRO++: prepare it with Accelerate and a ZeroPPPlugin, or call "
            "apply_zeropp(model, config) first."
        )
    return handle


def units_of(model: nn.Module, handle: ZeroPPHandle | None) -> list[Unit]:
    """Return the units of a model whose handle ``handle_of`` has returned, frozen ones first."""
    return find_units(model) if handle is None else [*handle.frozen_units, *handle.units]


def find_handle(model: nn.Module) -> ZeroPPHandle | None:
    """Do what ``handle_of`` does, but return None for a model that is not under ZeRO++."""
    model = without_compile_wrapper(model)
    handle = get_handle(model)
    # The first forward of all may be one of ``generate``, as in evaluation before training.
    if handle is None and _APPLY in vars(model):
        handle = vars(model)[_APPLY]()
    return handle


def _bypasses_root(model: nn.Module) -> bool:
    """Whether ``generate`` calls a submodule's forward before or in place of the model's own (PEFT, wrappers, encoders)."""
    # ``generate`` of an encoder-decoder calls the encoder by itself.
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return True
    # The class is recognized by its name, since only integrations may import Transformers. ``fully_shard`` puts a class
    # of its own in front, so all base classes are searched.
    return not any(cls.__name__ == "GenerationMixin" for cls in type(model).__mro__)


def _enter_root(model: nn.Module, function: Callable[[], T]) -> T:
    """Call ``function`` as if it were the forward of FSDP2's root, whose parameters it may then use."""
    if not isinstance(model, FSDPModule):
        return function()
    # Registering wraps the method: done twice, it would run the root's hooks twice in every call.
    if not hasattr(model, _IN_ROOT):
        setattr(model, _IN_ROOT, lambda inner: inner())
        register_fsdp_forward_method(model, _IN_ROOT)
    results: list[T] = []  # FSDP2 would cast what the method returns
    getattr(model, _IN_ROOT)(lambda: results.append(function()))
    return results[0]


@contextmanager
def _stop_together(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Let ranks of ``group`` alone, and not the world, agree on whether another token is needed."""

    def has_unfinished(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        # Transformers sets ``synced_gpus`` for sharded models. A caller who turns it off says that ranks stop at the
        # same token.
        if not synced_gpus:
            return not this_peer_finished
        # A rank that has finished goes on running forwards until its group has: its peers need its part of every
        # gather. Ranks of other groups may have stopped, because no gather meets them any more.
        unfinished = torch.tensor(0 if this_peer_finished else 1, device=device)
        dist.all_reduce(unfinished, op=dist.ReduceOp.MAX, group=group)
        return bool(unfinished.item())

    # The class is asked and not the module: PEFT's wrappers forward attributes that they lack to the base model, and
    # would be taken for generators themselves.
    generators = [module for module in model.modules() if hasattr(type(module), "_has_unfinished_sequences")]
    for module in generators:
        # An attribute of the instance, and not of its class, leaves other models of the process alone. As it is no
        # method, it is called without ``self``.
        vars(module)["_has_unfinished_sequences"] = has_unfinished
    try:
        yield
    finally:
        for module in generators:
            del vars(module)["_has_unfinished_sequences"]


def _fitting(units: list[Unit], budget: int) -> list[Unit]:
    """The largest units first, as far as they fit: what is kept saves its gather, and large ones save most per unit."""
    kept = []
    # A unit that does not fit is passed over, and smaller ones after it may still fit.
    for unit in sorted(units, key=Unit.gathered_bytes, reverse=True):
        if unit.gathered_bytes() <= budget:
            budget -= unit.gathered_bytes()
            kept.append(unit)
    return kept
