"""Experts that lie within a node, with replicas on other nodes: FSDP2 reduces them itself, and averages the replicas.

Nothing is gathered or scattered across nodes there, so there is nothing for two hops to do. But the average over replicas is an
all-reduce of whole gradients, unquantized and in every micro-step. It is counted, predicted, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_zeropp.fsdp.comm_objects import CommObject
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.traffic import FSDP2_REDUCE, Bytes, Peers, Traffic, total

_WHOLE_GRADIENTS = (
    "Each replica of these units lies within a node, so FSDP2 averages their gradients over nodes itself, unquantized and in "
    "every micro-step (in the table: "
    + FSDP2_REDUCE
    + "): %s. With one replica (dp_replicate_size of 1), or fewer ranks per group of "
    "experts (a smaller ep_size), they span nodes, and ZeRO++ quantizes what crosses."
)


class ReplicasOfNodes(CommObject):
    """FSDP2's own reduction of a unit within a node, and its all-reduce over replicas, with their bytes counted."""

    def __init__(self, unit: Unit, traffic: Traffic) -> None:
        assert unit.replica_group is not None
        self.unit = unit
        self._traffic = traffic
        self._within = Peers.of(unit.shard_group, traffic.ranks_per_node)
        self._replicas = Peers.of(unit.replica_group, traffic.ranks_per_node)
        unit.gradients.wrap_own_reduction(self._reduce)

    def _reduce(self, reduce: Callable[[], None], averages: bool) -> None:
        self._traffic.record(FSDP2_REDUCE, self._bytes(averages=averages))
        reduce()

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step, in which no all-reduce is put off (``set_requires_all_reduce``)."""
        return {FSDP2_REDUCE: self._bytes(averages=True).times(micro_steps)} if self.unit.trains else {}

    def _bytes(self, *, averages: bool) -> Bytes:
        shards = self.unit.gradients.param_shards()
        output = sum(shard.padded_numel for shard in shards) * self.unit.gradients.dtype.itemsize
        collectives = [self._within.bytes_of(output)] if self._within.group_size > 1 else []
        collectives += [self._replicas.bytes_in_all_reduce(output)] if averages else []
        return total(collectives)


def count_replicas_of_nodes(units: Sequence[Unit], run: ModelRun) -> list[ReplicasOfNodes]:
    """Count what the reductions of those units send whose replicas are on other nodes, and name them in a warning.

    Args:
        units: those that lie within a node, and that FSDP2 gathers and reduces.
        run: what all units share.
    """
    ranks_per_node = run.traffic.ranks_per_node
    with_others = [
        unit
        for unit in units
        if (group := unit.replica_group) is not None and Peers.of(group, ranks_per_node).cross_node > 0
    ]
    run.warn(_WHOLE_GRADIENTS, [unit for unit in with_others if unit.trains])
    return [ReplicasOfNodes(unit, run.traffic) for unit in with_others]
