"""The collectives of PyTorch that hops run. Their names, options and limits differ between releases and backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

# torch 2.13 renamed all_gather_into_tensor; both names move one contiguous buffer.
all_gather_buffers = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_rows(
    output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Start the reduce-scatters of all rows in one call, which NCCL runs as one kernel."""
    # torch 2.13 renamed the method.
    start = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return _start_rows(start, output, rows, dist.ReduceScatterOptions(), async_op)  # ``reduceOp`` is a sum already


def all_gather_rows(
    output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Start the all-gathers of all rows in one call, as above; one by one, and to the end, over gloo on a GPU."""
    if rows.is_cuda and group._get_backend(rows.device).name() == "gloo":
        all_gather_row_by_row(output, rows, group)
        return None
    start = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return _start_rows(start, output, rows, AllgatherOptions(), async_op)


def all_gather_row_by_row(output: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Run the all-gather of each row. Gloo's call for all rows ends the process where tensors are a GPU's (pytorch#152645)."""
    for into, row in zip(output.unbind(), rows.unbind(), strict=True):
        all_gather_buffers(into, row, group=group)


def all_reduce_in_place(
    output: torch.Tensor, wire: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Start the sum of ``output`` over the ranks. ``wire`` is the same tensor, as other collectives have two."""
    return dist.all_reduce(output, group=group, async_op=async_op)


def _start_rows(
    start: Callable[..., dist.Work | None], output: torch.Tensor, rows: torch.Tensor, options: Any, async_op: bool
) -> dist.Work | None:
    options.asyncOp = async_op
    work = start(output.unbind(), rows.unbind(), options)
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None
