"""The work of one unit in one step under one method: its own computation, and the stages of its gathers and reductions.

``METHODS`` is the table of the methods beside this package. Those that send 16-bit wires gather and reduce over the world in one
flat ring, as FSDP2's collectives do under NCCL and gloo. DeepSpeed's ZeRO++ has three techniques over ZeRO-3: qwZ sends the
gathers over the world in INT8, hpZ gathers within the node for backward passes, from secondary shards in 16 bits, and qgZ
reduces in two quantized hops, of which the second crosses nodes in every micro-step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
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
from hf_zeropp.estimate.model_shape import ParamShape, UnitShape, slice_numel
from hf_zeropp.estimate.simulation import KERNEL, NETWORK, PROCESSOR, WIRE, WITHIN, Stage
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
        hpz: whether backward passes gather within the node.
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
        name: of the unit.
        forward_s: seconds of its forward pass in one micro-step.
        backward_s: seconds of its backward pass, with the recomputed forward pass under activation checkpointing.
        gather_first: stages of its gather in the first forward pass after an optimizer step.
        gather_forward: stages in later forward passes.
        gather_backward: stages in backward passes; empty where the unit was not resharded.
        reduce: stages of its reduction in all micro-steps but the last.
        reduce_last: stages in the last micro-step.
        all_reduce_last: stages that follow on a stream of their own (HSDP, and this package's cross hops).
        copies: stages between a gather and the computation, on the compute stream (FSDP2's copy-out).
        prefetches: whether its gathers run while the unit before it computes. On gloo they block the computation.
        ahead: how many of the first stages of ``gather_first`` run before FSDP2 asks for the gather.
        overlaps: whether those run on a stream of their own, while the model computes. If not, they run before it computes.
    """

    name: str
    forward_s: float
    backward_s: float
    gather_first: Stages = ()
    gather_forward: Stages = ()
    gather_backward: Stages = ()
    reduce: Stages = ()
    reduce_last: Stages = ()
    all_reduce_last: Stages = ()
    copies: Stages = ()
    prefetches: bool = True
    ahead: int = 0
    overlaps: bool = True


def work_of_method(job: Job, method: Method) -> list[UnitWork]:
    """Return the work of all units under a method beside this package. The settings of the job are not read."""
    # The paper's preset has the layouts of DeepSpeed's quantized wires.
    setup = dataclasses.replace(job.setup, config=ZeroPPConfig.preset("paper"))
    maker = _Maker(job, setup.of_one_node if method.replicates else setup)
    return _work_of_all(job.model.units, lambda unit: maker.of_method(unit, method))


def work_of_package(job: Job) -> list[UnitWork]:
    """Return the work of all units under this package with the settings of ``job.setup.config``."""
    maker = _Maker(job, job.setup)
    trained_job = dataclasses.replace(job, model=job.model.without_frozen)
    if job.setup.world_size > job.setup.group_size:
        trained = _work_of_all(trained_job.model.units, maker.trained)
    else:  # FSDP2's own collectives stay
        trained = work_of_method(trained_job, METHODS[KEPT if job.setup.keeps_weights else FSDP2])
    frozen = _work_of_all(job.model.frozen_units, maker.frozen)
    # A block of LoRA is two units, of its frozen weights and of its adapters, one after the other.
    return [one for pair in itertools.zip_longest(frozen, trained) for one in pair if one is not None]


def _work_of_all(units: Sequence[UnitShape], make: Callable[[UnitShape], UnitWork]) -> list[UnitWork]:
    """Return the work of units, in the order of a forward pass. Equal units share it: a transformer's blocks are alike."""
    made = functools.cache(make)
    # Embeddings come first in a forward pass, whatever their place in the shape.
    ordered = sorted(units, key=lambda unit: unit.name != "embeddings")
    return [dataclasses.replace(made(dataclasses.replace(unit, name="")), name=unit.name) for unit in ordered]


