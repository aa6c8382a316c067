"""The exchanges of one unit under this package: peers, wire layouts and bytes, which a run would have.

Memory and bytes (``memory_and_bytes.py``) and step times (``unit_work.py``) both count by them. A unit is laid out by
``fsdp/layouts.py`` and its bytes are counted by ``fsdp/predictions.py``, as in a run. Rank 0 stands for all ranks.
"""

from __future__ import annotations

import torch

from hf_zeropp.comm.topology import resolve_hpz_size
from hf_zeropp.estimate.model_shape import Packing, UnitShape
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.fsdp import predictions
from hf_zeropp.fsdp.layouts import gather_layouts, reduce_layouts
from hf_zeropp.fsdp.param_shard import ParamShard
from hf_zeropp.traffic import Bytes, Peers, total

# Weights and gradients of 16 bits, and masters of 32, are the paper's assumption and what bf16 mixed precision gives.
MASTER_BYTES = 4
HALF_BYTES = 2


def gathers_of(unit: UnitShape, setup: Setup) -> int:
    """Return how often a unit that trains, or any unit under FSDP2, is gathered in one optimizer step.

    It is gathered once where weights stay whole until the last micro-step.
    """
    micro_steps, reshards = setup.micro_steps, unit.reshards
    return (
        1 if setup.config.keeps_weights else predictions.gathers_per_step(micro_steps, reshards_after_forward=reshards)
    )


def hop_peers(group_size: int, setup: Setup) -> tuple[Peers, Peers]:
    """Return the peers of a node hop among ``group_size`` neighbours, and of the cross hop between such groups."""
    # Settings may divide ranks in other groups than the true nodes. Bytes are within a node or across by the true ones.
    node_hop = Peers.among(range(group_size), 0, setup.ranks_per_node)
    return node_hop, Peers.among(range(0, setup.world_size, group_size), 0, setup.ranks_per_node)


def gathers_stay_fsdp2(setup: Setup) -> bool:
    """Return whether weight gathers stay FSDP2's own. ``apply_zeropp`` asks the same question."""
    hpz_size = resolve_hpz_size(setup.config.hpz_size, setup.group_size, setup.world_size)
    return predictions.leaves_gathers_to_fsdp2(setup.config, hpz_size, setup.world_size)


class UnitGather:
    """The weight gathers of one unit: the cross hop, then the node hop over the ranks that share a secondary copy.

    Attributes:
        keeps_secondary: whether a rank keeps a copy.
        is_native: whether the backend's own all-gathers move weights in 16 bits within the node.
        changes_bytes: of the words of one slice that change in a step; None where whole weights or deltas are sent.
        hops: what one rank receives in one gather.
    """

    def __init__(self, unit: UnitShape, setup: Setup) -> None:
        hpz_size = resolve_hpz_size(setup.config.hpz_size, setup.group_size, setup.world_size)
        self.keeps_secondary = hpz_size is not None
        self.node_hop, self.cross_hop = hop_peers(hpz_size or setup.group_size, setup)
        # bf16 is the compute dtype that is assumed throughout.
        self.layouts = gather_layouts(setup.settings, flat_shards(unit, setup), torch.bfloat16, trains=True)
        self.is_native = self.layouts.is_native and self.node_hop.group_size > 1
        self.changes_bytes = predictions.changed_words_bytes(self.layouts, setup.share_of_changes)
        peers = {"cross_hop": self.cross_hop, "node_hop": self.node_hop}
        self.hops = predictions.gather_bytes(
            self.layouts, **peers, gathers=1, crossings=1, changes_bytes=self.changes_bytes
        )
        self._gathers = gathers_of(unit, setup)

    def secondary_bytes(self) -> int:
        """Return the bytes of the copy that a rank keeps."""
        return self.cross_hop.group_size * self.layouts.kept.nbytes if self.keeps_secondary else 0

    def landing_bytes(self) -> int:
        """Return the bytes of the buffers of one cross hop that changes a secondary shard, beside that shard."""
        if self.changes_bytes is not None:  # one wire is sent, and kept until it has arrived
            return (1 + self.cross_hop.group_size) * self.changes_bytes
        return 0 if self.layouts.delta is None else self.cross_hop.group_size * self.layouts.delta.nbytes

    def step_bytes(self) -> Bytes:
        """Return what one rank receives in a step."""
        crossings = predictions.crossings_per_step(self._gathers, keeps_secondary=self.keeps_secondary, trains=True)
        return total((self.hops.cross_hop.times(crossings), self.hops.node_hop.times(self._gathers)))


