"""Frozen units: frozen weights that are sharded over the node, gathered within it, and never sent across nodes.

FSDP2 shards trainable parameters over the world, because their gradients and optimizer states need that. Frozen weights have
neither. One copy per node, 1/N of it on each of its N ranks, takes the memory of a secondary shard, and every gather stays
within the node, in training and in generation.

The frozen leaf modules of a transformer block (linear layers, norms) become one unit *before* the block itself is sharded. So
frozen and trainable parameters never share a unit. Embeddings, final norm and head get units of their own.

[Note: the anchor]
FSDP2 frees a unit of several modules when each of them has run, so for a block usually after its last linear layer. That is
too early for DoRA, which takes the norm of that layer's weight right after. And it may not happen at all, when a block skips
one of its modules. So an identity module, the anchor, joins the unit and runs at the end of the block's forward. It also
gives the unit's backward hook its place: at the block's output, where the block's backward begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hf_zeropp.frozen.adapters import adapter_modules, user_of


@dataclasses.dataclass
class FrozenUnit:
    """Frozen leaf modules that are gathered together.

    Attributes:
        owner: the module whose forward uses them. They stay gathered until it ends.
        leaves: modules that own parameters, all of them frozen.
    """

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
        model: not sharded yet.
        blocks: modules that will become units of their own (transformer blocks).
        node_mesh: the ranks of this node.
        param_dtype: the dtype in which 16- and 32-bit frozen weights are gathered; packed ones are gathered as they are.
        offload_policy: FSDP2's; default: no offloading.
        from_rank_0: rank 0 alone holds the weights. The others receive each unit just before it is sharded, so that no
            other rank ever holds the whole model.

    Raises:
        RuntimeError: weights are packed, and this torch's FSDP2 shards floating-point parameters only.
    """
    _check_torch(model)
    # The inputs of frozen modules are cast by the unit of the block around them, if at all.
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
    """Group the frozen leaf modules of ``model`` into units, in module order.

    A leaf inside one of ``blocks`` belongs to that block's unit; any other leaf is a unit of its own, together with the leaves
    that share a parameter with it (tied embeddings).
    """
    blocks = set(blocks)
    units: dict[nn.Module, FrozenUnit] = {}
    unit_of_param: dict[nn.Parameter, FrozenUnit] = {}
    for leaf, ancestors in _frozen_leaves(model):
        own_params = list(leaf.parameters(recurse=False))
        block = next((module for module in reversed(ancestors) if module in blocks), None)
        owner = block or user_of(leaf, ancestors[-1] if ancestors else None)
        shared = next((unit_of_param[param] for param in own_params if param in unit_of_param), None)
        unit = shared or units.setdefault(owner, FrozenUnit(owner, []))
        if shared is not None and owner is not leaf:
            # A parameter is used in two places, and not by its leaves alone: a block or an adapter layer reads it as well. No
            # forward short of the model's spans all uses, so the unit stays gathered until the model's ends.
            unit.owner = model
        unit.leaves.append(leaf)
        unit_of_param.update(dict.fromkeys(own_params, unit))
    return list(units.values())


def _frozen_leaves(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Iterate over modules that own parameters, none of them trainable or sharded; with their ancestors, outermost first."""
    modules, adapters = dict(model.named_modules()), adapter_modules(model)
    for name, module in modules.items():
        params = list(module.parameters(recurse=False))
        is_frozen = bool(params) and not any(param.requires_grad for param in params)
        if not is_frozen or module in adapters or isinstance(module, FSDPModule):
            continue
        parts = name.split(".")
        yield module, [modules[".".join(parts[:i])] for i in range(len(parts))]


def _anchor(owner: nn.Module) -> nn.Module:
    """Return an identity module that runs at the end of ``owner``'s forward. See [Note: the anchor]."""
    anchor = nn.Identity()
    owner.register_forward_hook(lambda module, args, output: anchor(output))
    return anchor


def broadcast_parameters(modules: Iterable[nn.Module]) -> None:
    """Send rank 0's parameters and buffers of ``modules``, without their submodules', to all ranks.

    Parameters that a rank has on ``meta`` are allocated there first.
    """
    sent: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, param in list(module.named_parameters(recurse=False)):
            if param not in sent:
                # A parameter on ``meta`` goes to the CPU: ``fully_shard`` moves this rank's shard, and no more, to the device.
                data = torch.empty_like(param, device="cpu") if param.is_meta else param.data
                sent[param] = nn.Parameter(data, param.requires_grad) if param.is_meta else param
                dist.broadcast(data, src=0)
            module.register_parameter(name, sent[param])  # tied ones stay tied
        for buffer in module.buffers(recurse=False):
            dist.broadcast(buffer, src=0)