@dataclasses.dataclass(frozen=True)
class StageMaker:
    """Makes stages that take the rates of a cluster."""

    cluster: Cluster

    def kernel(self, name: str, num_bytes: float) -> Stage:
        """Return a kernel that reads and writes so many bytes."""
        return Stage(name, KERNEL, ((PROCESSOR, num_bytes / self.cluster.device.kernel_rate),))

    def copy(self, name: str, num_bytes: float) -> Stage:
        """Return a copy of FSDP2's own, of a unit into or out of its flat buffer: read once and written once."""
        return Stage(name, KERNEL, ((PROCESSOR, 2 * num_bytes / self.cluster.device.copy_rate),))

    def exchange(self, name: str, traffic: Bytes, peers: Peers) -> Stage:
        """Return a hop or an all-to-all: every peer sends once, and all messages are under way at one time."""
        link = self.cluster.network if peers.cross_node else self.cluster.within
        return self._wire(name, traffic, link.latency)

    def ring(self, name: str, slice_bytes: int, peers: Peers, times: int = 1) -> Stage:
        """Return an all-gather or reduce-scatter of ``slice_bytes`` per rank that runs in a ring, ``times`` over.

        An all-reduce is the two together, so its slices travel twice.
        """
        # A ring hands a slice on size - 1 times. Most of its messages stay within nodes.
        hops = peers.group_size - 1
        traffic = peers.bytes_in_ring(slice_bytes).times(times)
        between = min(hops, self.cluster.num_nodes) if peers.cross_node else 0
        latency = between * self.cluster.network.latency + (hops - between) * self.cluster.within.latency
        return self._wire(name, traffic, times * latency)

    def _wire(self, name: str, traffic: Bytes, latency: float) -> Stage:
        cluster = self.cluster
        received = traffic.intra_node + traffic.cross_node
        demands = (
            # All ranks of a node receive at the same time, through the one network that they share.
            (NETWORK, cluster.ranks_per_node * traffic.cross_node / cluster.network.rate),
            (WITHIN, traffic.intra_node / cluster.within.rate),
            (PROCESSOR, received / cluster.device.wire_rate),
        )
        return Stage(name, WIRE, tuple(demand for demand in demands if demand[1]), latency, traffic)


