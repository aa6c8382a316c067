"""A model to train under the happens-before checker, where one process stands for all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toy import POLICIES, TinyLM, loss_of, make_lm, shard, tokens_of

from hf_zeropp import ZeroPPHandle, apply_zeropp, plan
from hf_zeropp.comm.topology import WorldGroups
from hf_zeropp.fsdp.meshes import UnitMesh, world_groups

RANKS_PER_NODE = 8
DELTA = {"qwz_mode": "delta", "qwz_bits": 4}
SUMS = {"qgz_accumulator": "bfloat16"}
NATIVE = {"qwz_intra_bits": None, "qgz_intra_bits": None}
"""The backend's own collectives run within the node. On a device with streams this is the default."""
QUANTIZED = {"qwz_intra_bits": 8, "qgz_intra_bits": 8}
"""Wires travel within the node as well."""
REPLICAS = {"num_replicas": 2, "ranks_per_node": 4}
"""Two nodes in each replica, of which sums are exchanged in one round of codes."""
FOUR_REPLICAS = {"num_replicas": 4, "ranks_per_node": 2}
"""Sums are exchanged in two rounds of codes, and unquantized by an all-reduce."""


class Training(NamedTuple):
    """A model under ZeRO++, and its optimizer."""

    model: TinyLM
    handle: ZeroPPHandle
    optimizer: torch.optim.Optimizer

    def step(self, micro_steps: int = 1, loss: Callable[..., torch.Tensor] = loss_of) -> None:
        for micro_step in range(micro_steps):
            self.handle.set_last_micro_step(micro_step == micro_steps - 1)
            # A loss is not read: the host would wait for the GPU, and hide races.
            loss(self.model, tokens_of(0, micro_step)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def apply(model: nn.Module, **settings: Any) -> ZeroPPHandle:
    with mock.patch.object(plan, "world_groups", world_groups_of_all):
        return apply_zeropp(model, {"ranks_per_node": RANKS_PER_NODE} | settings)


def world_groups_of_all(meshes: Sequence[UnitMesh]) -> WorldGroups:
    """Return how a mesh divides the world, where each of the other ranks said what rank 0 says."""
    return world_groups(
        [
            dataclasses.replace(one, ranks=moved(one.ranks, rank), replicas=moved(one.replicas, rank))
            for rank, one in enumerate(meshes)
        ]
    )


def moved(ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks among which ``rank`` is, from those of rank 0 along the same dimension of a mesh."""
    size, stride = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    first = rank - rank // stride % size * stride
    return tuple(range(first, first + size * stride, stride))


def mesh_of_replicas(num_replicas: int) -> DeviceMesh:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


WHOLE_WIRES = {"hidden": 128, "inner": 128}
"""Sizes of a model whose shards fill 16 bytes each, so that an unquantized secondary shard is its weights, without padding."""


def training(
    policy: str = "bf16",
    prepare: Callable[[TinyLM], Any] = lambda model: None,
    sizes: Mapping[str, int] | None = None,
    num_replicas: int = 1,
    **settings: Any,
) -> Training:
    model = make_lm(depth=3, **(sizes or {}))
    prepare(model)
    shard(model, POLICIES[policy], mesh=None if num_replicas == 1 else mesh_of_replicas(num_replicas))
    handle = apply(model, **settings)
    return Training(model, handle, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True))
