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

[Note: when a delta will do]
With ``qwz_mode="delta"`` a stale secondary shard is brought up to date by differences. They are coarse where weights moved far,
so whole weights cross instead (a resync) where there is no secondary shard yet, and where weights changed by anything but an
optimizer: when the stamp before an optimizer's step is not the one after the last one's. Signal 3 means that too, and a
checkpoint, whose masters a resumed run starts from. Ranks agree on it for the reason above; ``ZEROPP_CHECK=1`` makes sure.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import GatherLayouts, Secondary, TwoHopGather
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.comm_object import CommObject, CountedAllGather, gather_layouts, gathers_of, warn_once
from hf_zeropp.fsdp.overlap import GatherAhead
from hf_zeropp.fsdp.secondary_check import SecondaryCheck
from hf_zeropp.fsdp.units import AllGather, Unit, WeightStamp
from hf_zeropp.ops.format import FLOAT_DTYPES, WireLayout
from hf_zeropp.traffic import Bytes, Traffic

MANY_SURPRISES = 3

_SURPRISE = (
    "The weights of unit %s keep changing by something that is no step of a torch optimizer (an operation after each step, an "
    "update by hand): whole weights cross each time, four times the bytes of an INT4 delta. Change them in the optimizer's step, "
    "or set qwz_mode='values'."
)


