"""qwZ and hpZ for FSDP2: one gather per unit, which FSDP2 calls whenever it needs the unit's weights.

A gather reads from top to bottom in ``WeightGather.__call__``: behind an agreement of the ranks on which copies are stale, the
cross hop of a stale copy brings it up to date, and the node hop decodes the weights from it. The states of a copy are in copy.py,
what its cross hop carries in comm/two_hop_gather.py, and in schedule.py when cross hops start: before FSDP2 comes to the unit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hf_zeropp.comm.two_hops import (
    Carrier,
    ChangedWords,
    Delta,
    GatherLayouts,
    Secondary,
    TwoHopGather,
    WholeWeights,
    exchange_sizes,
    gather_both_hops,
)
from hf_zeropp.fsdp.comm_objects import CommObject, CountedAllGather
from hf_zeropp.fsdp.layouts import gather_layouts
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.predictions import crossings_per_step, gather_bytes, gathers_per_step
from hf_zeropp.fsdp.units import AllGather, Unit
from hf_zeropp.fsdp.weights.copy import Copy, State
from hf_zeropp.fsdp.weights.fingerprint import MAX_LATE
from hf_zeropp.fsdp.weights.freshness import Change, Freshness
from hf_zeropp.fsdp.weights.secondary_check import SecondaryCheck
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.traffic import Bytes

MIXED_DTYPES = (
    "These units mix dtypes, or hold one that is no float of 16 or 32 bits, or tensors that make the input of their gather "
    "themselves (fsdp_pre_all_gather, as torchao's), so FSDP2 gathers their weights, unquantized and across nodes: %s. Give "
    "their parameters one dtype, set mixed_precision (without param_dtype_override_fn), or give such tensors units of their own."
)
_NOT_ASYNC = (
    "unshard(async_op=True) of these units gathers them before it returns, and overlaps with nothing: %s. Leave prefetching to "
    "FSDP2 (set_modules_to_forward_prefetch), which gathers on streams of its own."
)
_MANY_EDITS = (
    "The weights of unit %s keep changing by something that is no step of a torch optimizer (an operation after each step, an "
    "update by hand): whole weights cross each time in place of deltas. Change them in the optimizer's step, "
    "or set qwz_mode='values'."
)

MANY_EDITS = 3
"""Resyncs in a row that no optimizer and no call explains: more than that is worth a warning."""


def next_carrier(due: Change, layouts: GatherLayouts, kept: GatherLayouts | None) -> type[Carrier]:
    """Return what travels next when a unit's weights cross nodes. It follows from what all ranks agreed on.

    Args:
        due: the change that ranks agreed on.
        layouts: the layouts in which the unit is gathered now.
        kept: those of the copy; None where there is none.
    """
    # Other layouts than the copy's mean another dtype, or parameters frozen or thawed: codes of two forms do not add up.
    if layouts != kept or due == Change.INVALID:
        return WholeWeights
    if layouts.sends_changes:
        # This rank's slice of the secondary shard is what the other nodes hold of its weights, bit for bit. The words that
        # differ from it are therefore enough, whatever changed the weights.
        return ChangedWords
    # [Note: when a delta is enough] in freshness.py
    return WholeWeights if layouts.delta is None or due >= Change.EDITED else Delta


@dataclasses.dataclass
class Sent:
    """The record of what a unit has sent since its secondary shard was allocated.

    Attributes:
        edits_in_a_row: resyncs in a row for edits.
        num_measured: times that changed words crossed.
        measured_bytes: bytes of one rank's wires in all of these, with those of the sizes.
    """

    edits_in_a_row: int = 0
    num_measured: int = 0
    measured_bytes: int = 0

    def note(self, carrier: Carrier, due: Change) -> None:
        """Note that a cross hop started for the change ``due``."""
        if isinstance(carrier, ChangedWords):
            self.num_measured += 1
            self.measured_bytes += carrier.size.nbytes + carrier.row_bytes
        elif carrier.layouts.delta is not None:
            self.edits_in_a_row = self.edits_in_a_row + 1 if due == Change.EDITED else 0

    def mean_bytes(self) -> int | None:
        """Return the mean bytes of changed words that one rank sent in a step, their sizes included; None before any."""
        return round(self.measured_bytes / self.num_measured) if self.num_measured else None


class WeightGather(CommObject, AllGather):
    """Gathers a unit's weights in wire form, and keeps the secondary shard between changes of the weights.

    Args:
        unit: the unit it serves.
        run: what all units share.
        before_gather: lets ranks agree on the weights now, unless they did for the pass under way, and starts cross hops up to
            this unit's.
        hops: the two hops, shared by all units of a mesh; None where FSDP2 gathers the weights as they are.
        check: compares secondary shards with the masters; None where this was not asked for.

    Attributes:
        unit: as given.
        copy: the state of what was gathered.
    """

    def __init__(
        self,
        unit: Unit,
        run: ModelRun,
        before_gather: Callable[[WeightGather], None],
        hops: TwoHopGather | None = None,
        check: SecondaryCheck | None = None,
    ) -> None:
        # With ``ZEROPP_CHECK=1`` the host waits in many places.
        max_late = 0 if run.checks else MAX_LATE
        freshness = Freshness(unit, checks_steps=run.config.sends_deltas, max_late=max_late)
        self.unit = unit
        self.copy = Copy(unit, freshness, check)
        self._run = run
        self._before_gather = before_gather
        self._hops = hops
        self._by_fsdp2 = CountedAllGather(unit, run.traffic)
        self._sent = Sent()
        # The key is dtype and whether the unit trains. Both may change during a run: a conversion, or a unit that
        # thaws.
        self._layouts: dict[tuple[torch.dtype, bool], GatherLayouts] = {}

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
        self._before_gather(self)
        copy = self.copy
        if not self.has_wire_form:
            if self.has_hops:
                self._run.warn(MIXED_DTYPES, [self.unit])
            copy.take()
            return self._by_fsdp2(output_tensor, input_tensor, group, async_op)
        if async_op:
            self._run.warn(_NOT_ASYNC, [self.unit])
        if self._run.config.hpz_size is None:
            copy.take()
            with copy.guard():
                gather_both_hops(self.hops, output_tensor, input_tensor, self.layouts(input_tensor.dtype))
            return None
        # FSDP2 has already cast and joined the shard, fresh or not. It is read only if the cross hop is still due: an offloaded
        # shard's is, and those of others have started ahead.
        if copy.due != Change.NONE:
            self.start(input_tensor)
        if copy.is_under_way:
            copy.land()
        with copy.guard():
            secondary = copy.read()
            assert copy.layouts is not None
            self.hops.decode(secondary, copy.layouts, output_tensor)
        # No work is returned, because everything is on this stream already: FSDP2 records its event after this call.
        return None

    # The cross hop.

    def encode(self) -> ChangedWords | None:
        """Encode the changed words that the cross hop will send, before their sizes are exchanged; None where it sends others."""
        if not self._run.config.sends_changes:
            return None
        layouts, copy = self.layouts(self.unit.param_dtype), self.copy
        if next_carrier(copy.due, layouts, copy.layouts) is not ChangedWords:
            return None
        if copy.is_under_way:  # the shard is compared with what arrives
            copy.land()
        return self._encode(layouts, self.unit.shards_to_encode(self.unit.param_dtype))

    def start(self, made: torch.Tensor | None = None) -> None:
        """Start the cross hop, which is due.

        Args:
            made: this rank's shard, where FSDP2 made it already.
        """
        copy, due = self.copy, self.copy.due
        if copy.is_under_way:  # started ahead, and the weights changed since
            copy.land()
        dtype = self.unit.param_dtype if made is None else made.dtype
        layouts = self.layouts(dtype)
        kind = next_carrier(due, layouts, copy.layouts)
        if kind is ChangedWords:
            if copy.state is not State.ENCODED:  # this unit exchanges its sizes alone
                assert made is not None
                words = self._encode(layouts, [made])
                with copy.guard():
                    exchange_sizes([words])
            copy.start()
        elif kind is Delta:
            assert copy.secondary is not None
            delta = Delta(self.hops, layouts, copy.secondary)
            copy.start(delta, self.unit.shards_to_encode(delta.reads))
        else:
            flat = self.unit.flat_shard(dtype) if made is None else made
            copy.start(WholeWeights(self.hops, layouts, self._room(layouts, flat.device)), [flat])
        assert copy.carrier is not None
        self._sent.note(copy.carrier, due)
        if self._sent.edits_in_a_row > MANY_EDITS:
            self._run.warn(_MANY_EDITS, [self.unit])

    def land(self) -> None:
        """Finish the cross hop that was started."""
        self.copy.land()

    def _encode(self, layouts: GatherLayouts, shards: Sequence[torch.Tensor]) -> ChangedWords:
        assert self.copy.secondary is not None
        words = ChangedWords(self.hops, layouts, self.copy.secondary)
        self.copy.encode(words, shards)
        return words

    def _room(self, layouts: GatherLayouts, device: torch.device) -> Secondary:
        """Return where whole weights arrive."""
        # A secondary shard of the right size is used again: where ranks share memory, a new one is a collective of
        # the node. All ranks take the same branch, because sizes follow from what they agreed on.
        secondary = self.copy.secondary
        if secondary is None or secondary.own.numel() != self.hops.cross_hop.size * layouts.kept.nbytes:
            secondary, self._sent = self.hops.new_secondary(layouts.kept, device), Sent()
        return secondary

    def resync(self) -> None:
        """Gather whole weights at the next forward pass, where deltas brought the secondary shard to what it is."""
        if self.copy.layouts is not None and self.copy.layouts.delta is not None:
            self.copy.freshness.mark(Change.INVALID)

    # Which ranks a gather is a collective of.

    @property
    def has_hops(self) -> bool:
        """Whether the gather was given two hops. Without them it is FSDP2's own."""
        return self._hops is not None

    @property
    def hops(self) -> TwoHopGather:
        """The two hops. Only where ``has_hops``."""
        assert self._hops is not None
        return self._hops

    @property
    def has_wire_form(self) -> bool:
        """Whether the unit's weights travel in two hops, and are not gathered by FSDP2: they have a dtype that wires carry."""
        return self.has_hops and self.unit.param_dtype in FLOAT_DTYPES

    @property
    def stays_in_group(self) -> bool:
        """Whether a gather of a fresh unit stays among the ranks that share the secondary shards of one copy."""
        return self._run.config.hpz_size is not None and self.has_wire_form

    @property
    def can_start_ahead(self) -> bool:
        """Whether the cross hop is due, and its input can be had without FSDP2."""
        # Also a unit that the last pass skipped: which units a rank used is its own affair, and must not choose collectives.
        return self.stays_in_group and self.copy.due != Change.NONE and self.unit.has_plain_shards

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether a gather now is a collective of all ranks, and not one within a node."""
        # Cross hops that a schedule starts come in one order, whatever units a rank uses.
        return not self.stays_in_group or (self.copy.due != Change.NONE and not self.unit.has_plain_shards)

    @property
    def waits_in_node(self) -> bool:
        """Whether ranks of the node may wait for each other in a gather that is not of all ranks."""
        # Ranks that share memory read a copy that is there, and wait for each other where one lands.
        return not self.hops.shares_memory or self.copy.is_under_way

    # Sizes.

    def secondary_bytes(self) -> int:
        """Return the bytes that this rank holds between gathers for hpZ."""
        return 0 if self.copy.secondary is None else self.copy.secondary.own.numel()

    def layouts(self, dtype: torch.dtype) -> GatherLayouts:
        """Return the wire layouts for gathering the unit in ``dtype``, with its parameters frozen as they are now."""
        key = (dtype, self.unit.trains)
        if key not in self._layouts:
            self._layouts[key] = gather_layouts(self._run.config, self.unit.param_shards, dtype, trains=key[1])
        return self._layouts[key]

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step that makes no resync."""
        # Weights that stay until the last micro-step are gathered in the first one alone.
        if self._run.config.accumulates_on_rank and self.unit.gradients.let_weights_stay:
            micro_steps = 1
        if not self.has_wire_form:
            return self._by_fsdp2.predict(micro_steps)
        cross, node = self.hops.cross_hop, self.hops.node_hop
        gathers = gathers_per_step(micro_steps, reshards_after_forward=self.unit.reshards_after_forward)
        crossings = crossings_per_step(gathers, keeps_secondary=self.stays_in_group, trains=self.unit.trains)
        measured = self._sent.mean_bytes()
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
