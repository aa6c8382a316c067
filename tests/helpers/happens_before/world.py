"""A world of many ranks in one process: PyTorch's fake process group, in which the others have what this rank has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_zeropp import apply
from hf_zeropp.comm import topology


@contextlib.contextmanager
def fake_world(num_ranks: int) -> Iterator[set[str]]:
    """Make this process rank 0 of ``num_ranks``.

    Yields:
        The names of the groups that the package makes for the host's memory. It grows as they are made.
    """
    host_groups: set[str] = set()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)

    def new_cpu_group(shard_groups: Any) -> dist.ProcessGroup:
        group = dist.new_group(list(shard_groups[0]))
        host_groups.add(group.group_name)
        return group

    try:
        # Gloo would wait for the other ranks, and the fake group has no timeout.
        with mock.patch.object(apply, "new_cpu_group", new_cpu_group):
            with mock.patch.object(topology, "world_timeout", lambda: timedelta(minutes=1)):
                yield host_groups
    finally:
        dist.destroy_process_group()


def answer(func: Any, group: dist.ProcessGroup, values: dict[str, Any]) -> None:
    """Fill the output of a collective as if every other rank had this rank's input. The fake group leaves it as it is."""
    name, rank, size = func._schema.name, group.rank(), group.size()
    if name == "c10d::_allgather_base_":
        output, input = values["output_tensor"], values["input_tensor"]
        output.view(size, -1).copy_(input.clone().view(1, -1))
    elif name == "c10d::allgather_into_tensor_coalesced_":
        for output, input in zip(values["outputs"], values["inputs"], strict=True):
            output.view(size, -1).copy_(input.clone().view(1, -1))
    elif name == "c10d::alltoall_base_":
        output, input = values["output"], values["input"]
        output.view(size, -1).copy_(input.view(size, -1)[rank : rank + 1])
    elif name == "c10d::_reduce_scatter_base_":
        output, input = values["output_tensor"], values["input_tensor"]
        output.view(-1).copy_(input.view(size, -1)[rank])
    elif name == "c10d::reduce_scatter_tensor_coalesced_":
        for output, input in zip(values["outputs"], values["inputs"], strict=True):
            output.view(-1).copy_(input.view(size, -1)[rank])
    elif name == "c10d::allgather_":
        for outputs, input in zip(values["output_tensors"], values["input_tensors"], strict=True):
            torch._foreach_copy_(outputs, [input] * size)
