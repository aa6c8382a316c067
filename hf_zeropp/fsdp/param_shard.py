"""One parameter of a unit in a flat shard, as FSDP2 knows it."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


@dataclasses.dataclass(frozen=True)
class ParamShard:
    """One parameter of a unit as every rank's flat shard holds it.

    Attributes:
        name: its name in its module.
        padded_numel: elements in a flat shard, which are equally many on all ranks.
        numel: elements of them that exist on this rank.
        ndim: dimensions of the parameter.
    """

    name: str
    padded_numel: int
    numel: int
    ndim: int


def shard_of(fsdp_param: FSDPParam) -> ParamShard:
    """Describe the parameter's part of a flat shard."""
    return ParamShard(
        name=fsdp_param._module_info.param_name,
        padded_numel=fsdp_param.padded_sharded_param_size.numel(),
        numel=fsdp_param.sharded_size.numel(),
        ndim=fsdp_param.sharded_param.ndim,
    )


def is_extension(fsdp_param: FSDPParam) -> bool:
    """Return whether the parameter is a tensor subclass that makes the input of its gather itself."""
    return hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")


def policy_of(fsdp_param: FSDPParam) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for a parameter. From torch 2.15 on those of a unit may differ in ``param_dtype``."""
    return fsdp_param.mp_policy


def gather_dtype_of(fsdp_param: FSDPParam) -> torch.dtype:
    """Return the dtype in which a parameter is gathered. FSDP2 casts floating-point parameters alone."""
    dtype = fsdp_param.sharded_param.dtype
    return (policy_of(fsdp_param).param_dtype if dtype.is_floating_point else None) or dtype


def grad_dtype_of(fsdp_param: FSDPParam) -> torch.dtype | None:
    """Return the dtype in which a parameter keeps its gradient: ``grad_dtype``, by default its own, since torch 2.15.

    None takes gradients as backward makes them, as FSDP2 does up to torch 2.14.
    """
    return getattr(fsdp_param, "sharded_grad_dtype", None)
