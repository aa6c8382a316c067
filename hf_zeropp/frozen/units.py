"""Frozen units: frozen weights sharded over the node, gathered within it, never sent across.

FSDP2 shards trainable parameters over the world, since their gradients and optimizer states must be. Frozen weights have
neither. A copy in each node, 1/N of it on each rank, costs what hpZ's secondary shards cost, and then nothing is left to
send: no hop 1, in training or in generation.

Each transformer block's frozen leaf modules (linear layers, norms) become one unit *before* the block is sharded, so that
frozen and trainable parameters never share one; embeddings, final norm and head get units of their own.

[Note: the anchor]
FSDP2 frees a unit of several modules when the last of them has run, which for a block is its last linear layer. But DoRA
takes the norm of that layer's weight right after, and a block may skip one of its modules (an idle branch). So an identity
module, the anchor, belongs to the unit too, and runs at the end of the block's forward. It also gives the unit's backward
hook its place: at the block's output, where backward begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hf_zeropp.frozen.modules import adapter_modules


@dataclasses.dataclass
class FrozenUnit:
    """Frozen leaf modules that are gathered together, and the module whose forward uses them."""

    owner: nn.Module
    leaves: list[nn.Module]


def shard_frozen(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    node_mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    offload_policy: OffloadPolicy | None = None,
    from_rank_0: bool = False,
) -> None:
    """Shard the frozen parameters of ``model`` over the node, before ``fully_shard`` takes the trainable ones.

    Args:
        blocks: modules that will become units of their own (transformer layers).
        node_mesh: the ranks of this node.
        param_dtype: what 16- and 32-bit frozen weights are gathered in; packed ones are gathered as they are.
        from_rank_0: rank 0 alone holds the weights; the others receive each unit just before it is sharded, so that no
            other rank ever holds the model.

    Raises:
        RuntimeError: weights are packed, and this torch's FSDP2 shards floating-point parameters only.
    """
    _check_torch(model)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, cast_forward_inputs=False)
    for unit in find_frozen_units(model, blocks):
        if from_rank_0:
            broadcast_parameters(unit.leaves)
        modules = unit.leaves if unit.owner in unit.leaves else [*unit.leaves, _anchor(unit.owner)]
        fully_shard(modules, mesh=node_mesh, mp_policy=policy, offload_policy=offload_policy or OffloadPolicy())


def _check_torch(model: nn.Module) -> None:
    is_packed = any(not param.is_floating_point() for param in model.parameters())
    if is_packed and torch.__version__ < "2.12":
        raise RuntimeError(
            f"Frozen weights packed in integers need a newer torch than {torch.__version__}: its FSDP2 shards floating-point "
            "parameters only. Install torch 2.13, or keep the base in 16 bits (frozen_bits=None)."
        )


def find_frozen_units(model: nn.Module, blocks: Iterable[nn.Module]) -> list[FrozenUnit]:
    """Units in module order. Modules that share a parameter (tied embeddings) share a unit."""
    blocks = set(blocks)
    units: dict[nn.Module, FrozenUnit] = {}
    unit_of_param: dict[nn.Parameter, FrozenUnit] = {}
    for leaf, ancestors in _frozen_leaves(model):
        shared = next(
            (unit_of_param[param] for param in leaf.parameters(recurse=False) if param in unit_of_param), None
        )
        owner = next((module for module in reversed(ancestors) if module in blocks), None) or _user_of(leaf, ancestors)
        unit = shared or units.setdefault(owner, FrozenUnit(owner, []))
        if shared is not None and owner is not leaf:
            unit.owner = model  # used in two places, read by an adapter: gathered until the model's end
        unit.leaves.append(leaf)
        unit_of_param.update(dict.fromkeys(leaf.parameters(recurse=False), unit))
    return list(units.values())


def _frozen_leaves(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules that own parameters, none of them trainable or sharded, and their ancestors (outermost first)."""
    modules, adapters = dict(model.named_modules()), adapter_modules(model)
    for name, module in modules.items():
        params = list(module.parameters(recurse=False))
        is_frozen = bool(params) and not any(param.requires_grad for param in params)
        if not is_frozen or module in adapters or isinstance(module, FSDPModule):
            continue
        parts = name.split(".")
        yield module, [modules[".".join(parts[:i])] for i in range(len(parts))]


def _user_of(leaf: nn.Module, ancestors: list[nn.Module]) -> nn.Module:
    """The module whose forward reads the leaf's weight: an adapter layer around it, else the leaf itself."""
    wraps_leaf = ancestors and getattr(ancestors[-1], "base_layer", None) is leaf
    return ancestors[-1] if wraps_leaf else leaf


def _anchor(owner: nn.Module) -> nn.Module:
    """See [Note: the anchor]."""
    anchor = nn.Identity()
    owner.register_forward_hook(lambda module, args, output: anchor(output))
    return anchor


def broadcast_parameters(modules: Iterable[nn.Module]) -> None:
    """Rank 0's own parameters and buffers of ``modules`` to all ranks, where those on ``meta`` are made first."""
    sent: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, param in list(module.named_parameters(recurse=False)):
            if param not in sent:
                data = torch.empty_like(param, device="cpu") if param.is_meta else param.data
                sent[param] = nn.Parameter(data, param.requires_grad) if param.is_meta else param
                dist.broadcast(data, src=0)
            module.register_parameter(name, sent[param])  # tied ones stay tied
        for buffer in module.buffers(recurse=False):
            dist.broadcast(buffer, src=0)
