"""The hooks that tell a model's decisions what happens: forward passes, loaded weights, optimizers' steps."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_zeropp.compat.extend import extend
from hf_zeropp.dtensors import local_tensor_of
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.sharded_models import initialize_root, on_backward, wait_for_optimizer
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.weight_decisions import Entrance, WeightDecisions
from hf_zeropp.heads import base_models, embeddings

# The hooks below stay for the life of the process. Strong references would keep every model that was ever prepared. The
# order must be that of preparation, which all ranks have in common: a listener may run collectives before a step. A weak
# set would give an order by address, another one on each rank.
_listeners: weakref.WeakValueDictionary[int, Decisions] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def listen_to_optimizers(decisions: Decisions) -> None:
    """Tell ``decisions`` of every step of a torch optimizer, as long as they live, after those that were told of before.

    They are told after a step as well, unless it raised. A closure may run forward passes inside of the step.
    """
    _listeners[next(_numbers)] = decisions
    _install_optimizer_hooks()


@functools.cache
def _install_optimizer_hooks() -> None:
    """Install one pair of hooks per process: hooks per model would have to be removed while hooks run, when it dies."""

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # ``args`` begins with the optimizer itself.
        has_closure = len(args) > 1 and args[1] is not None or kwargs.get("closure") is not None
        # The compiler of ``torch.compile(optimizer.step)`` goes through this line, and takes its answer for a constant.
        tell_before(optimizer, has_closure, torch.compiler.is_compiling())

    # Listeners run collectives, which a compiler must not trace.
    @torch.compiler.disable
    def tell_before(optimizer: torch.optim.Optimizer, has_closure: bool, is_compiled: bool) -> None:
        # The list is a copy: a listener may be freed, or a new model prepared, while one of them runs collectives.
        for listener in list(_listeners.values()):
            listener.before_optimizer_step(optimizer, has_closure=has_closure)
        if is_compiled:
            _renew_gradients(param for group in optimizer.param_groups for param in group["params"])

    @torch.compiler.disable
    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for listener in list(_listeners.values()):
            listener.after_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    extend(torch.optim.Muon, "step", _step_of_torchs_muon)


def _renew_gradients(params: Iterable[torch.Tensor]) -> None:
    """Put a new DTensor around the local tensor of every complete gradient, for a compiled optimizer step.

    PyTorch's compiler cannot trace a DTensor whose local tensor was replaced, as it is while a gradient is pending.
    """
    for param in params:
        grad = param.grad
        if isinstance(grad, DTensor):
            # A reference to the old one sees the same memory.
            shape, stride = grad.shape, grad.stride()
            local = local_tensor_of(grad)
            param.grad = DTensor.from_local(local, grad.device_mesh, grad.placements, shape=shape, stride=stride)


def _step_of_torchs_muon(original: Callable[..., Any], self: torch.optim.Muon, *args: Any, **kwargs: Any) -> Any:
    """Let ``torch.optim.Muon`` step, and name this package's where it fails on sharded matrices."""
    try:
        return original(self, *args, **kwargs)
    except RuntimeError as error:
        held = (param for group in self.param_groups for param in group["params"] if isinstance(param, DTensor))
        few = min(held, key=lambda param: param.shape[0], default=None)
        if few is None:
            raise
        # It raises alike on all ranks: what fails is known by shapes and placements.
        raise RuntimeError(
            "torch.optim.Muon failed on sharded matrices. It cannot train a matrix of fewer rows than ranks share (here "
            f"{list(few.shape)} over {list(few.device_mesh.shape)} ranks), such as a head. hf_zeropp.Muon trains all shapes, "
            f"with the same numbers: Muon.of_model(model, lr=...). The error was: {error}"
        ) from error


def hook_passes(model: nn.Module, decisions: Decisions) -> None:
    """Let ``decisions`` know of forward and backward passes of the model and of its units.

    Hooks on forward passes run ahead of FSDP2's own, which gather: they are registered later, and to be first (``prepend``).
    """
    on_backward(model, decisions.gradients.backward.enter)

    # Nodes may run different units of frozen weights: only the ranks of a node gather them together.
    of_nodes = decisions.weights.modules_of_nodes

    def is_hooked(module: nn.Module) -> bool:
        return module is model or (isinstance(module, FSDPModule) and module not in of_nodes)

    units = {name: module for name, module in model.named_modules() if is_hooked(module)}
    for name, module in units.items():
        inner = frozenset(units.values()).intersection(module.modules())
        entrance = Entrance(f"module {name}" if name else f"the model ({type(model).__name__})", inner)
        _hook_forward(module, decisions.weights, entrance)


def hook_loading(model: nn.Module, invalidate: Callable[[], None]) -> None:
    """Call ``invalidate`` after ``load_state_dict`` of any sharded module."""

    def after_load(module: nn.Module, incompatible_keys: Any) -> None:
        invalidate()

    # The hook sees loads into a unit and into anything that contains it. A load into a part of a unit passes it by;
    # the parameters' counters, or their content, tell of that one.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_load_state_dict_post_hook(after_load)


def hook_heads(model: nn.Module, units: Sequence[Unit]) -> None:
    """Gather a head that is a unit of its own as soon as the base model has computed.

    Losses of TRL's and Liger's multiply by the head's weight themselves. The head's forward does not run, so FSDP2 gathers
    nothing. TRL then takes ``full_tensor()`` of the shards, whose backward pass gives each rank its rows of its own gradient and
    loses those of the other ranks. FSDP2 reduces the gradient of a weight that is gathered, whoever gathered it.
    """
    for whole, base in base_models(model):
        inside = {module for each in embeddings(whole) for module in each.modules()} - set(base.modules())
        if own := [unit for unit in units if inside.issuperset(unit.modules)]:
            for unit in own:  # another forward pass may call the head before the backward pass of the first
                unit.stay_gathered_after_forward()
            _hook_head(model, base, own)


def _hook_head(model: nn.Module, base: nn.Module, units: Sequence[Unit]) -> None:
    gathered: list[Unit] = []

    @torch.compiler.disable
    def gather(module: nn.Module, args: Any, output: Any) -> None:
        for unit in units:
            if unit.is_in_forward and not unit.is_unsharded:  # the base model may be called by itself
                unit.gather()
                gathered.append(unit)

    @torch.compiler.disable
    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # otherwise the backward pass reshards
            for unit in gathered:
                unit.reshard()
        gathered.clear()

    base.register_forward_hook(gather)
    model.register_forward_hook(end, always_call=True)


def _hook_forward(module: nn.Module, decisions: WeightDecisions, entrance: Entrance) -> None:
    # An agreement must run at every call and its result decides what follows, so a compiler must not trace it.
    @torch.compiler.disable
    def before_forward(module: nn.Module, args: Any) -> None:
        # FSDP2's hook would do this next. It takes over parameters that were replaced, which ranks agree on here, and names
        # those that are on the meta device still by their full names.
        initialize_root(module)
        wait_for_optimizer(module)
        decisions.enter_forward(entrance)

    @torch.compiler.disable
    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        decisions.leave_forward(entrance)

    module.register_forward_pre_hook(before_forward, prepend=True)
    # A forward pass that raises has to be left as well, or another one of a unit within it would agree on nothing.
    module.register_forward_hook(after_forward, always_call=True)