class _Maker:
    """Makes the work of units on the ranks of ``setup``."""

    def __init__(self, job: Job, setup: Setup) -> None:
        self._job = job
        self._setup = setup
        self._stages = StageMaker(dataclasses.replace(job.cluster, world_size=setup.world_size))
        self._world = Peers(setup.ranks_per_node - 1, setup.world_size - setup.ranks_per_node)
        self._is_gloo = job.cluster.backend == "gloo"

    def of_method(self, unit: UnitShape, method: Method) -> UnitWork:
        ring = self._encoded_ring if method.qwz else self._ring
        gather = ring(unit.params, self._world) if method.shards else ()
        again = self._ring(unit.params, Peers(self._world.intra_node, 0)) if method.hpz else gather
        later = () if method.keeps else gather
        flat = self._flat_reduce(unit.trainable, method)
        reduce = self._two_hop_reduce(unit.params, accumulates=False) if method.qgz else flat
        return self._work(
            unit,
            gather,
            later,
            () if method.keeps else again,
            reduce=reduce if method.syncs else (),
            reduce_last=reduce,
            all_reduce_last=self._all_reduce(unit.trainable) if method.replicates else (),
            copies=self._copy_out(unit) if gather else (),
            prefetches=not method.deepspeed or unit.numel <= PREFETCH_NUMEL,
        )

    def trained(self, unit: UnitShape) -> UnitWork:
        overlaps, on_rank = self._setup.config.overlap, self._setup.config.accumulates_on_rank
        first, again, ahead = self._gathers(unit)
        again = () if self._setup.keeps_weights else again
        reduce_last = self._two_hop_reduce(unit.params, accumulates=not on_rank)
        # The cross hop and what follows it have a stream of their own.
        split = len(reduce_last) - (2 if overlaps else 0)
        return self._work(
            unit,
            first,
            again,
            again,
            reduce=() if on_rank else self._two_hop_reduce(unit.params, accumulates=True, last=False),
            reduce_last=reduce_last[:split],
            all_reduce_last=reduce_last[split:],
            copies=self._copy_out(unit),
            prefetches=not self._is_gloo,
            ahead=ahead,
            overlaps=overlaps,
        )

    def frozen(self, unit: UnitShape) -> UnitWork:
        gather = FrozenUnitGather(unit, self._setup, self._job.model.packing(self._setup.config))
        peers, decoding = gather.node_hop, gather.decoding_bytes()
        stages = (self._stages.ring("gather frozen", gather.shard_bytes(), peers),) if peers.group_size > 1 else ()
        copy = self._stages.copy("copy weights", gather.gathered_bytes())
        decode = (self._stages.kernel("decode frozen", decoding),) if decoding else ()
        return self._work(unit, stages, stages, stages, copies=(copy, *decode), prefetches=not self._is_gloo)

    def _work(self, unit: UnitShape, first: Stages, forward: Stages, backward: Stages, **others: Any) -> UnitWork:
        seconds = self._job.forward_s(unit), self._job.backward_s(unit)
        return UnitWork(unit.name, *seconds, first, forward, backward if unit.reshards else (), **others)

    def _copy_out(self, unit: UnitShape) -> Stages:
        return (self._stages.copy("copy weights", HALF_BYTES * unit.numel),)

    # ---- Stages of 16-bit wires, and of DeepSpeed's gather.

    def _ring(self, params: Iterable[ParamShape], peers: Peers) -> Stages:
        if peers.group_size == 1:
            return ()
        return (self._stages.ring("gather", HALF_BYTES * slice_numel(params, peers.group_size), peers),)

    def _encoded_ring(self, params: Iterable[ParamShape], peers: Peers) -> Stages:
        kept = UnitGather(params, self._setup).layouts.kept
        both_bytes = HALF_BYTES * kept.numel + kept.nbytes
        return (
            self._stages.kernel("encode", both_bytes),
            self._stages.ring("gather", kept.nbytes, peers),
            self._stages.kernel("decode", peers.group_size * both_bytes),
        )

    def _flat_reduce(self, params: Sequence[ParamShape], method: Method) -> Stages:
        if not params:
            return ()
        peers = self._world
        slice_bytes = self._setup.reduce_dtype.itemsize * slice_numel(params, peers.group_size)
        copy = self._stages.copy("copy gradients", peers.group_size * slice_bytes)
        if peers.group_size == 1:  # HSDP with one rank per node: the all-reduce alone moves bytes
            return (copy,)
        times = 2 if not method.shards else GLOO_REDUCE_TIMES if self._is_gloo else 1
        return (copy, self._stages.ring("reduce", slice_bytes, peers, times))

    def _all_reduce(self, params: Sequence[ParamShape]) -> Stages:
        others = Peers(0, self._job.setup.num_nodes - 1)
        if not params or others.group_size == 1:
            return ()
        # Each rank has a slice of the unit, and adds it up over the nodes.
        slice_bytes = self._setup.reduce_dtype.itemsize * slice_numel(params, self._setup.world_size)
        traffic = others.bytes_of(-(-slice_bytes // others.group_size)).times(2)
        return (self._stages.exchange("all-reduce", traffic, others),)

    # ---- Stages of two hops.

    def _gathers(self, unit: UnitShape) -> tuple[Stages, Stages, int]:
        """Return the stages of the first gather of a step and of later ones, and how many of the first may run ahead."""
        if gathers_stay_fsdp2(self._setup):
            ring = self._ring(unit.params, self._world)
            return ring, ring, 0
        gather = UnitGather(unit.params, self._setup)
        crossing, within = self._crossing(gather), self._node_gather(gather)
        if not gather.keeps_secondary:  # every gather runs both hops, when FSDP2 asks for it
            return crossing + within, crossing + within, 0
        return crossing + within, within, len(crossing)

    def _crossing(self, gather: UnitGather) -> Stages:
        """Return the stages that bring a secondary shard up to date: encode, cross hop, and adding what has changed."""
        layouts, peers, changes = gather.layouts, gather.cross_hop, gather.changes_bytes
        if peers.group_size == 1:
            return ()
        kept, kernel = layouts.kept, self._stages.kernel
        cross_hop = self._stages.exchange("cross hop", gather.hops(gathers=1, crossings=1).cross_hop, peers)
        if layouts.replaces_copies:
            return kernel("encode", HALF_BYTES * kept.numel + kept.nbytes), cross_hop
        if changes is not None:
            # The shard is laid out as the copy is (on CPU from the masters at once), and read again beside the copy. Words are
            # written where they changed.
            read = MASTER_BYTES if self._is_gloo else HALF_BYTES
            encode = kernel("encode", read * kept.numel + 3 * kept.nbytes + changes)
            return encode, cross_hop, kernel("apply changes", peers.group_size * 2 * changes)
        assert layouts.delta is not None
        encode = kernel("encode", MASTER_BYTES * kept.numel + kept.nbytes + layouts.delta.nbytes)
        return encode, cross_hop, kernel("add delta", peers.group_size * (layouts.delta.nbytes + 2 * kept.nbytes))

    def _node_gather(self, gather: UnitGather) -> Stages:
        """Return the stages that make whole weights of secondary shards: node hop and decode."""
        stages, kept, peers, slices = self._stages, gather.layouts.kept, gather.node_hop, gather.cross_hop.group_size
        if gather.is_native:
            own = slices * gather.layouts.node_bytes
            decode = stages.kernel("decode", slices * kept.nbytes + own)
            return (*(() if gather.layouts.holds_weights else (decode,)), stages.ring("node hop", own, peers))
        decode = stages.kernel("decode", self._setup.world_size * (kept.nbytes + HALF_BYTES * kept.numel))
        # On CPU the ranks of a node read secondary shards in each other's memory.
        reads_peers = self._is_gloo and gather.keeps_secondary and self._setup.config.shared_memory
        if peers.group_size == 1 or reads_peers:
            return (decode,)
        return stages.exchange("node hop", gather.hops(gathers=1, crossings=0).node_hop, peers), decode

    def _two_hop_reduce(self, params: Iterable[ParamShape], *, accumulates: bool, last: bool = True) -> Stages:
        """Return the stages of a reduction. The sums of earlier micro-steps are read, and written before the last."""
        reduce, itemsize = UnitReduce(params, self._setup), self._setup.reduce_dtype.itemsize
        layouts, nodes, wire = reduce.layouts, reduce.cross_hop.group_size, reduce.layouts.cross_hop.nbytes
        numel, hops = layouts.node_hop.numel, reduce.hops(micro_steps=1)
        stages = [self._stages.copy("copy gradients", itemsize * self._setup.world_size * numel)]
        arrived = itemsize * self._setup.world_size * numel
        partial = torch.float32.itemsize * nodes * numel if accumulates and self._setup.micro_steps > 1 else 0
        if reduce.is_native:
            arrived = nodes * layouts.node_hop_bytes
            times = GLOO_REDUCE_TIMES if self._is_gloo else 1
            stages.append(self._stages.ring("node hop", arrived, reduce.node_hop, times))
        elif reduce.node_hop.group_size > 1:
            full, arrived = arrived, self._setup.world_size * layouts.node_hop.nbytes
            stages.append(self._stages.kernel("encode", full + arrived))
            stages.append(self._stages.exchange("node hop", hops.node_hop, reduce.node_hop))
        if not last:
            return (*stages, self._stages.kernel("sum", arrived + 2 * partial))
        stages.append(self._stages.kernel("sum and encode", arrived + partial + nodes * wire))
        if nodes > 1:
            stages.append(self._stages.exchange("cross hop", hops.cross_hop, reduce.cross_hop))
        return (*stages, self._stages.kernel("finish", nodes * wire + itemsize * numel))