class UnitReduce:
    """The gradient reductions of one unit: the node hop at every micro-step, the cross hop once per step.

    Attributes:
        is_native: whether the backend's own reduce-scatters run within the node.
        hops: what one rank receives in one reduction that crosses nodes.
    """

    def __init__(self, unit: UnitShape, setup: Setup) -> None:
        self.node_hop, self.cross_hop = hop_peers(setup.group_size, setup)
        # ``qgz_until`` is left out: the estimate is of a step in which gradients are quantized.
        shards, quantizes = flat_shards(unit, setup), setup.settings.quantizes_gradients
        self.layouts = reduce_layouts(setup.settings, shards, setup.reduce_dtype, quantizes=quantizes)
        self.is_native = self.layouts.is_native and self.node_hop.group_size > 1
        self.hops = predictions.reduce_bytes(
            self.layouts, cross_hop=self.cross_hop, node_hop=self.node_hop, micro_steps=1
        )
        self._setup = setup
        self._trainable = sum(param.numel for param in unit.trainable)

    def accumulator_bytes(self) -> int:
        """Return the bytes of the gradients between micro-steps: full-size ones on the rank, or 1/N of their sums in the node."""
        setup, numel = self._setup, self.layouts.node_hop.numel
        if setup.micro_steps == 1:
            return 0
        if setup.config.accumulates_on_rank:
            return setup.reduce_dtype.itemsize * self._trainable
        return getattr(torch, setup.config.qgz_accumulator).itemsize * self.cross_hop.group_size * numel

    def step_bytes(self) -> Bytes:
        """Return what one rank receives in a step."""
        on_rank = self._setup.config.accumulates_on_rank
        times = predictions.reductions_per_step(self._setup.micro_steps, accumulates_on_rank=on_rank)
        return total((self.hops.cross_hop, self.hops.node_hop.times(times)))


class FrozenUnitGather:
    """The gathers of one frozen unit within the node; ``packing`` is None where its weights stay in 16 bits.

    Attributes:
        shard_bytes: that each rank holds: the largest shard of the node, to which FSDP2 pads the others.
        gathered_bytes: of the unit while it is gathered. Packed weights stay packed.
        decoded_bytes: of the largest weight that a layer decodes. Layers compute one after the other.
        decoding_bytes: that decoding all packed weights reads and writes.
    """

    def __init__(self, unit: UnitShape, setup: Setup, packing: Packing | None) -> None:
        self.unit = unit
        self.node_hop, _ = hop_peers(setup.group_size, setup)
        # ``qgz_accumulate="whole"`` keeps the units that train gathered, and no frozen one.
        self._gathers = predictions.gathers_per_step(setup.micro_steps, reshards_after_forward=unit.reshards)
        size = self.node_hop.group_size
        codes = dense = 0
        packed = [0]  # elements of weights
        for param in unit.params:
            # Norms, biases and small matrices stay in 16 bits beside packed weights, in the same unit.
            if packing is not None and packing.packs(param):
                codes += packing.format.nbytes(param.padded_shard(size))
                packed.append(param.numel)
            else:
                dense += HALF_BYTES * param.padded_shard_numel(size)
        self.shard_bytes = codes + dense
        self.gathered_bytes = size * self.shard_bytes
        self.decoded_bytes = HALF_BYTES * max(packed)
        self.decoding_bytes = size * codes + HALF_BYTES * sum(packed)

    def step_bytes(self) -> Bytes:
        """Return what one rank receives in a step. There is no secondary shard: the shards lie in the node already."""
        return self.node_hop.bytes_in_ring(self.shard_bytes).times(self._gathers)


def flat_shards(unit: UnitShape, setup: Setup) -> list[ParamShard]:
    """Return a rank's shards of a unit as wire layouts take them. On rank 0 they have no padding of their own."""
    # The number of dimensions matters beside the size: 1-D parameters travel unquantized.
    params, world = unit.params, setup.world_size
    return [ParamShard("", numel := one.padded_shard_numel(world), numel, len(one.shape)) for one in params]
