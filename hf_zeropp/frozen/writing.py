"""Writing a packed weight: PEFT merges adapters into it, and takes them out again.

[Note: merging and unmerging]
Merging computes ``weight + delta`` and unmerging ``weight - delta``. Packing rounds both results, so the codes after the two
would differ from those before. To prevent this, a layer of PEFT's keeps the codes and scales of its base when it merges into one
that holds no adapter of the layer's. PEFT unmerges all of them at once, and then the kept codes are put back. So unmerging
restores every bit, however many adapters were merged. The price is one packed copy of each weight that adapters are merged into,
until they are taken out or the layer is unloaded; where weights are sharded, of this rank's shard.

An unmerge gives another base if the adapter has changed since it was merged, or if something else was written. So the codes are
put back only if the values differ from the kept ones by no more than packing has rounded since. Whether a write is an unmerge is
not asked of values, because a small adapter changes less than that: PEFT's methods say it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zeropp.dtensors import local_part
from hf_zeropp.frozen.storage import as_bytes
from hf_zeropp.frozen.weight import Owner, PackedForm, PackedWeight, full_tensor, local_rows
from hf_zeropp.ops import frozen_format

_KEPT = "_zeropp_kept"
_layer: Any = None
"""The layer of PEFT's that merges or unmerges now."""


@dataclasses.dataclass
class _Kept:
    """A weight before adapters were merged into it.

    Attributes:
        owner: the place of the weight.
        codes: its codes, and
        scales: scales.
        rounding: the sum of each row's largest errors in the writes since, in fp32 [..., 1].
        is_written: whether the unmerge that runs now has changed the weight.
    """

    owner: Owner | None
    codes: Tensor
    scales: Tensor
    rounding: Tensor
    is_written: bool = False


def write(weight: PackedWeight, value: Tensor) -> None:
    """Pack ``value`` into ``weight``, in place.

    Args:
        weight: the weight of a module, sharded or not.
        value: a dense tensor of the same shape: plain, or a DTensor.

    Raises:
        ValueError: the shapes differ.
    """
    if value.shape != weight.shape:
        raise ValueError(
            f"Cannot assign a weight of shape {tuple(value.shape)} to a packed one of {tuple(weight.shape)}. To add tokens, load "
            "or pack the 16-bit model with pack_embeddings=False."
        )
    codes, scales = _stored_here(weight)
    rows = _rows_stored_here(value, weight.codes)
    if not rows.numel():  # with fewer rows than ranks, some ranks store none
        return
    changed = (rows != _decoded(codes, scales, weight.form, weight.form.dtype)).any(-1, keepdim=True)
    if not changed.any():
        return
    new_codes, new_scales = frozen_format.pack(rows, weight.form.format)
    with torch.no_grad():
        # Rows that stay as they are would be rounded once more.
        codes.copy_(torch.where(changed, new_codes, codes))
        scales.copy_(torch.where(changed, new_scales, scales))
    if (kept := _kept_of(_layer, weight)) is not None:
        rows, kept.is_written = rows.float(), True
        error = (rows - _decoded(codes, scales, weight.form)).abs()
        # Besides packing, the arithmetic rounds in the weight's dtype.
        kept.rounding += (error + 2 * torch.finfo(weight.form.dtype).eps * rows.abs()).amax(-1, keepdim=True)


def merge(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Call ``merge`` of a layer of PEFT's, and keep the packed base if it holds no adapter of the layer's yet."""
    weight = _base_weight(layer)
    if weight is not None and not layer.merged_adapters:
        codes, scales = (part.clone() for part in _stored_here(weight))
        rounding = torch.zeros(*codes.shape[:-1], 1, device=codes.device)
        vars(layer)[_KEPT] = _Kept(weight.owner, codes, scales, rounding)
    _call(original, layer, *args, **kwargs)


def unmerge(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Call ``unmerge`` of a layer of PEFT's, and put the kept base back if all adapters are taken out."""
    if (kept := vars(layer).get(_KEPT)) is not None:
        kept.is_written = False
    _call(original, layer, *args, **kwargs)
    weight = _base_weight(layer)
    if layer.merged_adapters or weight is None:
        return
    kept = _kept_of(layer, weight)
    if kept is not None and kept.is_written:
        codes, scales = _stored_here(weight)
        before = _decoded(kept.codes, kept.scales, weight.form)
        # Twice the rounding: DoRA multiplies by factors near 1 when it unmerges.
        if ((_decoded(codes, scales, weight.form) - before).abs() <= 2 * kept.rounding).all():
            with torch.no_grad():
                codes.copy_(kept.codes)
                scales.copy_(kept.scales)
    vars(layer).pop(_KEPT, None)


def keep_shard(layer: Any) -> None:
    """Let a layer of PEFT's, whose base is sharded now, keep no more than this rank's rows."""
    if (weight := _base_weight(layer)) is not None:
        _kept_of(layer, weight)


def _call(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Call a method of ``layer``, whose writes are noted."""
    global _layer
    before, _layer = _layer, layer
    try:
        original(layer, *args, **kwargs)
    finally:
        _layer = before


def _base_weight(layer: Any) -> PackedWeight | None:
    """Return the weight that a layer of PEFT's merges into, if it is packed."""
    base, name = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
    return base.packed_weight(name) if name in getattr(base, "packed_forms", ()) else None


def _kept_of(layer: Any, weight: PackedWeight) -> _Kept | None:
    """Return what ``layer`` keeps of ``weight``, cut to the rows that this rank stores."""
    kept = None if layer is None else vars(layer).get(_KEPT)
    if kept is None or kept.owner != weight.owner:
        return None
    if len(kept.codes) > len(_stored_here(weight)[0]):  # merged before the weight was sharded
        here = local_rows(weight.codes.shape, weight.codes.device_mesh, weight.codes.placements)  # type: ignore[attr-defined]
        # Views would keep the whole tensors.
        kept.codes, kept.scales, kept.rounding = (
            part[here].clone() for part in (kept.codes, kept.scales, kept.rounding)
        )
    return kept


def _stored_here(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return this rank's codes and scales."""
    return local_part(as_bytes(weight.codes)), local_part(as_bytes(weight.scales))


def _decoded(codes: Tensor, scales: Tensor, form: PackedForm, dtype: torch.dtype = torch.float32) -> Tensor:
    return frozen_format.unpack(codes, scales, form.columns, form.format, dtype)


def _rows_stored_here(value: Tensor, codes: Tensor) -> Tensor:
    """Return the rows of ``value`` whose codes this rank stores: all, where ``codes`` are not sharded."""
    value = full_tensor(value.detach())
    if not isinstance(codes, DTensor):
        return value
    return value[local_rows(codes.shape, codes.device_mesh, codes.placements)]
