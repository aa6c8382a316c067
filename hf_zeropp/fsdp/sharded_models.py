"""The FSDP2 modules of a model, and of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn as nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from hf_zeropp import devices
from hf_zeropp.compat.extend import extend
from hf_zeropp.fsdp.units import ROOT, Unit


def find_units(model: nn.Module) -> list[Unit]:
    """The model's units in module order, each once (``fully_shard([a, b])`` makes two modules with one state).

    Raises:
        ValueError: a ``fully_shard`` call made several communication groups (``shard_placement_fn`` with meshes).
    """
    units: list[Unit] = []
    seen: set[int] = set()
    for name, module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        groups = _param_groups(state)
        if len(groups) > 1:
            raise ValueError(
                f"The module {name!r} was sharded into {len(groups)} communication groups (a shard_placement_fn that "
                "names meshes); ZeRO++ needs one per fully_shard call. Call fully_shard on the submodules instead."
            )
        units.extend(Unit(name or ROOT, module, group) for group in groups)
    return units


def initialize_root(module: nn.Module) -> None:
    """Let FSDP2 do what it does before a root's first forward pass, if ``module`` is sharded and about to run one."""
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._lazy_init()


def wait_for_optimizer(module: nn.Module) -> None:
    """Let the current stream wait for the optimizer's step, where FSDP2 was told its end by an event.

    FSDP2 lets its gathers wait for it (``set_post_optim_event``). Weights are read before them here.
    """
    if isinstance(module, FSDPModule):
        event = module._get_fsdp_state()._state_ctx.post_optim_event
        if event is not None and (stream := devices.current_stream(next(module.parameters()).device)) is not None:
            stream.wait_event(event)


def find_sharded_modules() -> list[FSDPModule]:
    """All FSDP2 modules alive in this process, whatever model they belong to. For warnings: ranks may see others."""
    # The list is a copy: a module that is freed meanwhile would change the weak dictionary under the loop.
    modules = (module for module in list(_module_state_mapping) if isinstance(module, FSDPModule))
    return [module for module in modules if any(True for _ in module.parameters())]


def _fsdp_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule))


def _param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """Torch 2.12 and later hold a list of groups, 2.11 one or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def without_compile_wrapper(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(model)`` wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def on_backward(model: nn.Module, action: Callable[[], None]) -> None:
    """Run ``action`` wherever a backward pass enters a unit, behind FSDP2's call that queues its final callback."""

    # FSDP2 looks the method up at each call. Only the first call of a pass queues a callback.
    def register(original: Callable[[], None]) -> None:
        original()
        action()

    for state in {module._get_fsdp_state() for _, module in _fsdp_modules(model)}:
        extend(state, "_register_root_post_backward_final_callback", register)