class ZeroPPAllGather(CommObject, AllGather):
    """qwZ and hpZ: gathers a unit's weights in wire form and keeps the secondary shard between weight changes.

    Args:
        unit: the unit it serves.
        gather: the two hops; shared by all units.
        ahead: starts hop 1 of other units early, shared by all; None where streams do that.
        keep_secondary: hpZ on.
        check: compares secondary shards across nodes; None where nobody asked for it.
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
        check: SecondaryCheck | None = None,
    ) -> None:
        self.unit = unit
        self._gather = gather
        self._config = config
        self._traffic = traffic
        self._ahead = ahead
        self._keep_secondary = keep_secondary
        self._check = check
        self._engine = CountedAllGather(unit, traffic)
        self._layouts: dict[tuple[torch.dtype, bool], GatherLayouts] = {}
        self._secondary: Secondary | None = None
        self._held: GatherLayouts | None = None  # of the secondary
        self._stamp: WeightStamp | None = None  # of the weights that the secondary holds
        # With deltas: the stamp of weights that only optimizers changed since the secondary was brought up to date.
        self._basis: WeightStamp | None = None
        self._is_in_optimizer_step = False
        self._num_deltas = 0  # since whole weights crossed
        self._num_surprises = 0  # whole weights in a row for changes that no optimizer made and nobody told of
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
        if self._keep_secondary:
            secondary, layout = self._fresh_secondary(input_tensor)
            self._gather.decode(secondary, layout, output_tensor)
        else:
            self._stamp = self.unit.stamp()
            self._gather(output_tensor, input_tensor, self.layouts(input_tensor.dtype).kept)
        return None

    @property
    def is_fresh(self) -> bool:
        """Whether what was gathered last is still the unit's weights. See [Note: when a secondary shard is stale]."""
        return self._stamp is not None and self._stamp.matches(self.unit.params)

    def expire(self) -> None:
        """Gather across nodes again at the next use, in full. The buffer is kept and overwritten."""
        self._stamp = self._basis = None
        self._num_surprises = 0

    def resync(self) -> None:
        """Gather whole weights at the next use, where deltas brought the secondary shard to what it is."""
        if self._held is not None and self._held.delta is not None:
            self.expire()

    def before_optimizer_step(self) -> None:
        """What changed the weights up to now was no optimizer."""
        if self._basis is not None and not self._basis.matches(self.unit.params):
            self._basis = None
        self._is_in_optimizer_step = self.unit.trains

    def after_optimizer_step(self) -> None:
        """Gather across nodes again at the next use; a delta will do, where it did before."""
        self._stamp = None
        self._is_in_optimizer_step = False
        if self._basis is not None:
            self._basis = self.unit.stamp()

    def start_ahead(self) -> None:
        """Start hop 1 now, if it is due and its input can be had without FSDP2."""
        dtype = self.unit.param_dtype
        if self._keep_secondary and not self.is_fresh and dtype in FLOAT_DTYPES and self.unit.has_plain_shards:
            self._start(dtype, None)
            if self._ahead is None:  # streams overlap: finish in the stream that has allocated what is received
                self._land()

    @property
    def stays_in_group(self) -> bool:
        """Whether a gather of a fresh unit stays among the ranks that share a secondary copy."""
        return self._keep_secondary and self.unit.param_dtype in FLOAT_DTYPES

    def secondary_bytes(self) -> int:
        """Bytes this rank holds between gathers for hpZ."""
        return 0 if self._secondary is None else self._secondary.own.numel()

    def layouts(self, dtype: torch.dtype) -> GatherLayouts:
        """Of weights gathered in ``dtype``. Frozen weights cross once, so they have no use for deltas."""
        key = (dtype, self.unit.trains)
        if key not in self._layouts:
            self._layouts[key] = gather_layouts(self._config, self.unit.param_shards(), dtype, trains=key[1])
        return self._layouts[key]

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` forward and backward passes, without a resync."""
        if self.unit.param_dtype not in FLOAT_DTYPES:
            return self._engine.predict(micro_steps)
        gathers = gathers_of(self.unit, micro_steps)
        layouts = self.layouts(self.unit.param_dtype)
        num_bytes = layouts.kept.nbytes
        cross, node = self._gather.cross, self._gather.node
        counts = {}
        if not self._keep_secondary:
            counts[cross.name] = cross.peers.bytes_of(num_bytes).times(gathers)
        elif self.unit.trainable:  # frozen weights crossed before this step
            counts[cross.name] = cross.peers.bytes_of((layouts.delta or layouts.kept).nbytes)
        if node.size > 1:
            counts[node.name] = node.peers.bytes_of(num_bytes * cross.size).times(gathers)
        return counts

    def _fresh_secondary(self, shard: torch.Tensor) -> tuple[Secondary, WireLayout]:
        """The secondary shard, gathered across nodes if it is stale, and this stream ordered behind its arrival."""
        if not self.is_fresh:
            self._start(shard.dtype, shard)
            if self._ahead is not None:
                self._ahead.start_from(self)
        if self._flight is not None:
            self._land()
        elif self._hop1_done is not None:
            torch.accelerator.current_stream().wait_event(self._hop1_done)
        assert self._secondary is not None and self._held is not None
        return self._secondary, self._held.kept

    def _start(self, dtype: torch.dtype, shard: torch.Tensor | None) -> None:
        """Start hop 1 with weights in ``dtype``; ``shard`` is this rank's where FSDP2 made it already."""
        if self._flight is not None:  # started ahead, and the weights changed since
            self._land()
        layouts = self.layouts(dtype)
        sends_delta = self._delta_will_do(layouts)
        if self._check is not None:
            self._check.same_form(self.unit.name, sends_delta)
        self._flight = self._start_delta(layouts) if sends_delta else self._start_whole(dtype, layouts, shard)
        self._held = layouts
        self._stamp = self.unit.stamp()
        self._basis = None if layouts.delta is None else self._stamp

    def _start_delta(self, layouts: GatherLayouts) -> Flight:
        assert self._secondary is not None
        self._num_deltas += 1
        self._num_surprises = 0
        return self._gather.start_delta(self.unit.master_shards(), layouts, self._secondary)

    def _start_whole(self, dtype: torch.dtype, layouts: GatherLayouts, shard: torch.Tensor | None) -> Flight:
        self._num_deltas = 0
        shard = self.unit.flat_shard(dtype) if shard is None else shard
        if self._secondary is None or self._secondary.own.numel() != self._gather.cross.size * layouts.kept.nbytes:
            self._secondary = self._gather.new_secondary(layouts.kept, shard.device)
        return self._gather.start(shard, layouts, self._secondary)

    def _delta_will_do(self, layouts: GatherLayouts) -> bool:
        """See [Note: when a delta will do]. The same on all ranks, as what makes a secondary shard stale is."""
        if layouts.delta is None or self._secondary is None or layouts != self._held:
            return False
        if self._config.qwz_resync_steps is not None and self._num_deltas >= self._config.qwz_resync_steps:
            return False
        if self._basis is not None and (self._is_in_optimizer_step or self._basis.matches(self.unit.params)):
            return True
        self._num_surprises += 1
        if self._num_surprises > MANY_SURPRISES:
            warn_once(self, _SURPRISE, self.unit.name)
        return False

    def _land(self) -> None:
        assert self._flight is not None and self._held is not None and self._secondary is not None
        self._gather.land(self._flight, self._held, self._secondary)
        self._flight = None
        if self._check is not None:
            self._check.same_copies(self.unit.name, self._secondary.own)
        self._hop1_done = _record_event(self._secondary.own.device)

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
