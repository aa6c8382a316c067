"""What both comm objects of a unit share. FSDP2 calls a comm object in place of a collective, and asks it for memory."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_zeropp.format import Segment, WireLayout
from hf_zeropp.traffic import ENGINE_GATHER, Bytes, Peers, Traffic
from hf_zeropp.units import AllGather, DefaultAllGather, ParamShard, Unit

logger = logging.getLogger(__name__)


def wire_layout(shards: Sequence[ParamShard], bits: int | None, block: int, raw_dtype: torch.dtype) -> WireLayout:
    """Layout of a unit's flat shard: matrices in ``bits``, 1-D parameters (norms, biases) unquantized."""
    segments = [Segment(shard.padded_numel, bits if shard.ndim > 1 else None) for shard in shards]
    return WireLayout(segments, block, raw_dtype)


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
