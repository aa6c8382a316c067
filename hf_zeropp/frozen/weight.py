"""`PackedWeight`: what ``module.weight`` of a packed module is. A tensor by shape and dtype, decoded when computed with.

It is a view, made anew at every access. Views of it (``w.t()``, ``w[expert]``, ``w.view``) stay packed: they are noted and
replayed on the decoded tensor, and one expert of a 3-D weight is cut out of the codes before they are decoded. Any other
operation decodes. What autograd saves for backward is the view, not what it decodes to.

[Note: packed weights under FSDP2]
In a forward pass the module's parameters are gathered and decode like any tensor. Outside of it they are DTensors, each rank
holding rows of its node's copy. A merge then computes ``weight.data += delta`` with a ``delta`` that is a DTensor over the
world. So a sharded packed weight decodes to what the stock weight would be: a DTensor over the world. The codes are gathered
within the node for it, and a rank decodes its own rows. Written back, it is packed row by row where the rows are stored.

[Note: merging and unmerging]
Packing a merged weight rounds it, and the unmerged difference would be rounded again. So the first write keeps what was
there, and a later write that comes within rounding of it restores the kept codes: unmerged is as if never merged. It costs a
second packed copy of what was merged, a rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from hf_zeropp.ops import frozen_format
from hf_zeropp.ops.frozen_format import FrozenFormat

if TYPE_CHECKING:
    from hf_zeropp.frozen.modules import Packed

aten = torch.ops.aten

_VIEWS = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
}
_IDENTITIES = {aten.detach.default, aten.alias.default}

Owner = tuple["Packed", str]
Views = tuple[tuple[Any, tuple[Any, ...]], ...]


class PackedWeight(Tensor):
    """A weight [..., columns] in the form of its codes and scales.

    Args:
        codes, scales: plain tensors, or DTensors when sharded.
        dtype: what it decodes to.
        owner: the module and the name under which it can be written; None for views.
        views: operations to replay on the decoded tensor: (operator, arguments).
    """

    _is_hf_initialized = True  # transformers must not initialize it anew
    _is_param = True  # counts as nn.Parameter, for which transformers and PEFT ask before they touch `.weight`

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scales: Tensor,
        format: FrozenFormat,
        columns: int,
        dtype: torch.dtype,
        owner: Owner | None = None,
        views: Views = (),
    ) -> PackedWeight:
        like = torch.empty(*codes.shape[:-1], columns, dtype=dtype, device="meta")
        for func, args in views:
            like = func(like, *args)
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=codes.device, requires_grad=False
        )

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        format: FrozenFormat,
        columns: int,
        dtype: torch.dtype,
        owner: Owner | None = None,
        views: Views = (),
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.format = format
        self.columns = columns
        self.owner = owner
        self._views = views

    # mypy knows these two and __repr__ by what Tensor happens to hold, not by PyTorch's protocol for subclasses.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> PackedWeight:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        is_own = isinstance(value, PackedWeight) and value.owner == self.owner
        if not is_own:  # `weight.data += delta` has written already when it assigns its result
            self._write(value)

    def decode(self, mesh: DeviceMesh | None = None) -> Tensor:
        """The dense tensor: plain, or a DTensor over ``mesh`` (default: the world) where the codes are sharded."""
        if isinstance(self.codes, DTensor):
            return self._replay(_decode_sharded(self, mesh or _world_mesh(self.codes)))
        return self._replay(frozen_format.unpack(self.codes, self.scales, self.columns, self.format, self.dtype))

    def _replay(self, dense: Tensor) -> Tensor:
        for func, args in self._views:
            dense = func(dense, *args)
        return dense

    def _view(self, func: Any, args: tuple[Any, ...]) -> PackedWeight:
        is_expert = func is aten.select.int and args[0] == 0 and self.codes.ndim == 3 and not self._views
        if is_expert and not isinstance(self.codes, DTensor):
            codes, scales = self.codes[args[1]], self.scales[args[1]]
            return PackedWeight(codes, scales, self.format, self.columns, self.dtype)
        views = (*self._views, (func, args))
        return PackedWeight(self.codes, self.scales, self.format, self.columns, self.dtype, views=views)

    def _write(self, value: Tensor) -> None:
        if self.owner is None:
            raise RuntimeError(
                "Only a module's packed weight can be written, not a view of it. Assign to module.weight."
            )
        write_weight(*self.owner, value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, kwargs = args[0], kwargs or {}
        if isinstance(first, cls) and func in _IDENTITIES:
            return PackedWeight(
                first.codes, first.scales, first.format, first.columns, first.dtype, first.owner, first._views
            )
        if isinstance(first, cls) and func in _VIEWS and not kwargs:
            return first._view(func, args[1:])
        mesh = next((arg.device_mesh for arg in args if isinstance(arg, DTensor)), None)
        dense_args = tree_map(lambda arg: arg.decode(mesh) if isinstance(arg, cls) else arg, args)
        result = func(*dense_args, **kwargs)
        if func._schema.is_mutable and isinstance(first, cls):
            first._write(dense_args[0])
            return first
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, bits={self.format.bits})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.decode().clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.decode().__reduce_ex__(protocol)


def write_weight(module: Packed, name: str, value: Tensor) -> None:
    """Pack ``value`` into a module's packed weight, in place. See [Note: merging and unmerging]."""
    if isinstance(module, FSDPModule):
        module.reshard()
    weight = module.packed_weight(name)
    if value.shape != weight.shape:
        raise ValueError(f"Cannot assign a weight of shape {tuple(value.shape)} to one of {tuple(weight.shape)}.")
    codes, scales = _local(weight.codes), _local(weight.scales)
    rows = _local_rows(value, weight.codes)
    if not rows.numel():
        return
    kept = module.__dict__.setdefault("_packed_before_write", {})
    if name not in kept:
        kept[name] = _Kept(codes.clone(), scales.clone())
    if kept[name].is_meant_by(rows, weight):
        new_codes, new_scales = kept[name].restore()
    else:
        new_codes, new_scales = frozen_format.pack(rows, weight.format)
        decoded = frozen_format.unpack(new_codes, new_scales, weight.columns, weight.format, torch.float32)
        kept[name].add_rounding(rows.float() - decoded)
    with torch.no_grad():
        codes.copy_(new_codes)
        scales.copy_(new_scales)


