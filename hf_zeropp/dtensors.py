"""Sharded tensors and the part that this rank holds of them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor``: all, where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is sharded as ``like`` is, and of which this rank holds ``local``."""
    if not isinstance(like, DTensor):
        return local
    # Shape and strides are given, because DTensor would otherwise assume that all ranks hold as many rows as this one.
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_tensor_of(tensor: DTensor) -> Tensor:
    """Return the local tensor of a DTensor itself, which ``to_local`` returns a view of, through autograd."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor, as FSDP2 does where it accumulates gradients."""
    tensor._local_tensor = local
