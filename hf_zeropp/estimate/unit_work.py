"""The work of one unit in one step under one method: its own computation, and the stages of its gathers and reductions.

``METHODS`` is the table of the methods beside this package. Those that send 16-bit wires gather and reduce over the world in one
flat ring, as FSDP2's collectives do under NCCL and gloo. DeepSpeed's ZeRO++ has three techniques over ZeRO-3: qwZ sends the
gathers over the world in INT8, hpZ gathers within the node in all passes of a step but its first, from secondary shards in 16
bits, and qgZ reduces in two quantized hops, of which the second crosses nodes in every micro-step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.cluster import Cluster
from hf_zeropp.estimate.exchanges import (
    HALF_BYTES,
    MASTER_BYTES,
    FrozenUnitGather,
    UnitGather,
    UnitReduce,
    gathers_stay_fsdp2,
)
from hf_zeropp.estimate.memory_and_bytes import FSDP2, IN_NODE, KEPT, SYNCED
from hf_zeropp.estimate.model_shape import UnitShape, slice_numel
from hf_zeropp.estimate.simulation import NETWORK, PROCESSOR, WITHIN, Stage
from hf_zeropp.estimate.training_job import Job, Setup
from hf_zeropp.traffic import Bytes, Peers

DEEPSPEED = "DeepSpeed ZeRO++"
COALESCED = "ZeRO++ coalesced"

PREFETCH_NUMEL = 50_000_000
"""Elements that DeepSpeed prefetches at most: its default of ``stage3_prefetch_bucket_size``."""

GLOO_REDUCE_TIMES = 2
"""gloo's reduce-scatter runs as an all-reduce whose result is cut: its slices travel twice."""

Stages = tuple[Stage, ...]


@dataclasses.dataclass(frozen=True)
class Method:
    """How a method beside this package gathers and reduces.

    Attributes:
        shards: whether weights are sharded, and so gathered (all but DDP).
        replicates: whether each node shards a model of its own, and gradients are all-reduced over nodes (HSDP).
        syncs: whether gradients are reduced in every micro-step, as DeepSpeed does, and not in the last alone.
        keeps: whether weights are gathered once per step, and kept.
        deepspeed: whether DeepSpeed runs it. It prefetches units of at most ``PREFETCH_NUMEL`` elements, and FSDP2 all.
        qwz: whether gathers over the world are quantized.
        hpz: whether backward passes gather within the node, and under DeepSpeed also the forward passes of later micro-steps.
        qgz: whether gradients are reduced in two quantized hops.
    """

    shards: bool = True
    replicates: bool = False
    syncs: bool = False
    keeps: bool = False
    deepspeed: bool = False
    qwz: bool = False
    hpz: bool = False
    qgz: bool = False


METHODS = {
    "DDP": Method(shards=False),
    "ZeRO-3": Method(syncs=True, deepspeed=True),
    FSDP2: Method(),
    SYNCED: Method(syncs=True),
    KEPT: Method(keeps=True),
    IN_NODE: Method(hpz=True),
    "HSDP": Method(replicates=True),
    "hpZ": Method(syncs=True, deepspeed=True, hpz=True),
    DEEPSPEED: Method(syncs=True, deepspeed=True, qwz=True, hpz=True, qgz=True),
    COALESCED: Method(deepspeed=True, qwz=True, hpz=True, qgz=True),
}
"""By name. ZeRO-3, hpZ and ZeRO++ are DeepSpeed's. With ``engine.coalesce_grad_reduction()`` it reduces once per step, which was
not tried under qgZ. FSDP2 and HSDP are FSDP2's as Accelerate runs them; ``memory_and_bytes.fsdp2`` has the others."""


@dataclasses.dataclass(frozen=True)
class UnitWork:
    """One unit under one method.

    Attributes:
        forward_s: seconds of its forward pass in one micro-step.
        backward_s: seconds of its backward pass, with the recomputed forward pass under activation checkpointing.
        gather: stages of its gather in the first forward pass of a step.
        gather_later: stages in the forward passes of later micro-steps; empty where the unit is kept.
        gather_backward: stages in backward passes; empty where the unit was not resharded.
        reduce: stages of its reduction in all micro-steps but the last.
        reduce_last: stages in the last micro-step.
        all_reduce_last: stages that follow on a stream of their own (HSDP, and this package's cross hops).
        crossing: stages that run once in a step, before FSDP2 asks for the first gather (this package's cross hops).
        overlaps: whether those run on a stream of their own, while the model computes. If not, they run before it computes.
        copies: stages between a gather and the computation, on the compute stream (FSDP2's copy-out).
        prefetches: whether its gathers run while the unit before it computes. On gloo they block the computation.
    """

    forward_s: float
    backward_s: float
    gather: Stages = ()
    gather_later: Stages = ()
    gather_backward: Stages = ()
    reduce: Stages = ()
    reduce_last: Stages = ()
    all_reduce_last: Stages = ()
    crossing: Stages = ()
    overlaps: bool = True
    copies: Stages = ()
    prefetches: bool = True


