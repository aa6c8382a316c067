"""Frozen units: frozen weights that are sharded over the node, gathered within it, and never sent across nodes.

FSDP2 shards trainable parameters over the world, because their gradients and optimizer states need that. Frozen weights have
neither. One copy per node, 1/N of it on each of its N ranks, takes the memory of a secondary shard, and every gather stays
within the node, in training and in generation.

The frozen parameters of a transformer block become one unit, and those outside of all blocks another, *before* FSDP2 shards
the trainable ones. So frozen and trainable parameters never share a unit.

[Note: chosen by parameter]
A module may own frozen and trainable parameters (PEFT's ``bias="lora_only"``), or frozen ones beside submodules with adapters
(the state matrices of Mamba, the attention sinks of gpt-oss, position embeddings of vision models). ``fully_shard`` takes all
that is below a module. So a unit's parameters are named one by one, and all others are ignored. A module that FSDP2 has sharded
hides what is below it from the next ``fully_shard``. So no module of the model becomes one: a unit has two modules of its own.

[Note: opening and closing]
These two modules compute nothing. The first runs when the forward pass of the unit's owner (a block, or the model) begins, and
FSDP2 gathers the unit. The second runs at its end, and FSDP2 frees it. So all that happens in the owner's forward finds the
weights gathered, whichever module reads them: attention that reads a position embedding's weight, DoRA, which takes the norm of
a layer's weight after the layer ran, and a loss that multiplies by the head's weight in pieces. FSDP2's backward hooks hang on
what goes through the two: at the owner's output backward begins, and at its input it ends.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_zeropp.comm.topology import broadcast_from_rank_0
from hf_zeropp.frozen.adapters import MERGE_DENSE, adapter_modules, entrances
from hf_zeropp.frozen.modules import CODES, Packed, Place
from hf_zeropp.frozen.storage import as_floats, fsdp2_needs_floats

_OPENINGS = "_frozen_units"
"""The name under which the model holds the opening modules: FSDP2 finds units by walking through the model's modules."""


@dataclasses.dataclass
class FrozenUnit:
    """Frozen parameters that are gathered together.

    Attributes:
        owner: the module whose forward uses them. They stay gathered until it ends.
        params: for each parameter the places where it is used: one, or several if it is tied.
    """

    owner: nn.Module
    params: list[list[Place]]


def shard_frozen(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    node_mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    offload_policy: OffloadPolicy | None = None,
    from_rank_0: bool = False,
    ignored: Collection[nn.Parameter] = (),
) -> None:
    """Shard the frozen parameters of ``model`` over the node, before ``fully_shard`` takes the trainable ones.

    ``fully_shard`` has to be told to ignore them (``frozen_parameters``).

    Args:
        model: not sharded yet.
        blocks: modules that will become units of their own (transformer blocks).
        node_mesh: the ranks of this node.
        param_dtype: the dtype in which 16- and 32-bit frozen weights are gathered; packed ones are gathered as they are.
        offload_policy: FSDP2's; default: no offloading.
        from_rank_0: rank 0 alone holds the weights. The others receive each unit just before it is sharded, so that no
            other rank ever holds the whole model.
        ignored: parameters that are not to be sharded at all.
    """
    openings = nn.ModuleList()
    for unit in find_frozen_units(model, blocks, ignored):
        if from_rank_0:
            broadcast_parameters(unit.params)
        for part, dtype in _parts(unit, param_dtype):
            # The inputs of frozen modules are cast by the unit of the block around them, if at all.
            policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
            openings.append(_shard(part, node_mesh, policy, offload_policy or OffloadPolicy()))
    # The model holds them and not their owners, because a module may go through its children in its forward.
    model.add_module(_OPENINGS, openings)
    _refuse_merges(model)


def is_sharded(model: nn.Module) -> bool:
    """Whether ``shard_frozen`` was called for the model."""
    return hasattr(model, _OPENINGS)


def frozen_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``model`` that ``shard_frozen`` has sharded."""
    openings = cast(Iterable[_Edge], getattr(model, _OPENINGS, ()))
    return [getattr(module, name) for opening in openings for module, name in opening.places]


def find_frozen_units(
    model: nn.Module, blocks: Iterable[nn.Module], ignored: Collection[nn.Parameter] = ()
) -> list[FrozenUnit]:
    """Group the frozen parameters of ``model`` into units, in module order.

    A parameter inside one of ``blocks`` belongs to that block's unit, any other to the model's. No forward short of the
    model's spans all uses of a parameter that is tied across blocks, so it belongs to the model's unit too.
    """
    ignored, blocks = set(ignored), set(blocks)
    owners: dict[nn.Parameter, nn.Module] = {}
    places: dict[nn.Parameter, list[Place]] = defaultdict(list)
    for module, ancestors in _frozen_candidates(model):
        owner = next((each for each in (module, *reversed(ancestors)) if each in blocks), model)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if not param.requires_grad and param not in ignored and not isinstance(param, DTensor):
                owners[param] = owner if owners.get(param, owner) is owner else model
                places[param].append((module, name))
    units: dict[nn.Module, FrozenUnit] = {}
    for param, owner in owners.items():
        units.setdefault(owner, FrozenUnit(owner, [])).params.append(places[param])
    return list(units.values())


def _refuse_merges(model: nn.Module) -> None:
    """Let adapters' layers whose frozen base is sharded raise where they would merge: PEFT computes with tensors of one mesh."""
    for layer in model.modules():
        added = adapter_modules(layer) if callable(getattr(layer, "merge", None)) else set()
        base = (param for module in layer.modules() if module not in added for param in module._parameters.values())
        if added and any(isinstance(param, DTensor) and not param.requires_grad for param in base):
            cast(Any, layer).merge = cast(Any, layer).unmerge = _refuse_merge


