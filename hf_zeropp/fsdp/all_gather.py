"""qwZ and hpZ for FSDP2: one all-gather object per unit, over the two-hop gather.

FSDP2 calls the object whenever it needs a unit's weights. It decodes them from the secondary shard, which costs the hop
within the node alone. The hop across nodes runs before that if the secondary shard is stale: freshness.py says when it is,
decisions.py how ranks agree on it. On CPU the cross hop is started for all stale units together, when a forward pass begins.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import Changes, GatherLayouts, Secondary, TwoHopGather
from hf_zeropp.fsdp.comm_objects import (
    AsksBeforeGathers,
    CountedAllGather,
    WeightGather,
    names_unit,
    record_event,
)
from hf_zeropp.fsdp.freshness import Change, Freshness
from hf_zeropp.fsdp.layouts import gather_layouts
from hf_zeropp.fsdp.predictions import crossings_per_step, gather_bytes, gathers_per_step
from hf_zeropp.fsdp.run import Run
from hf_zeropp.fsdp.secondary_check import CheckedUnit, SecondaryCheck
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.traffic import Bytes

logger = logging.getLogger(__name__)

MANY_SURPRISES = 3
"""Resyncs in a row that no optimizer and no call explains: more than that is worth a warning."""

DELTAS_IN_A_ROW = 32
"""``qwz_mode="auto"``: deltas after which a unit sends changed words again, to see how many there are by now."""

MIXED_DTYPES = (
    "These units mix dtypes, or hold one that is no float of 16 or 32 bits, or tensors that make the input of their gather "
    "themselves (fsdp_pre_all_gather, as torchao's), so FSDP2 gathers their weights, unquantized and across nodes: %s. Give "
    "their parameters one dtype, set mixed_precision (without param_dtype_override_fn), or give such tensors units of their own."
)
_NOT_ASYNC = (
    "unshard(async_op=True) of these units gathers them before it returns, and overlaps with nothing: %s. Leave prefetching to "
    "FSDP2 (set_modules_to_forward_prefetch), which gathers on streams of its own."
)
_SURPRISE = (
    "The weights of unit %s keep changing by something that is no step of a torch optimizer (an operation after each step, an "
    "update by hand): whole weights cross each time, four times the bytes of an INT4 delta. Change them in the optimizer's step, "
    "or set qwz_mode='values'."
)


_DAMAGED = (
    "Changed words of unit %s arrived damaged on ranks %s, which have computed with older weights since the last crossing. "
    "Whole weights cross now. Bytes are damaged in the network, in memory or by a kernel: go on from an earlier checkpoint, and "
    "look for the cause."
)


@dataclasses.dataclass
class Copy:
    """A unit's secondary shard, and how it came to hold what it holds.

    Attributes:
        secondary: the wires.
        layouts: the form in which they hold the weights.
        flight: the cross hop that brings it up to date, while that is under way.
        arrived: recorded when that hop has ended, for other streams to wait for; None on CPU.
        num_deltas: deltas since whole weights or changed words crossed.
        num_surprises: resyncs in a row for edits.
        num_changes: times that changed words crossed, or deltas in their place (``qwz_mode="auto"``).
        changes_bytes: bytes of one rank's wires in all of these.
    """

    secondary: Secondary
    layouts: GatherLayouts
    flight: Flight | None = None
    arrived: torch.Event | None = None
    num_deltas: int = 0
    num_surprises: int = 0
    num_changes: int = 0
    changes_bytes: int = 0


class ZeroPPAllGather(WeightGather):
    """Gathers a unit's weights in wire form, and keeps the secondary shard between changes of the weights.

    Args:
        unit: the unit it serves.
        run: what all units share.
        decisions: what ranks decide together.
        hops: the two hops; shared by all units.
        check: compares secondary shards with the masters; None where nobody asked for it.
    """

    def __init__(
        self,
        unit: Unit,
        run: Run,
        decisions: AsksBeforeGathers,
        hops: TwoHopGather,
        check: SecondaryCheck | None = None,
    ) -> None:
        super().__init__(unit, Freshness(unit, checks_steps=run.config.sends_deltas), decisions)
        self.hops = hops
        self._config = run.config
        self._warnings = run.warnings
        self._keeps_secondary = run.hpz_size is not None
        # On accelerators, where streams overlap by themselves, a cross hop that is started ahead is also finished at once.
        self._lands_at_once = not run.overlaps_by_itself
        self._check = None if check is None else CheckedUnit(check, unit, hops)
        self._beside = run.beside
        self._fsdp2 = CountedAllGather(unit, run.traffic)
        # The key is dtype and whether the unit trains. Both may change during a run: a conversion, or a unit that
        # thaws.
        self._layouts: dict[tuple[torch.dtype, bool], GatherLayouts] = {}
        self._kept: Copy | None = None
        self._changes: Changes | None = None  # encoded, and sent when the cross hop starts

    @names_unit
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather: output [W * S] <- every rank's input [S] in rank order, as the wire form decodes it (also its own)."""
        # Within a pass this asks nothing. ``unshard()`` outside of one also gathers, and there ranks have to agree
        # first.
        self._decisions.before_gather(self)
        if async_op:
            self._warnings.warn(_NOT_ASYNC, [self.unit])
        if self.unit.param_dtype not in FLOAT_DTYPES:
            self._took_weights()
            # FSDP2's own gather reads the shards as they are now, so it counts as a copy that was just taken.
            self._unsharded_from = self._num_copies
            return self._gather_unquantized(output_tensor, input_tensor, group, async_op)
        if self._beside is not None:
            self._beside.gathers.reach(self)
        if self._keeps_secondary:
            # FSDP2 has already cast and joined the shard, fresh or not. It is read only if the cross hop is still
            # due.
            kept = self._up_to_date(input_tensor)
            self.hops.decode(kept.secondary, kept.layouts.kept, output_tensor)
        else:
            self._took_weights()
            self.hops(output_tensor, input_tensor, self.layouts(input_tensor.dtype).kept)
        # ``agree`` compares the two: a unit that stayed unsharded must not serve with weights of an older copy.
        # No work is returned, because everything is on this stream already: FSDP2 records its event after this call.
        self._unsharded_from = self._num_copies
        return None

    def expire(self) -> None:
        """Gather whole weights at the next forward pass, as somebody who knows why asks for it."""
        super().expire()
        if self._kept is not None:
            self._kept.num_surprises = 0

    def agree(self, change: Change) -> None:
        """Take note of the change that all ranks agreed on."""
        super().agree(change)
        if self._check is not None:
            self._check.agreed(is_fresh=self.due == Change.NONE)

    def resync(self) -> None:
        """Gather whole weights at the next forward pass, where deltas brought the secondary shard to what it is."""
        if self._kept is not None and self._kept.layouts.delta is not None:
            self.expire()

    @property
    def can_start_ahead(self) -> bool:
        """Whether the cross hop is due, and its input can be had without FSDP2."""
        # Also a unit that the last pass skipped: which units a rank used is its own affair, and must not choose collectives.
        is_due = self._keeps_secondary and self.due != Change.NONE
        return is_due and self.unit.param_dtype in FLOAT_DTYPES and self.unit.has_plain_shards

    @names_unit
    def encode_ahead(self) -> Changes | None:
        """Encode the changed words that the cross hop will send; None where it sends something else."""
        dtype, kept, self._changes = self.unit.param_dtype, self._kept, None
        layouts = self.layouts(dtype)
        if layouts.sends_changes:
            # The shard is compared with what arrives. A rank that compares nothing, in the middle of a row of deltas, lands here
            # too: other ranks of its node may not, and all of them must meet at the node's barriers in one order.
            self._land_flight()
        if kept is not None and self._tries_changes(kept, layouts):
            self._changes = self.hops.encode_changes(self.unit.shards_to_encode(dtype), layouts, kept.secondary)
            self._note_encoded(layouts)
            # The hop may start later in the pass. What is written until then was not encoded, and is a new change.
            self.freshness.taken()
        return self._changes

    @names_unit
    def start_ahead(self) -> None:
        """Start the cross hop, behind ``encode_ahead`` and the exchange of sizes."""
        # On an accelerator waiting orders streams and holds up nobody. On CPU the hop is left under way until the unit is
        # needed, so that the hops of all units overlap with each other and with compute.
        kept = self._start(self.unit.param_dtype, None)
        if self._lands_at_once:
            self._land(kept)

    @property
    def stays_in_group(self) -> bool:
        """Whether a gather of a fresh unit stays among the ranks that share a secondary copy."""
        return self._keeps_secondary and self.unit.param_dtype in FLOAT_DTYPES

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether a gather now is a collective of all ranks, and not one within a node."""
        # Cross hops on streams of their own start in one order, whatever units a rank uses.
        starts_by_itself = self._beside is not None and self.can_start_ahead
        return not self.stays_in_group or (self.due != Change.NONE and not starts_by_itself)

    def secondary_bytes(self) -> int:
        """Return the bytes that this rank holds between gathers for hpZ."""
        return 0 if self._kept is None else self._kept.secondary.own.numel()

    def layouts(self, dtype: torch.dtype) -> GatherLayouts:
        """Return the wire layouts for gathering the unit in ``dtype``, with its parameters frozen as they are now."""
        key = (dtype, self.unit.trains)
        if key not in self._layouts:
            self._layouts[key] = gather_layouts(self._config, self.unit.param_shards(), dtype, trains=key[1])
        return self._layouts[key]

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step that makes no resync."""
        if self.unit.param_dtype not in FLOAT_DTYPES:
            return self._fsdp2.predict(micro_steps)
        cross, node = self.hops.cross_hop, self.hops.node_hop
        gathers = gathers_per_step(micro_steps, reshards_after_forward=self.unit.reshards_after_forward)
        crossings = crossings_per_step(gathers, keeps_secondary=self._keeps_secondary, trains=self.unit.trains)
        measured = self._measured_changes()
        predicted = gather_bytes(
            self.layouts(self.unit.param_dtype),
            cross_hop=cross.peers,
            node_hop=node.peers,
            gathers=gathers,
            crossings=crossings,
            changes_bytes=measured,
        )
        predicted.cross_hop.is_measured = measured is not None
        return predicted.by_name(cross_hop=cross.name, node_hop=node.name)

    def _measured_changes(self) -> int | None:
        """Return the mean bytes of changed words that one rank sent in a step, their sizes included; None before any."""
        if self._kept is None or not self._kept.num_changes:
            return None
        return round(self._kept.changes_bytes / self._kept.num_changes)

    def _up_to_date(self, shard: torch.Tensor) -> Copy:
        """Return the secondary shard, brought up to date if that is due, with this stream ordered behind its arrival."""
        kept = self._kept
        if kept is None or self.due != Change.NONE:
            kept = self._start(shard.dtype, shard)
        if kept.flight is not None:
            self._land(kept)
        elif kept.arrived is not None:
            # The secondary shard may have been written on another stream: FSDP2 gathers on streams of its own, and
            # hops that are started ahead run on the caller's. An event orders them without making the host wait.
            torch.accelerator.current_stream().wait_event(kept.arrived)
        return kept

    def _start(self, dtype: torch.dtype, shard: torch.Tensor | None) -> Copy:
        """Start the cross hop of the weights in ``dtype``. ``shard`` is this rank's, where FSDP2 made it already."""
        self._land_flight()
        layouts, due = self.layouts(dtype), self.due
        kept, was_encoded = self._kept, self._changes is not None
        if kept is not None and (changes := self._changes_to_send(kept, layouts, shard)) is not None:
            self._start_changes(kept, changes)
        elif kept is not None and self._delta_is_enough(kept, layouts, self.due):
            self._start_delta(kept, layouts)
        else:
            kept = self._start_whole(self.unit.flat_shard(dtype) if shard is None else shard, layouts)
            self._count_surprise(kept, due)
        self._kept = kept
        # The weights count as taken from here on and not from the landing: they were encoded when the hop started, so
        # a write in between is a new change.
        self._took_weights(noted=was_encoded)
        return kept

    def _land_flight(self) -> None:
        # A hop under way must end before the next one writes to the same secondary shard. It may not be dropped: the
        # other ranks of the cross group add what it brings, and a delta that one rank left out would stay missing.
        if self._kept is not None and self._kept.flight is not None:  # started ahead, and the weights changed since
            self._land(self._kept)

    def _changes_to_send(self, kept: Copy, layouts: GatherLayouts, shard: torch.Tensor | None) -> Changes | None:
        """Return the changed words of this crossing; None where they do not serve, or a delta is sent in their place."""
        changes, self._changes = self._changes, None
        if not self._tries_changes(kept, layouts):
            return None
        if changes is None:  # nothing was encoded ahead: FSDP2 made the shard, and this unit exchanges its sizes alone
            assert shard is not None
            changes = self.hops.encode_changes([shard], layouts, kept.secondary)
            self._note_encoded(layouts)
            self.hops.exchange_sizes([changes])
        kept.num_changes += 1
        kept.changes_bytes += changes.size.nbytes
        if changes.failed_on:
            self._give_up_copy(changes)
            return None
        if not self._delta_is_better(kept, layouts, changes):
            return changes
        self.hops.drop(changes)
        return None

    def _give_up_copy(self, changes: Changes) -> None:
        """Let whole weights cross, because ranks of the cross group could not apply the changed words of the last crossing."""
        # All ranks of the cross group know of it, so all of them do this. Other cross groups need not.
        group = self.hops.cross_hop.group
        ranks = dist.get_process_group_ranks(group)
        if group.rank() == 0:
            logger.error(_DAMAGED, self.unit.name, ", ".join(str(ranks[index]) for index in changes.failed_on))
        self.hops.drop(changes)
        self.due = Change.INVALID

    def _start_changes(self, kept: Copy, changes: Changes) -> None:
        kept.flight = self.hops.start_changes(changes)
        kept.num_deltas, kept.changes_bytes = 0, kept.changes_bytes + changes.row_bytes

    def _start_delta(self, kept: Copy, layouts: GatherLayouts) -> None:
        assert layouts.delta is not None
        # The delta is taken from the fp32 masters and not from the shard in the compute dtype, whose rounding would hide
        # small updates.
        kept.flight = self.hops.start_delta(self.unit.shards_to_encode(torch.float32), layouts, kept.secondary)
        self._note_encoded(layouts, kept.secondary)
        if layouts.sends_changes:
            kept.num_changes += kept.num_deltas > 0  # the first of a row was counted where words were encoded
            kept.changes_bytes += layouts.delta.nbytes
        kept.num_deltas, kept.num_surprises = kept.num_deltas + 1, 0

    def _start_whole(self, shard: torch.Tensor, layouts: GatherLayouts) -> Copy:
        kept, num_bytes = self._kept, self.hops.cross_hop.size * layouts.kept.nbytes
        # A secondary shard of the right size is used again: where ranks share memory, a new one is a collective of
        # the node. All ranks take the same branch, because sizes follow from what they agreed on.
        if kept is None or kept.secondary.own.numel() != num_bytes:
            kept = Copy(self.hops.new_secondary(layouts.kept, shard.device), layouts)
        kept.layouts, kept.num_deltas = layouts, 0
        kept.flight = self.hops.start(shard, layouts, kept.secondary)
        self._note_encoded(layouts)
        return kept

    def _note_encoded(self, layouts: GatherLayouts, base: Secondary | None = None) -> None:
        if self._check is not None:
            self._check.encoded(layouts.kept.raw_dtype, layouts, base)

    def _delta_is_enough(self, kept: Copy, layouts: GatherLayouts, due: Change) -> bool:
        """Return whether a delta brings the copy up to date. See [Note: when a delta is enough] in freshness.py.

        Every rank gives the same answer: it depends on what ranks agreed on, and on counts of what they did together.
        """
        # Other layouts than the copy's mean another dtype, or parameters frozen or thawed: codes of two forms do not
        # add up.
        return layouts.delta is not None and layouts == kept.layouts and due < Change.EDITED

    # [Note: changed words or a delta]
    # With ``qwz_mode="auto"`` a unit sends changed words until they take clearly more bytes than a delta. A delta leaves the copy
    # rounded: most of its words then differ from the weights, so the next changed words would be many, however few the step
    # changed. The unit therefore goes on with deltas, and after ``DELTAS_IN_A_ROW`` of them sends changed words once, many as
    # they are. From then on their number is that of a step again. What this costs is at most whole weights, spread over the row
    # (an edit ends a row early), so a delta is only better if it saves more than that in every step.
    # The choice follows from sizes that the cross group has exchanged, and from its own earlier choices, so it is the same on all
    # of its ranks. Other cross groups may choose otherwise: deltas and changed words meet the same barriers of the node,
    # and flights land in the same order on all of its ranks (``encode_ahead``).

    def _tries_changes(self, kept: Copy, layouts: GatherLayouts) -> bool:
        """Return whether changed words are to be encoded: they serve, and the unit is not in the middle of a row of deltas."""
        # This rank's slice of the secondary shard is what the other nodes hold of its weights, bit for bit. The words that
        # differ from it are therefore enough, whatever changed the weights. Every rank gives the same answer, as for deltas.
        if not layouts.sends_changes or layouts != kept.layouts or self.due == Change.INVALID:
            return False
        is_in_row = 0 < kept.num_deltas < DELTAS_IN_A_ROW
        return not is_in_row or not self._delta_is_enough(kept, layouts, self.due)

    def _delta_is_better(self, kept: Copy, layouts: GatherLayouts, changes: Changes) -> bool:
        """Return whether a row of deltas begins here: [Note: changed words or a delta]."""
        if kept.num_deltas or not self._delta_is_enough(kept, layouts, self.due):
            return False
        assert layouts.delta is not None
        return changes.row_bytes > layouts.delta.nbytes + layouts.kept.nbytes // DELTAS_IN_A_ROW

    def _count_surprise(self, kept: Copy, due: Change) -> None:
        if due < Change.EDITED or kept.layouts.delta is None:
            return
        kept.num_surprises += 1
        if kept.num_surprises > MANY_SURPRISES:
            self._warnings.warn(_SURPRISE, [self.unit])

    def _land(self, kept: Copy) -> None:
        assert kept.flight is not None
        try:
            self.hops.land(kept.flight, kept.layouts, kept.secondary)
        except ValueError as error:  # a damaged wire, which is found at once on a CPU
            ranks = dist.get_process_group_ranks(self.hops.cross_hop.group)
            raise ValueError(
                f"The weights of unit {self.unit.name} that rank {dist.get_rank()} received from ranks {ranks}, slice by slice, "
                f"are damaged: {error}. Go on from an earlier checkpoint, and look for what damages bytes."
            ) from error
        kept.flight = None
        # The copies are compared after the landing, when all of them should be equal, and before they are decoded.
        if self._check is not None:
            self._check.landed(kept.secondary)
        kept.arrived = record_event(kept.secondary.own.device)

    def _gather_unquantized(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        self._warnings.warn(MIXED_DTYPES, [self.unit])
        return self._fsdp2(output, shard, group, async_op)


def due_gathers(gathers: Sequence[WeightGather]) -> list[ZeroPPAllGather]:
    """Return the gathers whose cross hops are due and can start. On every rank ``gathers`` are those of the same units."""
    return [gather for gather in gathers if isinstance(gather, ZeroPPAllGather) and gather.can_start_ahead]


def encode_ahead(due: Sequence[ZeroPPAllGather]) -> None:
    """Encode the changed words that cross hops will send, and exchange their sizes: once for all, as it waits for the network."""
    changes = [encoded for gather in due if (encoded := gather.encode_ahead()) is not None]
    if changes:
        due[0].hops.exchange_sizes(changes)


def start_ahead(due: Sequence[ZeroPPAllGather]) -> None:
    """Start cross hops on CPU."""
    encode_ahead(due)
    for gather in due:
        gather.start_ahead()
