"""What both comm objects of a unit share. FSDP2 calls a comm object in place of a collective, and asks it for memory."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_zeropp.comm.two_hops import GatherLayouts, ReduceLayouts
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.units import AllGather, DefaultAllGather, ParamShard, Unit
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.traffic import ENGINE_GATHER, Bytes, Peers, Traffic

logger = logging.getLogger(__name__)

FROZEN_WIRE_BITS = 8
"""Of weights that do not train, where those that do send deltas: they cross once, and stay as they crossed."""

RESIDUAL_BITS = 8


def wire_layout(shards: Sequence[ParamShard], bits: int | None, block: int, raw_dtype: torch.dtype) -> WireLayout:
    """Layout of a unit's flat shard: matrices in ``bits``, 1-D parameters (norms, biases) unquantized."""
    segments = [Segment(shard.padded_numel, bits if shard.ndim > 1 else None) for shard in shards]
    return WireLayout(segments, block, raw_dtype)


def gather_layouts(
    config: ZeroPPConfig, shards: Sequence[ParamShard], dtype: torch.dtype, *, trains: bool
) -> GatherLayouts:
    """Of a unit's weights, gathered in ``dtype``."""
    if config.qwz_mode != "delta":
        return GatherLayouts(wire_layout(shards, config.qwz_bits, config.weight_block, dtype))
    if not trains:
        return GatherLayouts(wire_layout(shards, FROZEN_WIRE_BITS, config.weight_block, dtype))
    return GatherLayouts(
        kept=wire_layout(shards, config.hpz_bits, config.weight_block, dtype),
        delta=wire_layout(shards, config.qwz_bits, config.delta_block, dtype),
    )


def reduce_layouts(
    config: ZeroPPConfig, shards: Sequence[ParamShard], dtype: torch.dtype, *, quantizes: bool
) -> ReduceLayouts:
    """Of a unit's gradients, reduced in ``dtype``."""
    node_bits, cross_bits = (config.qgz_intra_bits, config.qgz_bits) if quantizes else (None, None)
    keeps_residual = quantizes and config.error_feedback_decay is not None
    return ReduceLayouts(
        node=wire_layout(shards, node_bits, config.grad_block, dtype),
        cross=wire_layout(shards, cross_bits, config.grad_block, dtype),
        residual=wire_layout(shards, RESIDUAL_BITS, config.grad_block, dtype) if keeps_residual else None,
        rotates=quantizes and config.qgz_hadamard,
    )


class CommObject(ABC):
    """What comm objects have in common besides the call itself: memory, for FSDP2, and a prediction of their bytes."""

    unit: Unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` forward and backward passes, per collective."""


class CountedAllGather(CommObject, AllGather):
    """FSDP2's own gather of a unit, with its bytes counted under ``name``."""

    def __init__(self, unit: Unit, traffic: Traffic, name: str = ENGINE_GATHER) -> None:
        self.unit = unit
        self.name = name
        self._traffic = traffic
        self._engine = DefaultAllGather()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._traffic.record(self.name, self._peers().bytes_in_ring(input_tensor.nbytes))
        with self._traffic.timer.measure(input_tensor.device):
            return self._engine(output_tensor, input_tensor, group, async_op)

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` forward and backward passes."""
        if self.unit.shard_group.size() == 1:
            return {}
        return {
            self.name: self._peers().bytes_in_ring(self.unit.shard_bytes()).times(gathers_of(self.unit, micro_steps))
        }

    def _peers(self) -> Peers:
        return Peers.of(self.unit.shard_group, self._traffic.ranks_per_node)


def gathers_of(unit: Unit, micro_steps: int) -> int:
    """How often FSDP2 gathers a unit in ``micro_steps`` forward and backward passes."""
    return micro_steps * (2 if unit.reshards_after_forward else 1)


_warned: set[tuple[type, str, str]] = set()


def warn_once(comm: CommObject, message: str, *args: object) -> None:
    key = (type(comm), message, comm.unit.name)
    if key not in _warned:
        _warned.add(key)
        logger.warning(message, *args)
