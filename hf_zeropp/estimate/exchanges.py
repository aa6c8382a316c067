"""The exchanges of one unit under this package: peers, wire layouts and bytes, which a run would have.

Memory and bytes (``memory_and_bytes.py``) and step times (``unit_work.py``) both count by them. A unit is laid out by
``fsdp/layouts.py`` and its bytes are counted by ``fsdp/predictions.py``, as in a run. Rank 0 stands for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_zeropp.comm.topology import resolve_hpz_size
from hf_zeropp.estimate.model_shape import Packing, ParamShape, UnitShape
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.fsdp.layouts import gather_layouts, reduce_layouts
from hf_zeropp.fsdp.param_shard import ParamShard
from hf_zeropp.fsdp.predictions import (
    HopBytes,
    changed_words_bytes,
    gather_bytes,
    gathers_per_step,
    leaves_gathers_to_fsdp2,
    reduce_bytes,
    reductions_per_step,
)
from hf_zeropp.traffic import Bytes, Peers

# Weights and gradients of 16 bits, and masters of 32, are the paper's assumption and what bf16 mixed precision gives.
MASTER_BYTES = 4
HALF_BYTES = 2


def hop_peers(group_size: int, setup: Setup) -> tuple[Peers, Peers]:
    """Return the peers of a node hop among ``group_size`` neighbours, and of the cross hop between such groups."""
    # Settings may divide ranks in other groups than the true nodes. Bytes are within a node or across by the true ones.
    node_hop = Peers.among(range(group_size), 0, setup.ranks_per_node)
    return node_hop, Peers.among(range(0, setup.world_size, group_size), 0, setup.ranks_per_node)


def gathers_stay_fsdp2(setup: Setup) -> bool:
    """Return whether weight gathers stay FSDP2's own. ``apply_zeropp`` asks the same question."""
    hpz_size = resolve_hpz_size(setup.config.hpz_size, setup.group_size, setup.world_size)
    return leaves_gathers_to_fsdp2(setup.config, hpz_size, setup.world_size)


class UnitGather:
    """The weight gathers of one unit: the cross hop, then the node hop over the ranks that share a secondary copy."""

    def __init__(self, params: Iterable[ParamShape], setup: Setup) -> None:
        hpz_size = resolve_hpz_size(setup.config.hpz_size, setup.group_size, setup.world_size)
        self.keeps_secondary = hpz_size is not None
        self.node_hop, self.cross_hop = hop_peers(hpz_size or setup.group_size, setup)
        # bf16 is the compute dtype that is assumed throughout.
        self.layouts = gather_layouts(setup.settings, flat_shards(params, setup), torch.bfloat16, trains=True)
        # The backend's own all-gathers move weights in 16 bits within the node.
        self.is_native = self.layouts.is_native and self.node_hop.group_size > 1
        self.changes_bytes = changed_words_bytes(self.layouts, setup.share_of_changes)

    def secondary_bytes(self) -> int:
        """Return the bytes of the copy that a rank keeps."""
        return self.cross_hop.group_size * self.layouts.kept.nbytes if self.keeps_secondary else 0

    def landing_bytes(self) -> int:
        """Return the bytes of the buffers of one cross hop that changes a secondary shard, beside that shard."""
        if self.changes_bytes is not None:  # one wire is sent, and kept until it has arrived
            return (1 + self.cross_hop.group_size) * self.changes_bytes
        return 0 if self.layouts.delta is None else self.cross_hop.group_size * self.layouts.delta.nbytes

    def hops(self, gathers: int, crossings: int) -> HopBytes:
        """Return what one rank receives in so many gathers, of which some cross nodes."""
        return gather_bytes(
            self.layouts,
            cross_hop=self.cross_hop,
            node_hop=self.node_hop,
            gathers=gathers,
            crossings=crossings,
            changes_bytes=self.changes_bytes,
        )


