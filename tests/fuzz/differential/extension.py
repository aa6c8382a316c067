"""A tensor that gathers itself: a parameter of FSDP2 with ``fsdp_pre_all_gather``, as torchao's float8 and NF4 tensors are.

What it gathers is not what it holds, so that weights are wrong where the extension was not asked. The numbers that come out
are those that went in, so that an unsharded model of plain tensors is its oracle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

EXTENSION_KINDS = ("doubled", "parts")
"""``doubled`` gathers each weight times two. ``parts`` gathers two tensors that add up to the weight: twice as many elements."""

_aten = torch.ops.aten
# Views and what FSDP2 makes of a parameter while it shards it. All other operators give plain tensors.
_KEEP = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
}


class Extension(torch.Tensor):
    """A tensor around ``data`` that FSDP2 gathers in the way that ``kind`` says (``EXTENSION_KINDS``)."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, kind: str) -> Extension:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype
        )

    def __init__(self, data: torch.Tensor, kind: str) -> None:
        self.data_inside = data
        self.kind = kind

    def __repr__(self) -> str:
        return f"Extension({self.data_inside}, {self.kind!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds: list[str] = []

        def unwrap(tensor: Extension) -> torch.Tensor:
            kinds.append(tensor.kind)
            return tensor.data_inside

        args_inside, kwargs_inside = tree_map_only(Extension, unwrap, (args, kwargs or {}))
        result = func(*args_inside, **kwargs_inside)
        if func in _KEEP:
            return tree_map_only(torch.Tensor, lambda tensor: cls(tensor, kinds[0]), result)
        is_in_place = bool(args) and isinstance(args[0], cls) and result is args[0].data_inside
        return args[0] if is_in_place else result

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return what to gather, padded as FSDP2 demands of parameters that the ranks do not divide."""
        rows = -(-outer_size[0] // mesh.size())
        padded = self.data_inside.new_zeros((rows, *outer_size[1:]), dtype=mp_policy.param_dtype)
        padded[: self.data_inside.shape[0]] = self.data_inside
        return ((padded * 2,) if self.kind == "doubled" else (padded / 2, padded / 2)), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the weights, and the tensors whose memory FSDP2 frees and allocates; or write them into ``out``."""
        weights = all_gather_outputs[0] / 2 if self.kind == "doubled" else all_gather_outputs[0] + all_gather_outputs[1]
        if out is None:
            return weights, (weights,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(weights[: out.shape[0]])
        return None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a plain one, which shares its memory."""
    inside = tensor.detach()
    inside = inside.to_local() if isinstance(inside, DTensor) else inside
    return inside.data_inside if isinstance(inside, Extension) else inside