class _Kept:
    """Codes and scales before the first write, and how much was rounded since: [Note: merging and unmerging]."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes = codes
        self.scales = scales
        self._rounding: Tensor | float = 0.0  # fp32 [..., 1], largest of each row, summed over the writes

    def restore(self) -> tuple[Tensor, Tensor]:
        self._rounding = 0.0
        return self.codes, self.scales

    def add_rounding(self, errors: Tensor) -> None:
        self._rounding = self._rounding + errors.abs().amax(-1, keepdim=True)

    def is_meant_by(self, rows: Tensor, weight: PackedWeight) -> bool:
        """Whether ``rows`` are what the kept codes decode to, but for rounding."""
        if isinstance(self._rounding, float):
            return False  # not written yet
        before = frozen_format.unpack(self.codes, self.scales, weight.columns, weight.format, torch.float32)
        rows = rows.float()
        # On top of the rounding of codes, that of the arithmetic in the weight's dtype: a sum and a difference.
        slack = 4 * torch.finfo(weight.dtype).eps * torch.maximum(before.abs(), rows.abs()).amax(-1, keepdim=True)
        # Twice the rounding: DoRA divides by factors near 1 when it unmerges.
        return bool(((rows - before).abs() <= 2 * self._rounding + slack).all())


def _decode_sharded(weight: PackedWeight, mesh: DeviceMesh) -> DTensor:
    """Gather the codes within the node, decode this rank's rows of the world. See [Note: packed weights under FSDP2]."""
    codes, scales = _full(weight.codes), _full(weight.scales)
    shape = torch.Size((*codes.shape[:-1], weight.columns))
    (num_rows, *_), (first, *_) = compute_local_shape_and_global_offset(shape, mesh, [Shard(0)])
    rows = slice(first, first + num_rows)
    local = frozen_format.unpack(codes[rows], scales[rows], weight.columns, weight.format, weight.dtype)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _local_rows(value: Tensor, codes: Tensor) -> Tensor:
    """The rows of a full or sharded ``value`` whose codes this rank stores."""
    value = _full(value.detach())
    if not isinstance(codes, DTensor):
        return value
    (num_rows, *_), (first, *_) = compute_local_shape_and_global_offset(
        codes.shape, codes.device_mesh, codes.placements
    )
    return value[first : first + num_rows]


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _world_mesh(codes: DTensor) -> DeviceMesh:
    return init_device_mesh(codes.device_mesh.device_type, (dist.get_world_size(),))
