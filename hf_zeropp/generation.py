"""Generation inside the node: ``model.generate`` on a model under ZeRO++.

A generated token needs every layer's weights once, and nothing changes them meanwhile. Frozen units never leave the node;
trainable ones crossed it when they last changed, and their secondary shards stay. So a token costs the node hop per layer, within
the node. Three things have to be seen to:

- *Hop 1 first.* It is started for all stale units at once on entry, by all ranks. After that no rank needs another node.
- *Uneven stops.* Ranks that gather together must go on together until the last of them is done. Transformers asks all ranks
  of the world, by an all-reduce for every token, over the slow network. Here the node's ranks ask each other.
- *Adapters.* PEFT's ``generate`` calls the base model and never the PeftModel, which is FSDP2's root and gathers what no
  block owns. ``generate`` is therefore registered as one of its forward methods.

`install_generate` makes ``model.generate`` do all this by itself. ``generation_mode(model, memory_budget=...)`` in addition
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

from hf_zeropp.apply import ZeroPPHandle, get_handle
from hf_zeropp.fsdp.units import Unit, without_compile_wrapper
from hf_zeropp.sizes import parse_bytes

T = TypeVar("T")
_APPLY = "_zeropp_apply"
_IN_ROOT = "_zeropp_in_root"
_WRAPPED = "__wrapped_by_zeropp__"
_active: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def generation_mode(model: nn.Module, memory_budget: int | str | None = None) -> Iterator[nn.Module]:
    """Generate with ``model`` inside: nothing crosses nodes after the first token. Enter it on all ranks.

    Args:
        model: prepared by Accelerate with a ZeroPPPlugin, or passed to ``apply_zeropp``.
        memory_budget: bytes (or "1.5GB", "800MB") of gathered weights to keep on each rank while this lasts. Packed
            frozen weights count as what they are stored in. None keeps none.

    Example:
        >>> with generation_mode(model, memory_budget="4GB"):
        ...     completions = model.generate(**prompts, max_new_tokens=256)
    """
    model = without_compile_wrapper(model)
    if model in _active:
        yield model
        return
    handle = _handle_of(model)
    with ExitStack() as stack:
        _active.add(model)
        stack.callback(_active.discard, model)
        _enter_root(model, lambda: None)
        stack.enter_context(handle.generating())
        if (group := handle.lockstep_group()) is not None:
            stack.enter_context(_stop_together(model, group))
        for unit in _fitting(handle, parse_bytes(memory_budget)):
            stack.enter_context(unit.kept_gathered())
        yield model


def install_generate(model: nn.Module, apply: Callable[[], ZeroPPHandle | None] | None = None) -> None:
    """Make ``model.generate`` run in ``generation_mode``. Once; models without ``generate`` are left alone.

    Args:
        apply: applies ZeRO++ if no forward did yet.
    """
    if apply is not None:
        setattr(model, _APPLY, apply)
    original = getattr(model, "generate", None)
    if original is None or hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with generation_mode(model):
            call = functools.partial(original, *args, **kwargs)
            return _enter_root(model, call) if _bypasses_root(model) else call()

    setattr(generate, _WRAPPED, True)
    vars(model)["generate"] = generate


def _handle_of(model: nn.Module) -> ZeroPPHandle:
    handle = get_handle(model)
    if handle is None and _APPLY in vars(model):
        handle = vars(model)[_APPLY]()
    if handle is None:
        raise ValueError(
            "generation_mode needs a model under ZeRO++: prepare it with Accelerate and a ZeroPPPlugin (not zeropp=False), "
            "or call apply_zeropp(model, config) first."
        )
    return handle


def _bypasses_root(model: nn.Module) -> bool:
    """Whether ``generate`` calls a submodule's forward (PEFT, wrappers) and not the model's own."""
    return not any(cls.__name__ == "GenerationMixin" for cls in type(model).__mro__)


def _enter_root(model: nn.Module, function: Callable[[], T]) -> T:
    """Call ``function`` as if it were the forward of FSDP2's root, whose parameters it may then use."""
    if not isinstance(model, FSDPModule):
        return function()
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
        if not synced_gpus:
            return not this_peer_finished
        unfinished = torch.tensor(0 if this_peer_finished else 1, device=device)
        dist.all_reduce(unfinished, op=dist.ReduceOp.MAX, group=group)
        return bool(unfinished.item())

    generators = [module for module in model.modules() if hasattr(type(module), "_has_unfinished_sequences")]
    for module in generators:
        vars(module)["_has_unfinished_sequences"] = has_unfinished
    try:
        yield
    finally:
        for module in generators:
            del vars(module)["_has_unfinished_sequences"]


def _fitting(handle: ZeroPPHandle, budget: int) -> list[Unit]:
    """The largest units first, as far as they fit: what is kept saves its gather, and large ones save most per unit."""
    kept = []
    for unit in sorted([*handle.frozen_units, *handle.units], key=Unit.gathered_bytes, reverse=True):
        if unit.gathered_bytes() <= budget:
            budget -= unit.gathered_bytes()
            kept.append(unit)
    return kept
