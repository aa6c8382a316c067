"""Writing a packed weight: PEFT merges an adapter into it, and takes the adapter out again.

[Note: merging and unmerging]
Merging computes ``weight + delta`` and unmerging ``weight - delta``. Packing rounds both results, so the codes after the two
would differ from those before. To prevent this, the first write keeps the codes and scales that it replaces, and every write
adds up by how much packing rounded. A later write whose values differ from the kept ones by no more than that rounding is
taken for an unmerge, and the kept codes are restored. So unmerging restores every bit. The price is a second packed copy of
each weight that was merged; where weights are sharded, a copy of this rank's shard.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zeropp.dtensors import local_part
from hf_zeropp.frozen.storage import as_bytes
from hf_zeropp.frozen.weight import PackedForm, PackedWeight, full_tensor, local_rows
from hf_zeropp.ops import frozen_format


class WriteHistory:
    """Writes to one packed weight: what the first one replaced, and the rounding since. See [Note: merging and unmerging]."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None  # codes and scales before the first write
        self._rounding: Tensor | None = None  # fp32 [..., 1]: each row's largest error, summed over the writes since

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
        if self._kept is None:
            self._kept = codes.clone(), scales.clone()
        if self._is_unmerge(rows, weight.form):
            new_codes, new_scales = self._kept
            # The next write is a first one again: other codes may be loaded before it.
            self._kept = self._rounding = None
        else:
            new_codes, new_scales = frozen_format.pack(rows, weight.form.format)
            self._add_rounding(rows, new_codes, new_scales, weight.form)
        with torch.no_grad():
            codes.copy_(new_codes)
            scales.copy_(new_scales)

    def _add_rounding(self, rows: Tensor, codes: Tensor, scales: Tensor, form: PackedForm) -> None:
        decoded = frozen_format.unpack(codes, scales, form.columns, form.format, torch.float32)
        errors = (rows.float() - decoded).abs().amax(-1, keepdim=True)
        self._rounding = errors if self._rounding is None else self._rounding + errors

    def _is_unmerge(self, rows: Tensor, form: PackedForm) -> bool:
        """Whether ``rows`` are the kept weight but for rounding."""
        if self._kept is None or self._rounding is None:  # nothing was written since the codes were kept
            return False
        kept = frozen_format.unpack(*self._kept, form.columns, form.format, torch.float32)
        rows = rows.float()
        # Besides packing, the arithmetic rounds in the weight's dtype: one sum and one difference.
        slack = 4 * torch.finfo(form.dtype).eps * torch.maximum(kept.abs(), rows.abs()).amax(-1, keepdim=True)
        # Twice the rounding of packing: DoRA multiplies by factors near 1 when it unmerges.
        return bool(((rows - kept).abs() <= 2 * self._rounding + slack).all())


def _rows_stored_here(value: Tensor, codes: Tensor) -> Tensor:
    """Return the rows of ``value`` whose codes this rank stores: all, where ``codes`` are not sharded."""
    value = full_tensor(value.detach())
    if not isinstance(codes, DTensor):
        return value
    return value[local_rows(codes.shape, codes.device_mesh, codes.placements)]
