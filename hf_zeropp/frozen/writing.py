"""Writing a packed weight: PEFT merges an adapter into it, and takes the adapter out again.

[Note: merging and unmerging]
Merging computes ``weight + delta`` and unmerging ``weight - delta``. Packing rounds both results, so the codes after the two
would differ from those before. To prevent this, a write keeps the codes and scales that it replaces, and by how much packing
rounded. If the values of the next write differ from the kept ones by no more than that rounding, it is taken for an unmerge, and
the kept codes are restored. So unmerging restores every bit. Several adapters are merged one on the other, and PEFT unmerges the
last one first, so a stack is kept. The price is a packed copy of each weight for each adapter that is merged into it; where
weights are sharded, of this rank's shard.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zeropp.dtensors import local_part
from hf_zeropp.frozen.storage import as_bytes
from hf_zeropp.frozen.weight import PackedForm, PackedWeight, full_tensor, local_rows
from hf_zeropp.ops import frozen_format

MAX_KEPT = 8
"""Writes to a weight that are kept. More adapters are hardly merged at once, and writes that are no merges must not add up."""


class _Kept(NamedTuple):
    """The codes and scales that a write replaced, and each row's largest error of packing in that write, in fp32 [..., 1]."""

    codes: Tensor
    scales: Tensor
    rounding: Tensor


class WriteHistory:
    """Writes to one packed weight that were not taken back since. See [Note: merging and unmerging]."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=MAX_KEPT)

    def write(self, weight: PackedWeight, value: Tensor) -> None:
        """Pack ``value`` into ``weight``, in place.

        Args:
            weight: the weight of a module, sharded or not.
            value: a dense tensor of the same shape: plain, or a DTensor.

        Raises:
            ValueError: the shapes differ.
        """
        if value.shape != weight.shape:
            raise ValueError(f"Cannot assign a weight of shape {tuple(value.shape)} to one of {tuple(weight.shape)}.")
        codes, scales = local_part(as_bytes(weight.codes)), local_part(as_bytes(weight.scales))
        rows = _rows_stored_here(value, weight.codes)
        if not rows.numel():  # with fewer rows than ranks, some ranks store none
            return
        changed = (rows != _decoded(codes, scales, weight.form, weight.form.dtype)).any(-1, keepdim=True)
        if not changed.any():  # single tokens that were trained are taken out of a tied weight twice
            return
        if self._kept and len(self._kept[-1].codes) > len(codes):  # merged before the weight was sharded
            here = local_rows(weight.codes.shape, weight.codes.device_mesh, weight.codes.placements)  # type: ignore[attr-defined]
            self._kept = deque((_Kept(*(part[here] for part in kept)) for kept in self._kept), MAX_KEPT)
        if self._kept and _is_unmerge(rows, self._kept[-1], weight.form):
            new_codes, new_scales, _ = self._kept.pop()
        else:
            new_codes, new_scales = frozen_format.pack(rows, weight.form.format)
            # Rows that stay as they are would be rounded once more.
            new_codes, new_scales = torch.where(changed, new_codes, codes), torch.where(changed, new_scales, scales)
            rounding = (rows.float() - _decoded(new_codes, new_scales, weight.form)).abs().amax(-1, keepdim=True)
            self._kept.append(_Kept(codes.clone(), scales.clone(), rounding))
        with torch.no_grad():
            codes.copy_(new_codes)
            scales.copy_(new_scales)


def _is_unmerge(rows: Tensor, kept: _Kept, form: PackedForm) -> bool:
    """Whether ``rows`` are the kept weight but for rounding."""
    before, rows = _decoded(kept.codes, kept.scales, form), rows.float()
    # Besides packing, the arithmetic rounds in the weight's dtype: one sum and one difference.
    slack = 4 * torch.finfo(form.dtype).eps * torch.maximum(before.abs(), rows.abs()).amax(-1, keepdim=True)
    # Twice the rounding of packing: DoRA multiplies by factors near 1 when it unmerges.
    return bool(((rows - before).abs() <= 2 * kept.rounding + slack).all())


def _decoded(codes: Tensor, scales: Tensor, form: PackedForm, dtype: torch.dtype = torch.float32) -> Tensor:
    return frozen_format.unpack(codes, scales, form.columns, form.format, dtype)


def _rows_stored_here(value: Tensor, codes: Tensor) -> Tensor:
    """Return the rows of ``value`` whose codes this rank stores: all, where ``codes`` are not sharded."""
    value = full_tensor(value.detach())
    if not isinstance(codes, DTensor):
        return value
    return value[local_rows(codes.shape, codes.device_mesh, codes.placements)]
