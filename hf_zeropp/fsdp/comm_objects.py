"""The base of all comm objects, and the gather that stays FSDP2's own.

A *comm object* is what FSDP2 calls in place of a collective, and asks for the memory of the collective's input and output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hf_zeropp import devices
from hf_zeropp.comm.hop import HopError
from hf_zeropp.fsdp.predictions import gathers_per_step
from hf_zeropp.fsdp.units import AllGather, DefaultAllGather, Unit
from hf_zeropp.traffic import FSDP2_GATHER, Bytes, Peers, Traffic


@contextmanager
def naming(unit: Unit) -> Iterator[None]:
    """Let an error of a hop that runs inside name ``unit``."""
    try:
        yield
    except HopError as error:
        # The innermost unit is the one whose hop failed: a unit's reduction also takes the one before it on.
        if error.unit is None:
            error.unit = unit.name
        raise


class CommObject(ABC):
    """A comm object of ``unit``."""

    unit: Unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the collective, for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step of ``micro_steps`` forward and backward passes, by collective."""


class CountedAllGather(CommObject, AllGather):
    """FSDP2's own gather of a unit, with its bytes counted under ``name``."""

    def __init__(self, unit: Unit, traffic: Traffic, name: str = FSDP2_GATHER) -> None:
        self.unit = unit
        self.name = name
        self._traffic = traffic
        self._fsdp2 = DefaultAllGather()
        self._shard_bytes: int | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather as FSDP2 does: output [W * S] <- every rank's input [S], in rank order."""
        self.begin()
        self._shard_bytes = input_tensor.nbytes
        self._traffic.record(self.name, self._peers().bytes_in_ring(input_tensor.nbytes))
        try:
            return self._fsdp2(output_tensor, input_tensor, group, async_op)
        except RuntimeError as error:
            raise HopError(self.name, group, error, self.unit.name) from error

    def begin(self) -> None:
        """Called before each gather."""

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step."""
        if self.unit.shard_group.size() == 1:
            return {}
        gathers = gathers_per_step(micro_steps, reshards_after_forward=self.unit.reshards_after_forward)
        # Before a first gather a tensor that makes the gather's input itself counts with its own size.
        num_bytes = self.unit.shard_bytes() if self._shard_bytes is None else self._shard_bytes
        return {self.name: self._peers().bytes_in_ring(num_bytes).times(gathers)}

    def _peers(self) -> Peers:
        return Peers.of(self.unit.shard_group, self._traffic.ranks_per_node)


def record_event(device: torch.device) -> torch.Event | None:
    """Return an event of the current stream, for other streams to wait for; None on a device without streams."""
    return torch.accelerator.current_stream(device).record_event() if devices.has_streams(device) else None
