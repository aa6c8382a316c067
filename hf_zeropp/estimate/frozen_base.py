"""The frozen base of a LoRA job, as this package's Accelerate plugin holds and gathers it (``frozen/units.py``).

Each node holds all frozen weights, 1/N of them on each of its ranks, in 16 bits or packed (``frozen_bits``). FSDP2 gathers a
unit within the node for the forward pass and again for the backward pass, in the form in which it is stored.
"""

from __future__ import annotations

from hf_zeropp.estimate.model_shape import ParamShape, UnitShape
from hf_zeropp.fsdp.predictions import gathers_per_step
from hf_zeropp.ops.frozen_format import FrozenFormat
from hf_zeropp.traffic import Bytes, Peers

UNPACKED_BYTES = 2
"""Bytes of a frozen weight that is not packed: bf16, the compute dtype that the estimate assumes throughout."""


class FrozenGather:
    """The gathers of one frozen unit.

    Args:
        unit: its parameters are all frozen.
        ranks_per_node: the number of ranks over which the unit is sharded, N.
        format: the format of packed weights; None where they stay in 16 bits.
    """

    def __init__(self, unit: UnitShape, ranks_per_node: int, format: FrozenFormat | None) -> None:
        self.unit = unit
        # All ranks of a node receive the same number of bytes, so the first one stands for them all.
        self._node = Peers.among(range(ranks_per_node), 0, ranks_per_node)
        self._format = format

    def shard_bytes(self) -> int:
        """Return the bytes that each rank holds: the largest shard of the node, to which FSDP2 pads the others."""
        return sum(self._shard_bytes(param) for param in self.unit.params)

    def gathered_bytes(self) -> int:
        """Return the bytes of the unit while it is gathered. Packed weights stay packed."""
        return self._node.group_size * self.shard_bytes()

    def decoded_bytes(self) -> int:
        """Return the bytes of the largest weight that a layer decodes. Layers compute one after the other."""
        if self._format is None:
            return 0
        # A layer decodes its weight into new memory and frees it when it has computed, so one weight at a time counts.
        return UNPACKED_BYTES * max((param.numel for param in self.unit.params if param.packable), default=0)

    def step_bytes(self, micro_steps: int) -> Bytes:
        """Return what one rank receives in a step."""
        if self._node.group_size == 1:  # FSDP2 makes no call in a group of one rank
            return Bytes()
        # The same function counts the gathers of a run. Frozen weights have no secondary shard: their own shards lie in the
        # node already, and every gather is one over the node.
        gathers = gathers_per_step(micro_steps, reshards_after_forward=self.unit.reshards)
        return self._node.bytes_in_ring(self.shard_bytes()).times(gathers)

    def _shard_bytes(self, param: ParamShape) -> int:
        # Norms, biases and small matrices stay in 16 bits beside packed weights, in the same unit.
        if self._format is None or not param.packable:
            return UNPACKED_BYTES * param.padded_shard_numel(self._node.group_size)
        return self._format.nbytes(param.padded_shard(self._node.group_size))