def _refuse_merge(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"An adapter cannot be merged into frozen weights that are sharded within nodes, or taken out of them. {MERGE_DENSE}"
    )


def _frozen_candidates(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Iterate over the modules that are not adapters, with their ancestors, outermost first."""
    modules, adapters = dict(model.named_modules()), adapter_modules(model)
    for name, module in modules.items():
        if module not in adapters:
            parts = name.split(".") if name else []
            yield module, [modules[".".join(parts[:i])] for i in range(len(parts))]


def _parts(unit: FrozenUnit, param_dtype: torch.dtype | None) -> list[tuple[FrozenUnit, torch.dtype | None]]:
    """Return what FSDP2 gathers together, and the dtype to cast it to: the unit, or its packed and its dense weights.

    They are parted where codes and scales are sharded as floats. See [Note: bytes under a float dtype] in storage.py.
    """
    packed = []
    for places in unit.params:
        module, name = places[0]
        if fsdp2_needs_floats() and isinstance(module, Packed) and name in module.stored_params():
            _store_as_float(places)
            packed.append(places)
    if param_dtype is None:
        return [(unit, None)]
    dense = [places for places in unit.params if places not in packed]
    parts = [(FrozenUnit(unit.owner, packed), None), (FrozenUnit(unit.owner, dense), param_dtype)]
    return [(part, dtype) for part, dtype in parts if part.params]


def _store_as_float(places: list[Place]) -> None:
    """Replace a parameter that holds codes or scales by one of a float dtype, in all places where it is used."""
    module, name = places[0]
    floats = as_floats(getattr(module, name).detach(), "codes" if name.endswith(CODES) else "scales")
    param = nn.Parameter(floats, requires_grad=False)
    for module, name in places:
        module.register_parameter(name, param)


class _Edge(nn.Module):
    """The beginning or the end of an owner's forward. See [Note: opening and closing].

    Attributes:
        places: of an opening, one place of each parameter of the unit.
    """

    def __init__(self, places: Collection[Place] = ()) -> None:
        super().__init__()
        self.places = list(places)

    def forward(self, value: Any) -> Any:
        """Return what came. FSDP2's hooks run before and after."""
        return value


def _shard(unit: FrozenUnit, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> _Edge:
    """Make ``unit`` one of FSDP2's, and return its opening module."""
    opening, closing = _Edge([place for place, *_ in unit.params]), _Edge()
    chosen = {getattr(module, name) for module, name in opening.places}
    # FSDP2 looks for parameters, and for all places where they are used, below the modules that it is given.
    opening.add_module("owner", unit.owner)
    fully_shard(
        [opening, closing],
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload_policy,
        ignored_params={param for param in unit.owner.parameters() if param not in chosen},
    )
    del opening.owner
    _run_around(unit.owner, opening, closing)
    return opening


def _run_around(owner: nn.Module, opening: _Edge, closing: _Edge) -> None:
    """Run ``opening`` when the owner's forward begins, and ``closing`` when it ends."""
    # In training PEFT calls its wrapper's forward and then ``forward`` of the model inside, past that model's hooks. In
    # generation it calls the model inside. So the outermost that is called counts.
    running: list[nn.Module] = []
    modules = entrances(owner)
    inside = {module: modules & set(module.modules()) for module in modules}  # itself included

    def is_over(outer: nn.Module, module: nn.Module) -> bool:
        """Whether ``outer``, whose end was not seen, does not run when ``module`` begins."""
        # Its forward pass was interrupted (Ctrl-C), for which PyTorch calls no hook: it would have to run inside of ``module``,
        # or FSDP2 has freed the unit since.
        place, name = opening.places[0]
        return outer in inside[module] or isinstance(getattr(place, name), DTensor)

    def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if running and not is_over(running[0], module):
            return None
        running[:] = [module]
        return opening((args, kwargs))

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        if running != [module]:
            return None
        running.clear()
        return closing(output)

    for module in modules:
        module.register_forward_pre_hook(begin, with_kwargs=True)
        # Also called where the forward ended early: recomputation under activation checkpointing stops by an exception.
        module.register_forward_hook(end, always_call=True)


def broadcast_parameters(params: Iterable[list[Place]]) -> None:
    """Send rank 0's parameters to all ranks. Those that a rank has on ``meta`` are allocated there first.

    Args:
        params: for each parameter the places where it is used.
    """
    for places in params:
        module, name = places[0]
        param = getattr(module, name)
        if param.is_meta:
            # It goes to the CPU: ``fully_shard`` moves this rank's shard, and no more, to the device.
            param = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
            for module, name in places:  # tied ones stay tied
                module.register_parameter(name, param)
        broadcast_from_rank_0(param.data)


def broadcast_rest(model: nn.Module) -> None:
    """Send rank 0's buffers, and its parameters that are not sharded yet, to all ranks."""
    places: dict[nn.Parameter, list[Place]] = defaultdict(list)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(param, DTensor):
                places[param].append((module, name))
    broadcast_parameters(places.values())
    for buffer in model.buffers():
        broadcast_from_rank_0(buffer)
