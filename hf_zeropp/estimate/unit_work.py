"""The work of one unit in one step under one method: its own computation, and the stages of its gathers and reductions.

``METHODS`` is the table of the methods beside this package. Those that send 16-bit wires gather and reduce over the world in one
flat ring, as FSDP2's collectives do under NCCL and gloo. DeepSpeed's ZeRO++ has three techniques over ZeRO-3: qwZ sends the
gathers over the world in INT8, hpZ gathers within the node for backward passes, from secondary shards in 16 bits, and qgZ
reduces in two quantized hops, of which the second crosses nodes in every micro-step.

This package's layouts and bytes are those of a run (``fsdp/layouts.py``, ``fsdp/predictions.py``), under any settings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.cluster import Cluster
from hf_zeropp.estimate.memory_and_bytes import (
    HALF_BYTES,
    MASTER_BYTES,
    SYNCED,
    FrozenGather,
    UnitGather,
    UnitReduce,
    gathers_stay_fsdp2,
    two_hop_peers,
)
from hf_zeropp.estimate.model_shape import ParamShape, UnitShape, slice_numel
from hf_zeropp.estimate.simulation import KERNEL, NETWORK, PROCESSOR, WIRE, WITHIN, Stage
from hf_zeropp.estimate.training_job import Job, Setup
from hf_zeropp.traffic import Bytes, Peers

DEEPSPEED = "DeepSpeed ZeRO++"
REPLICA_HOP = "replica hop"

PREFETCH_NUMEL = 50_000_000
"""Elements that DeepSpeed prefetches at most: its default of ``stage3_prefetch_bucket_size``."""

GLOO_REDUCE_TIMES = 2
"""gloo's reduce-scatter runs as an all-reduce whose result is cut: its slices travel twice."""


@dataclasses.dataclass(frozen=True)
class Method:
    """How a method beside this package gathers and reduces.

    Attributes:
        shards: whether weights are sharded, and so gathered (all but DDP).
        replicates: whether weights are sharded over each of several replicas, and gradients all-reduced over them (HSDP).
        syncs: whether gradients are reduced in every micro-step, as DeepSpeed does, and not in the last alone.
        deepspeed: whether DeepSpeed runs it. It prefetches units of at most ``PREFETCH_NUMEL`` elements, and FSDP2 all.
        qwz: whether gathers over the world are quantized.
        hpz: whether backward passes gather within the node.
        qgz: whether gradients are reduced in two quantized hops.
    """

    shards: bool = True
    replicates: bool = False
    syncs: bool = False
    deepspeed: bool = False
    qwz: bool = False
    hpz: bool = False
    qgz: bool = False