class UnitReduce:
    """The gradient reductions of one unit: the node hop at every micro-step, the cross hop once per step."""

    def __init__(self, params: Iterable[ParamShape], setup: Setup) -> None:
        self.node_hop, self.cross_hop = hop_peers(setup.group_size, setup)
        # ``qgz_until`` is left out: the estimate is of a step in which gradients are quantized.
        shards, quantizes = flat_shards(params, setup), setup.settings.quantizes_gradients
        self.layouts = reduce_layouts(setup.settings, shards, setup.reduce_dtype, quantizes=quantizes)
        # The backend's own reduce-scatters run within the node.
        self.is_native = self.layouts.is_native and self.node_hop.group_size > 1
        self._setup = setup

    def accumulator_bytes(self) -> int:
        """Return the bytes of the gradients between micro-steps: full-size ones on the rank, or 1/N of their sums in the node."""
        setup, numel = self._setup, self.layouts.node_hop.numel
        if setup.micro_steps == 1:
            return 0
        if setup.config.accumulates_on_rank:
            return setup.reduce_dtype.itemsize * setup.world_size * numel
        return getattr(torch, setup.config.qgz_accumulator).itemsize * self.cross_hop.group_size * numel

    def hops(self, micro_steps: int) -> HopBytes:
        """Return what one rank receives in so many micro-steps."""
        times = reductions_per_step(micro_steps, accumulates_on_rank=self._setup.config.accumulates_on_rank)
        return reduce_bytes(self.layouts, cross_hop=self.cross_hop, node_hop=self.node_hop, micro_steps=times)


class FrozenUnitGather:
    """The gathers of one frozen unit within the node; ``packing`` is None where its weights stay in 16 bits."""

    def __init__(self, unit: UnitShape, setup: Setup, packing: Packing | None) -> None:
        self.unit = unit
        self.node_hop, _ = hop_peers(setup.group_size, setup)
        self._packing = packing
        self._packed = [param for param in unit.params if packing is not None and packing.packs(param)]

    def shard_bytes(self) -> int:
        """Return the bytes that each rank holds: the largest shard of the node, to which FSDP2 pads the others."""
        return sum(self._shard_bytes(param) for param in self.unit.params)

    def gathered_bytes(self) -> int:
        """Return the bytes of the unit while it is gathered. Packed weights stay packed."""
        return self.node_hop.group_size * self.shard_bytes()

    def decoded_bytes(self) -> int:
        """Return the bytes of the largest weight that a layer decodes. Layers compute one after the other."""
        return HALF_BYTES * max((param.numel for param in self._packed), default=0)

    def decoding_bytes(self) -> int:
        """Return the bytes that decoding all packed weights reads and writes."""
        codes = self.node_hop.group_size * sum(map(self._shard_bytes, self._packed))
        return codes + HALF_BYTES * sum(param.numel for param in self._packed)

    def step_bytes(self, micro_steps: int) -> Bytes:
        """Return what one rank receives in a step. There is no secondary shard: the shards lie in the node already."""
        gathers = gathers_per_step(micro_steps, reshards_after_forward=self.unit.reshards)
        return self.node_hop.bytes_in_ring(self.shard_bytes()).times(gathers)

    def _shard_bytes(self, param: ParamShape) -> int:
        # Norms, biases and small matrices stay in 16 bits beside packed weights, in the same unit.
        if self._packing is None or not self._packing.packs(param):
            return HALF_BYTES * param.padded_shard_numel(self.node_hop.group_size)
        return self._packing.format.nbytes(param.padded_shard(self.node_hop.group_size))


def flat_shards(params: Iterable[ParamShape], setup: Setup) -> list[ParamShard]:
    """Return a rank's shards of parameters as wire layouts take them. On rank 0 they have no padding of their own."""
    # The number of dimensions matters beside the size: 1-D parameters travel unquantized.
    sizes = ((param, param.padded_shard_numel(setup.world_size)) for param in params)
    return [ParamShard("", numel, numel, len(param.shape)) for param, numel in sizes]
