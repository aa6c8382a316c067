"""The stamp of a unit's parameters, by which a rank sees that operations have changed them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from hf_zeropp.dtensors import local_tensor_of


@dataclasses.dataclass(frozen=True, eq=False)
class WeightStamp:
    """Identity and version counters of a unit's sharded parameters, and of their local tensors, at one moment.

    Both are kept: a DTensor's own counter moves with optimizers and with operations on the parameter, its local
    tensor's with writes through ``to_local()``. Conversions (``model.half()``) keep the parameter object and swap the
    local tensor inside. Writes through ``.data``, raw pointers, ``torch._foreach_*`` or collectives move nothing.
    """

    # An id may be taken again by the successor of a freed tensor, so there are references. Those to parameters are strong:
    # a weak one makes ``model.to()`` fail (``torch.utils.swap_tensors`` refuses tensors with weak references). Those to local
    # tensors are weak, or ``model.cpu()`` would leave the old shards in the memory of the GPU.
    params: tuple[DTensor, ...]
    local_tensors: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, params: Sequence[DTensor]) -> WeightStamp:
        """Take the stamp of ``params`` as they are now."""
        local_tensors = [local_tensor_of(param) for param in params]
        versions = tuple((param._version, local._version) for param, local in zip(params, local_tensors, strict=True))
        return cls(tuple(params), tuple(map(weakref.ref, local_tensors)), versions)

    def matches(self, params: Sequence[DTensor]) -> bool:
        """Return whether ``params`` are the same tensors at the same versions."""
        same_params = all(ours is theirs for ours, theirs in zip(self.params, params, strict=True))
        local_tensors = zip(self.local_tensors, map(local_tensor_of, params), strict=True)
        same_tensors = same_params and all(ours() is theirs for ours, theirs in local_tensors)
        return same_tensors and self.versions == WeightStamp.of(params).versions