METHODS = {
    "DDP": Method(shards=False),
    "ZeRO-3": Method(syncs=True, deepspeed=True),
    "FSDP2": Method(),
    SYNCED: Method(syncs=True),
    "HSDP": Method(replicates=True),
    "hpZ": Method(syncs=True, deepspeed=True, hpz=True),
    DEEPSPEED: Method(syncs=True, deepspeed=True, qwz=True, hpz=True, qgz=True),
}
"""By name. ZeRO-3, hpZ and ZeRO++ are DeepSpeed's; FSDP2 and HSDP are FSDP2's as Accelerate runs it."""


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
        all_reduce_last: stages that follow on a stream of their own (HSDP, and this package's cross hops on accelerators).
        copies: stages between a gather and the computation, on the compute stream (FSDP2's copy-out).
        prefetches: whether its gathers run while the unit before it computes, on accelerators.
        ahead: how many of the first stages of ``gather_first`` run before FSDP2 asks for the gather: on CPU for all units when
            the forward pass begins, on accelerators on a stream of their own, one unit ahead.
    """

    name: str
    forward_s: float
    backward_s: float
    gather_first: tuple[Stage, ...] = ()
    gather_forward: tuple[Stage, ...] = ()
    gather_backward: tuple[Stage, ...] = ()
    reduce: tuple[Stage, ...] = ()
    reduce_last: tuple[Stage, ...] = ()
    all_reduce_last: tuple[Stage, ...] = ()
    copies: tuple[Stage, ...] = ()
    prefetches: bool = True
    ahead: int = 0


def setup_of(setup: Setup, method: Method) -> Setup:
    """Return over which ranks a method beside this package shards weights."""
    return setup.of_hsdp if method.replicates else setup.in_replicas(1)


def work_of_method(job: Job, method: Method) -> list[UnitWork]:
    """Return the work of all units under a method beside this package. The settings of the job are not read."""
    # The paper's preset has the layouts of DeepSpeed's quantized wires.
    config = ZeroPPConfig.resolve({"preset": "paper"})
    maker = _Maker(job, dataclasses.replace(setup_of(job.setup, method), config=config))
    return _work_of_all(job.model.units, lambda unit: maker.of_method(unit, method))


def work_of_package(job: Job) -> list[UnitWork]:
    """Return the work of all units under this package with the settings of ``job.setup.config``."""
    maker = _Maker(job, job.setup)
    if maker.num_nodes > 1:
        trained = _work_of_all(job.model.trained_units, maker.trained)
    else:
        # FSDP2's own collectives stay. It gathers adapters in units of their own, since the plugin took the frozen weights out.
        model = dataclasses.replace(job.model, units=job.model.trained_units, frozen_units=())
        stock = METHODS["FSDP2" if job.setup.replicas == 1 else "HSDP"]
        trained = work_of_method(dataclasses.replace(job, model=model), stock)
    frozen = _work_of_all(job.model.frozen_units, maker.frozen)
    # A block of LoRA is two units, of its frozen weights and of its adapters, one after the other.
    return [one for pair in itertools.zip_longest(frozen, trained) for one in pair if one is not None]


def _work_of_all(units: tuple[UnitShape, ...], make: Callable[[UnitShape], UnitWork]) -> list[UnitWork]:
    """Return the work of units, in the order of a forward pass. Equal units share it: a transformer's blocks are alike."""
    made = functools.cache(make)
    # Embeddings come first in a forward pass, whatever their place in the shape.
    ordered = sorted(units, key=lambda unit: unit.name != "embeddings")
    return [dataclasses.replace(made(dataclasses.replace(unit, name="")), name=unit.name) for unit in ordered]


@dataclasses.dataclass(frozen=True)
class Stages:
    """Makes stages for a cluster.

    Args:
        cluster: whose rates they take. Its ranks are those over which a model is sharded.
    """

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
        return self._wire(name, traffic, link.latency if peers.group_size > 1 else 0.0)

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
    """Makes the work of units."""

    def __init__(self, job: Job, setup: Setup) -> None:
        self._job = job
        self._setup = setup
        self._stages = Stages(dataclasses.replace(job.cluster, world_size=setup.world_size))
        config, world, per_node = setup.config, setup.world_size, setup.ranks_per_node
        # Rank 0 stands for all ranks, because groups are regular.
        self._world = Peers(per_node - 1, world - per_node)
        # Settings may divide ranks in other groups than the true nodes. Bytes are fast or slow by the true ones.
        self._node_size = config.ranks_per_node if isinstance(config.ranks_per_node, int) else per_node
        self.num_nodes = world // self._node_size
        self._gathers_stay_fsdp2 = gathers_stay_fsdp2(setup, self._node_size)
        self._is_gloo = job.cluster.backend == "gloo"

    def of_method(self, unit: UnitShape, method: Method) -> UnitWork:
        if method.qwz:
            gather = self._encoded_ring(unit.params)
        else:
            gather = self._ring(unit.params, self._world) if method.shards else ()
        again = self._ring(unit.params, Peers(self._world.intra_node, 0)) if method.hpz else gather
        if method.qgz:
            reduce = self._two_hop_reduce(unit.params, last=True, accumulates=False)
        else:
            reduce = self._flat_reduce(unit.trainable, method)
        return self._work(
            unit,
            (gather, gather, again),
            reduce=reduce if method.syncs else (),
            reduce_last=reduce,
            all_reduce_last=self._all_reduce(unit.trainable) if method.replicates else (),
            copies=(self._stages.copy("copy weights", HALF_BYTES * unit.numel),) if gather else (),
            prefetches=not method.deepspeed or unit.numel <= PREFETCH_NUMEL,
        )

    def trained(self, unit: UnitShape) -> UnitWork:
        overlaps = self._setup.config.overlap
        ahead = 0
        if self._gathers_stay_fsdp2:
            first = again = self._ring(unit.params, self._world)
        else:
            gather = self._gather(unit.params)
            crossing, again = self._crossing(gather), self._node_gather(gather)
            first = crossing + again
            # Without a secondary shard nothing can be started ahead: a gather runs both hops when FSDP2 asks for it.
            if not gather.keeps_secondary:
                again = first
            # On CPU a hop that was started ahead ends when its unit is needed, on accelerators before.
            elif overlaps:
                ahead = min(2, len(crossing)) if self._is_gloo else len(crossing)
        on_rank = self._setup.config.accumulates_on_rank
        reduce_last = self._two_hop_reduce(unit.params, last=True, accumulates=not on_rank)
        rounds = sum(stage.name == REPLICA_HOP for stage in reduce_last)
        behind = 2 + 2 * rounds if overlaps and not self._is_gloo and self.num_nodes > 1 else 0
        split = len(reduce_last) - behind
        return self._work(
            unit,
            (first, again, again),
            reduce=() if on_rank else self._two_hop_reduce(unit.params, last=False),
            reduce_last=reduce_last[:split],
            all_reduce_last=reduce_last[split:],
            copies=(self._stages.copy("copy weights", HALF_BYTES * unit.numel),),
            ahead=ahead,
        )

    def frozen(self, unit: UnitShape) -> UnitWork:
        gather = FrozenGather(unit, self._node_size, self._job.model.packing(self._setup.config))
        stages: tuple[Stage, ...] = ()
        if self._node_size > 1:
            node_hop, _ = two_hop_peers(self._node_size, self._setup)
            stages = (self._stages.ring("gather frozen", gather.shard_bytes(), node_hop),)
        copies: tuple[Stage, ...] = (self._stages.copy("copy weights", gather.gathered_bytes()),)
        if decoding := gather.decoding_bytes():
            copies += (self._stages.kernel("decode frozen", decoding),)
        return self._work(unit, (stages, stages, stages), copies=copies)

    def _work(self, unit: UnitShape, gathers: tuple[tuple[Stage, ...], ...], **others: Any) -> UnitWork:
        """Return the work of a unit with its gathers in the first and later forward passes, and in backward passes."""
        first, forward, backward = gathers[0], gathers[1], gathers[2] if unit.reshards else ()
        return UnitWork(
            unit.name, self._job.forward_s(unit), self._job.backward_s(unit), first, forward, backward, **others
        )

    # ---- Stages of 16-bit wires, and of DeepSpeed's gather.

    def _ring(self, params: tuple[ParamShape, ...], peers: Peers) -> tuple[Stage, ...]:
        if peers.group_size == 1:
            return ()
        return (self._stages.ring("gather", HALF_BYTES * slice_numel(params, peers.group_size), peers),)

    def _encoded_ring(self, params: tuple[ParamShape, ...]) -> tuple[Stage, ...]:
        world, wire_bytes = self._setup.world_size, self._gather(params).layouts.kept.nbytes
        half_bytes = HALF_BYTES * slice_numel(params, world)
        return (
            self._stages.kernel("encode", half_bytes + wire_bytes),
            self._stages.ring("gather", wire_bytes, self._world),
            self._stages.kernel("decode", world * (wire_bytes + half_bytes)),
        )

    def _flat_reduce(self, params: tuple[ParamShape, ...], method: Method) -> tuple[Stage, ...]:
        if not params:
            return ()
        peers = self._world
        slice_bytes = self._setup.reduce_dtype.itemsize * slice_numel(params, peers.group_size)
        copy = self._stages.copy("copy gradients", peers.group_size * slice_bytes)
        if peers.group_size == 1:  # HSDP with one rank per node: the all-reduce alone moves bytes
            return (copy,)
        if not method.shards:
            return (copy, self._stages.ring("all-reduce", slice_bytes, peers, times=2))
        return (copy, self._stages.ring("reduce", slice_bytes, peers, GLOO_REDUCE_TIMES if self._is_gloo else 1))

    def _all_reduce(self, params: tuple[ParamShape, ...]) -> tuple[Stage, ...]:
        others = Peers(0, self._setup.replicas - 1)
        if not params or others.group_size == 1:
            return ()
        # Each rank has a slice of the unit, and adds it up over the replicas, which are on other nodes.
        slice_bytes = self._setup.reduce_dtype.itemsize * slice_numel(params, self._setup.world_size)
        traffic = others.bytes_of(-(-slice_bytes // others.group_size)).times(2)
        return (self._stages.exchange("all-reduce", traffic, others),)

    # ---- Stages of two hops.

    def _gather(self, params: tuple[ParamShape, ...]) -> UnitGather:
        return UnitGather(params, self._setup, self._node_size)

    def _crossing(self, gather: UnitGather) -> tuple[Stage, ...]:
        """Return the stages that bring a secondary shard up to date: encode, cross hop, and adding a delta."""
        layouts, peers, changes = gather.layouts, gather.cross_hop, gather.changes_bytes
        if peers.group_size == 1:
            return ()
        cross_hop = self._stages.exchange("cross hop", gather.hops(gathers=1, crossings=1).cross_hop, peers)
        if layouts.replaces_copies:
            encode = HALF_BYTES * layouts.kept.numel + layouts.kept.nbytes
            return self._stages.kernel("encode", encode), cross_hop
        if changes is not None:
            # The shard is laid out as the copy is (on CPU from the masters at once), and read again beside the copy. Words are
            # written where they changed.
            read = MASTER_BYTES if self._is_gloo else HALF_BYTES
            encode = read * layouts.kept.numel + 3 * layouts.kept.nbytes + changes
            applied = peers.group_size * (2 * changes)
            return self._stages.kernel("encode", encode), cross_hop, self._stages.kernel("apply changes", applied)
        assert layouts.delta is not None
        encode = MASTER_BYTES * layouts.kept.numel + layouts.kept.nbytes + layouts.delta.nbytes
        added = peers.group_size * (layouts.delta.nbytes + 2 * layouts.kept.nbytes)
        return self._stages.kernel("encode", encode), cross_hop, self._stages.kernel("add delta", added)

    def _node_gather(self, gather: UnitGather) -> tuple[Stage, ...]:
        """Return the stages that make whole weights of secondary shards: node hop and decode."""
        stages, kept, peers, slices = self._stages, gather.layouts.kept, gather.node_hop, gather.cross_hop.group_size
        # On CPU the ranks of a node read secondary shards in each other's memory.
        reads_peers = self._is_gloo and gather.keeps_secondary and self._setup.config.shared_memory
        if gather.is_native:
            own = slices * gather.layouts.node_bytes
            decode = stages.kernel("decode", slices * kept.nbytes + own)
            return (*(() if gather.layouts.holds_weights else (decode,)), stages.ring("node hop", own, peers))
        decode_all = stages.kernel("decode", self._setup.world_size * (kept.nbytes + HALF_BYTES * kept.numel))
        if peers.group_size == 1 or reads_peers:
            return (decode_all,)
        return (stages.exchange("node hop", gather.hops(gathers=1, crossings=0).node_hop, peers), decode_all)

    def _two_hop_reduce(
        self, params: tuple[ParamShape, ...], *, last: bool, accumulates: bool = True
    ) -> tuple[Stage, ...]:
        """Return the stages of a reduction. The sums of earlier micro-steps are read, and written before the last."""
        setup, stages = self._setup, self._stages
        reduce = UnitReduce(params, setup, self._node_size)
        layouts, node, cross, hops = reduce.layouts, reduce.node_hop, reduce.cross_hop, reduce.hops(micro_steps=1)
        numel, world, nodes = layouts.node_hop.numel, setup.world_size, self.num_nodes
        full = setup.reduce_dtype.itemsize * world * numel
        arrived = full
        partial = torch.float32.itemsize * nodes * numel if accumulates and setup.micro_steps > 1 else 0
        result = [stages.copy("copy gradients", full)]
        if reduce.is_native:
            arrived = nodes * layouts.node_hop_bytes
            result.append(stages.ring("node hop", arrived, node, GLOO_REDUCE_TIMES if self._is_gloo else 1))
        elif node.group_size > 1:
            arrived = world * layouts.node_hop.nbytes
            result.append(stages.kernel("encode", full + arrived))
            result.append(stages.exchange("node hop", hops.node_hop, node))
        if not last:
            return (*result, stages.kernel("sum", arrived + 2 * partial))
        wire = layouts.cross_hop.nbytes
        left = nodes * wire
        result.append(stages.kernel("sum and encode", arrived + partial + left))
        if cross.group_size > 1:
            result.append(stages.exchange("cross hop", hops.cross_hop, cross))
        for peers, received in reduce.replica_hops():
            result.append(stages.kernel("sum and encode", left + wire))
            result.append(stages.exchange(REPLICA_HOP, received, peers))
            left = received.cross_node + wire
        return (*result, stages.kernel("finish", left + setup.reduce_dtype.itemsize * numel))
