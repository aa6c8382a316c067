"""qwZ and hpZ for FSDP2: one all-gather object per unit, over the two-hop gather.

[Note: when a secondary shard is stale]
A secondary shard is a copy of the weights. It serves until they change, which we learn from three signals:
1. the stamp (identity and version counters of the unit's sharded parameters) differs from the one taken at hop 1;
2. an optimizer stepped (a global post-hook): optimizers may write through data pointers, which moves no counter;
3. somebody said so: ``load_state_dict`` hooks, or ``handle.invalidate()`` after writes through ``.data``.
The signals are local, and they decide which collectives run. Ranks agree on them because a program changes weights on
all ranks or on none, as every operation on a DTensor must; a change made on one rank alone would hang.
A forward between ``backward()`` and ``optimizer.step()`` refills the copy with weights that are about to change:
signal 2 covers it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_zeropp.collectives import Flight, Secondary, TwoHopGather
from hf_zeropp.comm_object import CommObject, CountedAllGather, gathers_of, warn_once, wire_layout
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.format import FLOAT_DTYPES, WireLayout
from hf_zeropp.overlap import GatherAhead
from hf_zeropp.traffic import Bytes, Traffic
from hf_zeropp.units import AllGather, Unit, WeightStamp


class ZeroPPAllGather(CommObject, AllGather):
    """qwZ and hpZ: gathers a unit's weights in wire form and keeps the secondary shard between weight changes.

    Args:
        unit: the unit it serves.
        gather: the two hops; shared by all units.
        ahead: starts hop 1 of other units early, shared by all; None where streams do that.
        keep_secondary: hpZ on.
    """

    def __init__(
        self,
        unit: Unit,
        gather: TwoHopGather,
        config: ZeroPPConfig,
        traffic: Traffic,
        *,
        ahead: GatherAhead | None,
        keep_secondary: bool,
    ) -> None:
        self.unit = unit
        self._gather = gather
        self._bits = config.qwz_bits
        self._block = config.weight_block
        self._traffic = traffic
        self._ahead = ahead
        self._keep_secondary = keep_secondary
        self._engine = CountedAllGather(unit, traffic)
        self._layouts: dict[torch.dtype, WireLayout] = {}
        self._secondary: Secondary | None = None
        self._stamp: WeightStamp | None = None
        self._flight: Flight | None = None  # hop 1 under way
        self._hop1_done: torch.Event | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """output [W * S] <- every rank's input [S] in rank order, as the wire form decodes it (also its own)."""
        if input_tensor.dtype not in FLOAT_DTYPES:
            return self._gather_unquantized(output_tensor, input_tensor, group, async_op)
        layout = self.layout(input_tensor.dtype)
        if self._keep_secondary:
            self._gather.decode(self._fresh_secondary(input_tensor, layout), layout, output_tensor)
        else:
            self._stamp = self.unit.stamp()
            self._gather(output_tensor, input_tensor, layout)
        return None

    @property
    def is_fresh(self) -> bool:
        """Whether what was gathered last is still the unit's weights. See [Note: when a secondary shard is stale]."""
        return self._stamp is not None and self._stamp.matches(self.unit.params)

    def expire(self) -> None:
        """Gather across nodes again at the next use. The buffer is kept and overwritten."""
        self._stamp = None

    def start_ahead(self) -> None:
        """Start hop 1 now, if it is due and its input can be had without FSDP2."""
        dtype = self.unit.param_dtype
        if self._keep_secondary and not self.is_fresh and dtype in FLOAT_DTYPES and self.unit.has_plain_shards:
            self._start(self.unit.flat_shard(dtype), self.layout(dtype))

    @property
    def stays_in_group(self) -> bool:
        """Whether a gather of a fresh unit stays among the ranks that share a secondary copy."""
        return self._keep_secondary and self.unit.param_dtype in FLOAT_DTYPES

    def secondary_bytes(self) -> int:
        """Bytes this rank holds between gathers for hpZ."""
        return 0 if self._secondary is None else self._secondary.own.numel()

    def layout(self, dtype: torch.dtype) -> WireLayout:
        if dtype not in self._layouts:
            self._layouts[dtype] = wire_layout(self.unit.param_shards(), self._bits, self._block, dtype)
        return self._layouts[dtype]

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` forward and backward passes."""
        if self.unit.param_dtype not in FLOAT_DTYPES:
            return self._engine.predict(micro_steps)
        gathers = gathers_of(self.unit, micro_steps)
        num_bytes = self.layout(self.unit.param_dtype).nbytes
        cross, node = self._gather.cross, self._gather.node
        counts = {}
        if not self._keep_secondary:
            counts[cross.name] = cross.peers.bytes_of(num_bytes).times(gathers)
        elif self.unit.trainable:  # frozen weights crossed before this step
            counts[cross.name] = cross.peers.bytes_of(num_bytes)
        if node.size > 1:
            counts[node.name] = node.peers.bytes_of(num_bytes * cross.size).times(gathers)
        return counts

    def _fresh_secondary(self, shard: torch.Tensor, layout: WireLayout) -> Secondary:
        """The secondary shard, gathered across nodes if it is stale, and this stream ordered behind its arrival."""
        if not self.is_fresh:
            self._start(shard, layout)
            if self._ahead is not None:
                self._ahead.start_from(self)
        if self._flight is not None:
            self._land()
            self._hop1_done = _record_event(shard.device)
        elif self._hop1_done is not None:
            torch.accelerator.current_stream().wait_event(self._hop1_done)
        assert self._secondary is not None
        return self._secondary

    def _start(self, shard: torch.Tensor, layout: WireLayout) -> None:
        if self._flight is not None:  # started ahead, and the weights changed since
            self._land()
        if self._secondary is None or self._secondary.own.numel() != self._gather.cross.size * layout.nbytes:
            self._secondary = self._gather.new_secondary(layout, shard.device)
        self._stamp = self.unit.stamp()
        self._flight = self._gather.start(shard, layout, self._secondary)

    def _land(self) -> None:
        assert self._flight is not None and self._secondary is not None
        self._gather.land(self._flight, self._secondary)
        self._flight = None

    def _gather_unquantized(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        warn_once(
            self,
            "The unit %s mixes dtypes (or holds one that is no float of 16 or 32 bits): its weights are gathered by "
            "FSDP2, unquantized and across nodes. Give its parameters one dtype, or set mixed_precision.",
            self.unit.name,
        )
        return self._engine(output, shard, group, async_op)


def _record_event(device: torch.device) -> torch.Event | None:
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
