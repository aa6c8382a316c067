"""The stages of methods that send quantized wires: this package under any settings, and DeepSpeed's ZeRO++.

Layouts and bytes are those of a run (``fsdp/layouts.py``, ``fsdp/predictions.py``). DeepSpeed's ZeRO++ differs in three things:
its forward gather is one flat ring in INT8, its secondary shards are in 16 bits, and its reduction crosses nodes in every
micro-step.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from hf_zeropp.comm.topology import resolve_hpz_size
from hf_zeropp.comm.two_hops import GatherLayouts
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.flat_methods import FLAT_METHODS, deepspeed_prefetches, flat_work
from hf_zeropp.estimate.frozen_base import FrozenGather
from hf_zeropp.estimate.job import Job, forward_order
from hf_zeropp.estimate.methods import HALF_BYTES, MASTER_BYTES, flat_shards
from hf_zeropp.estimate.model_shape import ParamShape, UnitShape
from hf_zeropp.estimate.stages import Stage, Stages
from hf_zeropp.estimate.unit_work import UnitWork
from hf_zeropp.fsdp.layouts import gather_layouts, reduce_layouts
from hf_zeropp.fsdp.predictions import (
    changed_words_bytes,
    gather_bytes,
    gather_node_size,
    leaves_gathers_to_fsdp2,
    reduce_bytes,
)
from hf_zeropp.fsdp.shards import ParamShard
from hf_zeropp.traffic import Peers

SUM_BYTES = 4
"""Bytes of an element of partial sums: fp32."""


def our_work(job: Job) -> list[UnitWork]:
    """Return the work of all units under this package with the settings of ``job.setup.config``."""
    maker = _Maker(job)
    trained = [maker.trained(unit) for unit in forward_order(job.model.trained_units)]
    if maker.num_groups == 1:  # FSDP2's own collectives stay
        trained = _fsdp2_trained(job)
    frozen = [maker.frozen(unit) for unit in forward_order(job.model.frozen_units)]
    if not frozen:
        return trained
    # A block of LoRA is two units, of its frozen weights and of its adapters, one after the other.
    paired = [one for pair in zip(frozen, trained, strict=False) for one in pair]
    return paired + frozen[len(trained) :] + trained[len(frozen) :]


def deepspeed_work(job: Job, *, quantizes_backward: bool = False) -> list[UnitWork]:
    """Return the work of all units under DeepSpeed's ZeRO++.

    Args:
        job: its settings are not read.
        quantizes_backward: whether there is no secondary shard, and the backward gather is the forward gather again (qwZ and qgZ
            without hpZ).
    """
    maker = _Maker(job, ZeroPPConfig.resolve({"preset": "paper"}))
    return [maker.deepspeed(unit, quantizes_backward) for unit in job.ordered_units]


def techniques_work(job: Job, names: frozenset[str]) -> list[UnitWork]:
    """Return the work of all units under DeepSpeed with some of the paper's techniques alone: "qwZ", "hpZ", "qgZ"."""
    plain = flat_work(FLAT_METHODS["hpZ" if "hpZ" in names else "ZeRO-3"], job)
    quantized = deepspeed_work(job, quantizes_backward="hpZ" not in names)
    mixed = []
    for flat, full in zip(plain, quantized, strict=True):
        gather, reduce = (full if "qwZ" in names else flat), (full if "qgZ" in names else flat)
        mixed.append(dataclasses.replace(gather, reduce=reduce.reduce, reduce_last=reduce.reduce_last))
    return mixed


def _fsdp2_trained(job: Job) -> list[UnitWork]:
    # FSDP2 gathers the adapters of a LoRA job in its own units, since the plugin took the frozen weights out.
    model = dataclasses.replace(job.model, units=job.model.trained_units, frozen_units=())
    return flat_work(FLAT_METHODS["FSDP2"], dataclasses.replace(job, model=model))


