"""A comparison of the nodes' copies of frozen weights, once, before they are used.

Each node holds a copy of all frozen weights, and nothing that happens in training makes copies equal that differ. They differ
where each rank has made a part of them by itself with a seed of its own: the new rows of an embedding that was resized, a head
that no checkpoint has. A rank's shard of the copy must be equal on all ranks with its place in their nodes, of its own replica
and of others. Those of a cross group exchange the sum of the bits of each weight, and so do those of a replica group, which may
have ranks of one node as well. All ranks tell each other what they found, so that all raise the same error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from hf_zeropp.comm.exchange import exchange, ranks_by, words_of
from hf_zeropp.dtensors import local_tensor_of
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.weights.fingerprint import sum_of_bits
from hf_zeropp.fsdp.weights.first_use import on_first_use
from hf_zeropp.fsdp.weights.node_gather import NodeGather


def compare_frozen(model: nn.Module, gathers: Sequence[NodeGather], run: ModelRun) -> None:
    """Compare the frozen weights of all nodes: now, or before the model's first forward if they are on ``meta``. Collective.

    Raises:
        ValueError: on all ranks, if they differ.
    """
    # Ranks have the same units (plan.py), but may have them on different devices.
    is_there = not any(param.is_meta for gather in gathers for param in gather.unit.params)
    if all(_of_data_parallel_ranks(is_there, run)):
        _compare(gathers, run)
    else:
        on_first_use(model, lambda: _compare(gathers, run))


def _compare(gathers: Sequence[NodeGather], run: ModelRun) -> None:
    names = [name for gather in gathers for name in gather.names]
    sums = [_sum_of(local_tensor_of(param)) for gather in gathers for param in gather.unit.params]
    across = filter(None, (run.mesh.topology.cross_group, run.mesh.replicas))
    found = [_find_difference(names, sums, group, run.traffic.ranks_per_node) for group in across]
    if said := next(filter(None, _of_data_parallel_ranks(next(filter(None, found), None), run)), None):
        raise ValueError(
            f"Nodes hold different frozen weights: {said}. Nothing makes them equal later. Give all ranks the same seed before "
            "the model is made and changed (set_seed without device_specific), or let rank 0 send its weights to all "
            "(cpu_ram_efficient_loading=True), and load weights before ZeRO++ is applied."
        )


def _find_difference(
    names: Sequence[str], sums: Sequence[int], group: dist.ProcessGroup, ranks_per_node: int
) -> str | None:
    """Return in words the first parameter in which ranks of a group with one place in their nodes differ; None if none do."""
    ranks = dist.get_process_group_ranks(group)
    for name, values in zip(names, zip(*exchange(sums, group), strict=True), strict=True):
        if holders := _differing(ranks, values, ranks_per_node):
            return f"{name} differs between {' and '.join(map(words_of, ranks_by(holders.items()).values()))}"
    return None


def _differing(ranks: Sequence[int], values: Sequence[int], ranks_per_node: int) -> dict[int, int]:
    """Return the values of the ranks of the first place in a node at which they differ; none where all are equal."""
    # Ranks of one node hold other shards of one copy.
    places: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, value in zip(ranks, values, strict=True):
        places[rank % ranks_per_node][rank] = value
    return next((held for held in places.values() if len(set(held.values())) > 1), {})


def _of_data_parallel_ranks(value: Any, run: ModelRun) -> list[Any]:
    """Return the values of all ranks that train this rank's model."""
    values = [value]
    for group in (run.mesh.topology.cross_group, run.mesh.topology.node_group, run.mesh.replicas):
        if group is not None:
            values = [one for of_rank in exchange(values, group) for one in of_rank]
    return values


def _sum_of(shard: torch.Tensor) -> int:
    # FSDP2 says what is on ``meta`` in this forward pass. A copy begins at a word of memory, on all ranks.
    return 0 if shard.is_meta else int(sum_of_bits([shard.detach().clone(memory_format=torch.contiguous_format)]))