def work_of_method(job: Job, method: Method) -> list[UnitWork]:
    """Return the work of all units under a method beside this package. The settings of the job are not read."""
    # Under HSDP the ranks of one node hold a whole model. The paper's preset has the layouts of DeepSpeed's quantized wires.
    world_size = job.setup.ranks_per_node if method.replicates else job.setup.world_size
    maker = _Maker(job, dataclasses.replace(job.setup, world_size=world_size, config=ZeroPPConfig.preset("paper")))
    return _work_of_all(job.model.units, lambda unit: maker.of_method(unit, method))


def work_of_package(job: Job) -> list[UnitWork]:
    """Return the work of all units under this package with the settings of ``job.setup.config``."""
    maker, trained_model = _Maker(job, job.setup), job.model.without_frozen
    if job.setup.world_size > job.setup.group_size:
        trained = _work_of_all(trained_model.units, maker.trained)
    else:  # FSDP2's own collectives stay
        trained = work_of_method(dataclasses.replace(job, model=trained_model), METHODS[FSDP2])
    frozen = _work_of_all(job.model.frozen_units, maker.frozen)
    # A block of LoRA is two units, of its frozen weights and of its adapters, one after the other.
    return [one for pair in itertools.zip_longest(frozen, trained) for one in pair if one is not None]


def _work_of_all(units: Sequence[UnitShape], make: Callable[[UnitShape], UnitWork]) -> list[UnitWork]:
    """Return the work of units, in the order of a forward pass. Equal units share it: a transformer's blocks are alike."""
    made = functools.cache(make)
    # Embeddings come first in a forward pass, whatever their place in the shape.
    ordered = sorted(units, key=lambda unit: unit.name != "embeddings")
    return [made(dataclasses.replace(unit, name="")) for unit in ordered]