class _Maker:
    """Makes the work of units. Units with the same parameters share their stages."""

    def __init__(self, job: Job, config: ZeroPPConfig | None = None) -> None:
        self._job = job
        self._setup = job.setup
        self._config = config or job.setup.config
        self._stages = Stages(job.cluster)
        world, per_node = self._setup.world_size, self._setup.ranks_per_node
        # Settings may divide ranks in other groups than the true nodes. Bytes are fast or slow by the true ones.
        size = self._config.ranks_per_node if isinstance(self._config.ranks_per_node, int) else per_node
        hpz_size = resolve_hpz_size(self._config.hpz_size, size, world)
        self._size = size
        self._keeps_secondary = hpz_size is not None
        self._leaves_gathers = leaves_gathers_to_fsdp2(self._config, hpz_size, world)
        self._gather_node, self._gather_cross = _hops(gather_node_size(hpz_size, size), world, per_node)
        self._reduce_node, self._reduce_cross = _hops(size, world, per_node)
        self.num_groups = world // size
        self._is_gloo = job.cluster.backend == "gloo"
        self._reads_peers = self._is_gloo and self._keeps_secondary and self._config.shared_memory

    def trained(self, unit: UnitShape) -> UnitWork:
        if self._leaves_gathers:
            crossing: tuple[Stage, ...] = ()
            first = again = self._ring(unit.params, None)
        else:
            crossing, landed = self._crossing(unit.params), self._node_gather(unit.params)
            first = crossing + landed
            again = landed if self._keeps_secondary else first
        # Without a secondary shard nothing can be started ahead: a gather runs both hops when FSDP2 asks for it.
        ahead = 0
        if self._keeps_secondary and self._config.overlap and not self._leaves_gathers:
            # On CPU a hop that was started ahead ends when its unit is needed, on accelerators before.
            ahead = min(2, len(crossing)) if self._is_gloo else len(crossing)
        reduce_last = self._reduce(unit.params, last=True)
        behind = 2 if self._config.overlap and not self._is_gloo and self._reduce_cross.group_size > 1 else 0
        split = len(reduce_last) - behind
        return UnitWork(
            unit.name,
            self._job.forward_s(unit),
            self._job.backward_s(unit),
            gather_first=first,
            gather_forward=again,
            gather_backward=again if unit.reshards else (),
            reduce=self._reduce(unit.params, last=False),
            reduce_last=reduce_last[:split],
            all_reduce_last=reduce_last[split:],
            copies=(self._stages.copy_weights(unit),),
            ahead=ahead,
        )

    def deepspeed(self, unit: UnitShape, quantizes_backward: bool) -> UnitWork:
        forward = self._ring(unit.params, self._layouts(unit.params).kept.nbytes)
        backward = forward if quantizes_backward else self._node_ring(unit.params)
        reduce = self._reduce(unit.params, last=True, accumulates=False)
        return UnitWork(
            unit.name,
            self._job.forward_s(unit),
            self._job.backward_s(unit),
            gather_first=forward,
            gather_forward=forward,
            gather_backward=backward if unit.reshards else (),
            reduce=reduce,
            reduce_last=reduce,
            copies=(self._stages.copy_weights(unit),),
            prefetches=deepspeed_prefetches(unit),
        )

    def frozen(self, unit: UnitShape) -> UnitWork:
        format = self._job.model.frozen_format(self._setup.config.frozen_bits)
        gather = FrozenGather(unit, self._size, format)
        stages: tuple[Stage, ...] = ()
        if self._size > 1:
            stages = (self._stages.ring("gather frozen", gather.shard_bytes(), self._reduce_node),)
        copies: tuple[Stage, ...] = (self._stages.copy("copy weights", gather.gathered_bytes()),)
        if format is not None:
            dense = HALF_BYTES * sum(param.numel for param in unit.params)
            copies += (self._stages.kernel("decode frozen", gather.gathered_bytes() + dense),)
        return UnitWork(
            unit.name, self._job.forward_s(unit), self._job.backward_s(unit), stages, stages, stages if unit.reshards else (),
            copies=copies,
        )  # fmt: skip

    # Gathers.

    @functools.cache  # noqa: B019 (a maker lives as long as one estimate)
    def _shards(self, params: tuple[ParamShape, ...]) -> tuple[ParamShard, ...]:
        return tuple(flat_shards(params, self._setup))

    @functools.cache  # noqa: B019
    def _layouts(self, params: tuple[ParamShape, ...]) -> GatherLayouts:
        return gather_layouts(self._config, self._shards(params), torch.bfloat16, trains=True)

    @functools.cache  # noqa: B019
    def _crossing(self, params: tuple[ParamShape, ...]) -> tuple[Stage, ...]:
        """Return the stages that bring a secondary shard up to date: encode, cross hop, and adding a delta."""
        layouts, peers = self._layouts(params), self._gather_cross
        if peers.group_size == 1:
            return ()
        changes = changed_words_bytes(layouts, self._setup.share_of_changes)
        hops = gather_bytes(
            layouts, cross_hop=peers, node_hop=self._gather_node, gathers=1, crossings=1, changes_bytes=changes
        )
        cross_hop = self._stages.exchange("cross hop", hops.cross_hop, peers)
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

    @functools.cache  # noqa: B019
    def _node_gather(self, params: tuple[ParamShape, ...]) -> tuple[Stage, ...]:
        """Return the stages that make whole weights of secondary shards: node hop and decode."""
        layouts, peers = self._layouts(params), self._gather_node
        hops = gather_bytes(layouts, cross_hop=self._gather_cross, node_hop=peers, gathers=1, crossings=0)
        decode = self._setup.world_size * (layouts.kept.nbytes + HALF_BYTES * layouts.kept.numel)
        stages: tuple[Stage, ...] = (self._stages.kernel("decode", decode),)
        # On CPU the ranks of a node read secondary shards in each other's memory.
        if peers.group_size == 1 or self._reads_peers:
            return stages
        return (self._stages.exchange("node hop", hops.node_hop, peers), *stages)

    @functools.cache  # noqa: B019
    def _ring(self, params: tuple[ParamShape, ...], slice_bytes: int | None) -> tuple[Stage, ...]:
        """Return a flat gather over the world: FSDP2's own in 16 bits, or encoded in ``slice_bytes`` per rank."""
        numel = sum(shard.padded_numel for shard in self._shards(params))
        if slice_bytes is None:
            return (self._stages.ring("gather", HALF_BYTES * numel, self._stages.world),)
        world = self._setup.world_size
        return (
            self._stages.kernel("encode", HALF_BYTES * numel + slice_bytes),
            self._stages.ring("gather", slice_bytes, self._stages.world),
            self._stages.kernel("decode", world * (slice_bytes + HALF_BYTES * numel)),
        )

    @functools.cache  # noqa: B019
    def _node_ring(self, params: tuple[ParamShape, ...]) -> tuple[Stage, ...]:
        peers = self._stages.node
        if peers.group_size == 1:
            return ()
        part = HALF_BYTES * sum(param.padded_shard_numel(peers.group_size) for param in params)
        return (self._stages.ring("gather", part, peers),)

    # Reductions.

    @functools.cache  # noqa: B019
    def _reduce(self, params: tuple[ParamShape, ...], *, last: bool, accumulates: bool = True) -> tuple[Stage, ...]:
        """Return the stages of a reduction. The sums of earlier micro-steps are read, and written before the last."""
        setup, config = self._setup, self._config
        layouts = reduce_layouts(config, self._shards(params), setup.reduce_dtype, quantizes=config.quantizes_gradients)
        node, cross = self._reduce_node, self._reduce_cross
        hops = reduce_bytes(layouts, cross_hop=cross, node_hop=node, micro_steps=1)
        numel, world, nodes = layouts.node_hop.numel, setup.world_size, self.num_groups
        full = setup.reduce_dtype.itemsize * world * numel
        arrived = world * layouts.node_hop.nbytes if node.group_size > 1 else full
        partial = SUM_BYTES * nodes * numel if accumulates and setup.micro_steps > 1 else 0
        stages: list[Stage] = [self._stages.copy("copy gradients", full)]
        if node.group_size > 1:
            stages.append(self._stages.kernel("encode", full + world * layouts.node_hop.nbytes))
            stages.append(self._stages.exchange("node hop", hops.node_hop, node))
        if not last:
            return (*stages, self._stages.kernel("sum", arrived + 2 * partial))
        left = nodes * layouts.cross_hop.nbytes
        stages.append(self._stages.kernel("sum and encode", arrived + partial + left))
        if cross.group_size > 1:
            stages.append(self._stages.exchange("cross hop", hops.cross_hop, cross))
        return (*stages, self._stages.kernel("finish", left + setup.reduce_dtype.itemsize * numel))


def _hops(size: int, world_size: int, ranks_per_node: int) -> tuple[Peers, Peers]:
    """Return the peers of a node hop among ``size`` ranks, and of the cross hop between such groups."""
    node = Peers.among(range(size), 0, ranks_per_node)
    return node, Peers.among(range(0, world_size, size), 0, ranks_per_node)