class StageMaker:
    """Makes stages that take the rates of a cluster.

    Args:
        cluster: its rates and its nodes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def kernel(self, name: str, num_bytes: float) -> Stage:
        """Return a kernel that reads and writes so many bytes."""
        return Stage(name, ((PROCESSOR, num_bytes / self.cluster.device.kernel_rate),))

    def copy(self, name: str, num_bytes: float) -> Stage:
        """Return a copy of FSDP2's own, of a unit into or out of its flat buffer: read once and written once."""
        return Stage(name, ((PROCESSOR, 2 * num_bytes / self.cluster.device.copy_rate),))

    def exchange(self, name: str, traffic: Bytes, peers: Peers) -> Stage:
        """Return a hop or an all-to-all: every peer sends once, and all messages are under way at one time."""
        link = self.cluster.network if peers.cross_node else self.cluster.within
        return self._wire(name, traffic, link.latency)

    def ring(self, name: str, slice_bytes: int, peers: Peers, times: int = 1) -> Stages:
        """Return an all-gather or reduce-scatter of ``slice_bytes`` per rank that runs in a ring, ``times`` over.

        An all-reduce is the two together, so its slices travel twice. A group of one rank sends nothing, and has no stage.
        """
        if peers.group_size == 1:
            return ()
        # A ring hands a slice on size - 1 times. Most of its messages stay within nodes.
        hops = peers.group_size - 1
        between = min(hops, self.cluster.world_size // self.cluster.ranks_per_node) if peers.cross_node else 0
        latency = between * self.cluster.network.latency + (hops - between) * self.cluster.within.latency
        return (self._wire(name, peers.bytes_in_ring(slice_bytes).times(times), times * latency),)

    def _wire(self, name: str, traffic: Bytes, latency: float) -> Stage:
        cluster = self.cluster
        demands = (
            # All ranks of a node receive at the same time, through the one network that they share.
            (NETWORK, cluster.ranks_per_node * traffic.cross_node / cluster.network.rate),
            (WITHIN, traffic.intra_node / cluster.within.rate),
            (PROCESSOR, (traffic.intra_node + traffic.cross_node) / cluster.device.wire_rate),
        )
        return Stage(name, tuple(demand for demand in demands if demand[1]), latency)


class _Maker(StageMaker):
    """Makes the work of units on the ranks of ``setup``."""

    def __init__(self, job: Job, setup: Setup) -> None:
        super().__init__(job.cluster)
        self._job, self._setup = job, setup
        self._reduce_times = GLOO_REDUCE_TIMES if setup.on_cpu else 1
        self._world = Peers(setup.ranks_per_node - 1, setup.world_size - setup.ranks_per_node)

    def of_method(self, unit: UnitShape, method: Method) -> UnitWork:
        ring = self._encoded_ring if method.qwz else self._ring
        gather = ring(unit, self._world) if method.shards else ()
        again = self._ring(unit, Peers(self._world.intra_node, 0)) if method.hpz else gather
        # DeepSpeed keeps a secondary shard until the optimizer steps (deepspeedai/DeepSpeed#4906), FSDP2 for one backward pass.
        later = again if method.deepspeed else gather
        reduce = self._two_hop_reduces(unit, accumulates=False)[1] if method.qgz else self._flat_reduce(unit, method)
        return self._work(
            unit,
            gather,
            again,
            later,
            reduce=reduce if method.syncs else (),
            reduce_last=reduce,
            all_reduce_last=self._all_reduce(unit) if method.replicates else (),
            keeps=method.keeps,
            prefetches=not method.deepspeed or unit.numel <= PREFETCH_NUMEL,
        )

    def trained(self, unit: UnitShape) -> UnitWork:
        overlaps, on_rank = self._setup.config.overlap, self._setup.config.accumulates_on_rank
        crossing, gather = self._gathers(unit)
        reduce, reduce_last = self._two_hop_reduces(unit, accumulates=not on_rank)
        # The cross hop and what follows it have a stream of their own.
        split = len(reduce_last) - (2 if overlaps else 0)
        return self._work(
            unit,
            gather,
            gather,
            gather,
            reduce=() if on_rank else reduce,
            reduce_last=reduce_last[:split],
            all_reduce_last=reduce_last[split:],
            crossing=crossing,
            overlaps=overlaps,
            keeps=self._setup.config.keeps_weights,
        )

    def frozen(self, unit: UnitShape) -> UnitWork:
        gather = FrozenUnitGather(unit, self._setup, self._job.model.packing(self._setup.config))
        stages, decoding = self.ring("gather frozen", gather.shard_bytes, gather.node_hop), gather.decoding_bytes
        copy = self.copy("copy weights", gather.gathered_bytes)
        decode = (self.kernel("decode frozen", decoding),) if decoding else ()
        return self._work(unit, stages, stages, stages, copies=(copy, *decode))

    def _work(
        self, unit: UnitShape, gather: Stages, backward: Stages, later: Stages, *, keeps: bool = False, **others: Any
    ) -> UnitWork:
        again = backward if unit.reshards and not keeps else ()
        others.setdefault("copies", (self.copy("copy weights", HALF_BYTES * unit.numel),))
        others.setdefault("prefetches", not self._setup.on_cpu)
        return UnitWork(*self._job.seconds(unit), gather, () if keeps else later, again, **others)

    # ---- Stages of 16-bit wires, and of DeepSpeed's gather.

    def _ring(self, unit: UnitShape, peers: Peers) -> Stages:
        return self.ring("gather", HALF_BYTES * slice_numel(unit.params, peers.group_size), peers)

    def _encoded_ring(self, unit: UnitShape, peers: Peers) -> Stages:
        kept = UnitGather(unit, self._setup).layouts.kept
        both_bytes = HALF_BYTES * kept.numel + kept.nbytes
        return (
            self.kernel("encode", both_bytes),
            *self.ring("gather", kept.nbytes, peers),
            self.kernel("decode", peers.group_size * both_bytes),
        )

    def _flat_reduce(self, unit: UnitShape, method: Method) -> Stages:
        if not unit.trainable:
            return ()
        num_ranks = self._world.group_size
        slice_bytes = self._setup.reduce_dtype.itemsize * slice_numel(unit.trainable, num_ranks)
        times = 2 if not method.shards else self._reduce_times
        # HSDP with one rank per node has no ring: its all-reduce alone moves bytes.
        ring = self.ring("reduce", slice_bytes, self._world, times)
        return self.copy("copy gradients", num_ranks * slice_bytes), *ring

    def _all_reduce(self, unit: UnitShape) -> Stages:
        others = Peers(0, self._job.setup.num_nodes - 1)
        if not unit.trainable or others.group_size == 1:
            return ()
        # Each rank has a slice of the unit, and adds it up over the nodes.
        slice_bytes = self._setup.reduce_dtype.itemsize * slice_numel(unit.trainable, self._setup.world_size)
        traffic = others.bytes_of(-(-slice_bytes // others.group_size)).times(2)
        return (self.exchange("all-reduce", traffic, others),)

    # ---- Stages of two hops.

    def _gathers(self, unit: UnitShape) -> tuple[Stages, Stages]:
        """Return the stages that cross nodes once in a step, ahead of all gathers, and those of each gather."""
        if gathers_stay_fsdp2(self._setup):
            return (), self._ring(unit, self._world)
        gather = UnitGather(unit, self._setup)
        crossing, within = self._crossing(gather), self._node_gather(gather)
        # Without a secondary shard every gather runs both hops, when FSDP2 asks for it.
        return (crossing, within) if gather.keeps_secondary else ((), crossing + within)

    def _crossing(self, gather: UnitGather) -> Stages:
        """Return the stages that bring a secondary shard up to date: encode, cross hop, and adding what has changed."""
        layouts, kept, peers, changes = gather.layouts, gather.layouts.kept, gather.cross_hop, gather.changes_bytes
        if peers.group_size == 1:
            return ()
        cross_hop = self.exchange("cross hop", gather.hops.cross_hop, peers)
        if layouts.replaces_copies:
            return self.kernel("encode", HALF_BYTES * kept.numel + kept.nbytes), cross_hop
        if changes is not None:
            # The shard is laid out as the copy is (on CPU from the masters at once), and read again beside the copy. Words are
            # written where they changed.
            read = MASTER_BYTES if self._setup.on_cpu else HALF_BYTES
            encode = self.kernel("encode", read * kept.numel + 3 * kept.nbytes + changes)
            return encode, cross_hop, self.kernel("apply changes", peers.group_size * 2 * changes)
        assert layouts.delta is not None
        encode = self.kernel("encode", MASTER_BYTES * kept.numel + kept.nbytes + layouts.delta.nbytes)
        return encode, cross_hop, self.kernel("add delta", peers.group_size * (layouts.delta.nbytes + 2 * kept.nbytes))

    def _node_gather(self, gather: UnitGather) -> Stages:
        """Return the stages that make whole weights of secondary shards: node hop and decode."""
        kept, peers, slices = gather.layouts.kept, gather.node_hop, gather.cross_hop.group_size
        if gather.is_native:
            own = slices * gather.layouts.node_bytes
            decode = self.kernel("decode", slices * kept.nbytes + own)
            return (*(() if gather.layouts.holds_weights else (decode,)), *self.ring("node hop", own, peers))
        decode = self.kernel("decode", self._setup.world_size * (kept.nbytes + HALF_BYTES * kept.numel))
        # On CPU the ranks of a node read secondary shards in each other's memory.
        reads_peers = self._setup.on_cpu and gather.keeps_secondary and self._setup.config.shared_memory
        if peers.group_size == 1 or reads_peers:
            return (decode,)
        return self.exchange("node hop", gather.hops.node_hop, peers), decode

    def _two_hop_reduces(self, unit: UnitShape, *, accumulates: bool) -> tuple[Stages, Stages]:
        """Return the stages of a reduction before the last micro-step, and of that in it, which reads the sums of the others."""
        reduce, itemsize = UnitReduce(unit, self._setup), self._setup.reduce_dtype.itemsize
        layouts, nodes, wire = reduce.layouts, reduce.cross_hop.group_size, reduce.layouts.cross_hop.nbytes
        numel = layouts.node_hop.numel
        arrived = itemsize * self._setup.world_size * numel
        stages = [self.copy("copy gradients", arrived)]
        partial = torch.float32.itemsize * nodes * numel if accumulates and self._setup.micro_steps > 1 else 0
        if reduce.is_native:
            arrived = nodes * layouts.node_hop_bytes
            stages += self.ring("node hop", arrived, reduce.node_hop, self._reduce_times)
        elif reduce.node_hop.group_size > 1:
            full, arrived = arrived, self._setup.world_size * layouts.node_hop.nbytes
            stages.append(self.kernel("encode", full + arrived))
            stages.append(self.exchange("node hop", reduce.hops.node_hop, reduce.node_hop))
        cross_hop = (self.exchange("cross hop", reduce.hops.cross_hop, reduce.cross_hop),) if nodes > 1 else ()
        encode = self.kernel("sum and encode", arrived + partial + nodes * wire)
        finish = self.kernel("finish", nodes * wire + itemsize * numel)
        return (*stages, self.kernel("sum", arrived + 2 * partial)), (*stages, encode, *cross_hop, finish)
