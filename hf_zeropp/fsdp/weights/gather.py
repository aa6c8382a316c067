"""qwZ and hpZ for FSDP2: one gather per unit, which FSDP2 calls whenever it needs the unit's weights.

A gather reads from top to bottom in ``ZeroPPAllGather.__call__``: ranks agree on which copies are stale, the cross hop of a stale
copy brings it up to date, and the node hop decodes the weights from it. The states of a copy are in copy.py, what its cross hop
carries in policy.py and comm/carriers.py, and in schedules.py when cross hops start: before FSDP2 comes to the unit, if they
overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hf_zeropp.comm.exchange import words_of
from hf_zeropp.comm.two_hops import (
    ChangedWords,
    Delta,
    GatherLayouts,
    Secondary,
    TwoHopGather,
    WholeWeights,
    exchange_sizes,
    gather_both_hops,
)
from hf_zeropp.fsdp.comm_objects import CountedAllGather
from hf_zeropp.fsdp.layouts import gather_layouts
from hf_zeropp.fsdp.predictions import crossings_per_step, gather_bytes, gathers_per_step
from hf_zeropp.fsdp.run import Run
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.copy import Copy
from hf_zeropp.fsdp.weights.freshness import MAX_LATE, Change, Freshness
from hf_zeropp.fsdp.weights.policy import MANY_EDITS, Sent, next_carrier
from hf_zeropp.fsdp.weights.secondary_check import SecondaryCheck
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.traffic import Bytes

logger = logging.getLogger(__name__)

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
_DAMAGED = (
    "Changed words of unit %s arrived damaged on %s, which have computed with older weights since the last crossing. "
    "Whole weights cross now. Bytes are damaged in the network, in memory or by a kernel: go on from an earlier checkpoint, and "
    "look for the cause."
)


class WeightGather(CountedAllGather):
    """FSDP2's own gather of a unit over the world. It knows whether the weights have changed since it gathered them.

    Args:
        unit: the unit it serves.
        run: what all units share.
        before_gather: lets ranks agree on the weights now, unless they did for the pass under way.
        copy: the state of what was gathered; by default one of weights that FSDP2 gathers as they are.

    Attributes:
        unit, copy: as given.
    """

    def __init__(
        self, unit: Unit, run: Run, before_gather: Callable[[WeightGather], None], copy: Copy | None = None
    ) -> None:
        super().__init__(unit, run.traffic)
        self.copy = copy or Copy(unit, Freshness(unit))
        self._run = run
        self._before_gather = before_gather

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather as FSDP2 does, and note of which weights."""
        self._before_gather(self)
        self.copy.take()
        return super().__call__(output_tensor, input_tensor, group, async_op)

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether a gather now is a collective of all ranks, and not one within a node."""
        return True

    @property
    def is_fresh(self) -> bool:
        """Whether this rank believes that what was gathered last is still the unit's weights. It may start a comparison."""
        return self.copy.freshness.change() == Change.NONE

    def expire(self) -> None:
        """Gather the weights anew at the next forward pass."""
        self.copy.freshness.mark(Change.INVALID)


class ZeroPPAllGather(WeightGather):
    """Gathers a unit's weights in wire form, and keeps the secondary shard between changes of the weights.

    Args:
        unit, run, before_gather: as above.
        hops: the two hops; shared by all units.
        check: compares secondary shards with the masters; None where this was not asked for.
    """

    def __init__(
        self,
        unit: Unit,
        run: Run,
        before_gather: Callable[[WeightGather], None],
        hops: TwoHopGather,
        check: SecondaryCheck | None = None,
    ) -> None:
        # With ``ZEROPP_CHECK=1`` the host waits in many places.
        max_late = 0 if run.checks else MAX_LATE
        freshness = Freshness(unit, checks_steps=run.config.sends_deltas, max_late=max_late)
        super().__init__(unit, run, before_gather, Copy(unit, freshness, check))
        self.hops = hops
        self._keeps_secondary = run.config.hpz_size is not None
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
        if self.unit.param_dtype not in FLOAT_DTYPES:
            self._run.warn(MIXED_DTYPES, [self.unit])
            return super().__call__(output_tensor, input_tensor, group, async_op)
        # Within a pass this asks nothing. ``unshard()`` outside of one also gathers, and there ranks have to agree
        # first.
        self._before_gather(self)
        if async_op:
            self._run.warn(_NOT_ASYNC, [self.unit])
        copy = self.copy
        if not self._keeps_secondary:
            copy.take()
            with copy.guard():
                gather_both_hops(self.hops, output_tensor, input_tensor, self.layouts(input_tensor.dtype))
            return None
        self._run.schedule.reach(self)
        # FSDP2 has already cast and joined the shard, fresh or not. It is read only if the cross hop is still due.
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

    @property
    def can_start_ahead(self) -> bool:
        """Whether the cross hop is due, and its input can be had without FSDP2."""
        # Also a unit that the last pass skipped: which units a rank used is its own affair, and must not choose collectives.
        return self.stays_in_group and self.copy.due != Change.NONE and self.unit.has_plain_shards

    def encode(self) -> ChangedWords | None:
        """Encode the changed words that the cross hop will send, before their sizes are exchanged; None where it sends others."""
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
        dtype = self.unit.param_dtype if made is None else made.dtype
        if copy.is_under_way:  # started ahead, and the weights changed since
            copy.land()
        layouts, words = self.layouts(dtype), copy.words
        kind = next_carrier(due, layouts, copy.layouts)
        if kind is ChangedWords and words is None:  # nothing was encoded ahead, so this unit exchanges its sizes alone
            assert made is not None
            words = self._encode(layouts, [made])
            with copy.guard():
                exchange_sizes([words])
        if words is not None and words.failed_on:
            self._log_damage(words.failed_on)
            kind = WholeWeights
        if kind is ChangedWords:
            assert words is not None
            copy.start(words)
        elif kind is Delta:
            assert copy.secondary is not None
            copy.start(Delta(self.hops, layouts, copy.secondary), self.unit.shards_to_encode(torch.float32))
        else:
            flat = self.unit.flat_shard(dtype) if made is None else made
            copy.start(WholeWeights(self.hops, layouts, self._room(layouts, flat.device)), [flat])
            if words is not None:
                words.drop()
        self._sent.note(kind, layouts, due, words)
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

    def _log_damage(self, failed_on: Sequence[int]) -> None:
        """Log that the words of the crossing before were damaged on these ranks of the cross group. Whole weights cross now."""
        # All ranks of the cross group know of it, so whole weights cross on all of them. Other cross groups need not.
        group = self.hops.cross_hop.group
        if group.rank() == 0:
            ranks = dist.get_process_group_ranks(group)
            logger.error(_DAMAGED, self.unit.name, words_of([ranks[index] for index in failed_on]))

    def _room(self, layouts: GatherLayouts, device: torch.device) -> Secondary:
        """Return where whole weights arrive."""
        # A secondary shard of the right size is used again: where ranks share memory, a new one is a collective of
        # the node. All ranks take the same branch, because sizes follow from what they agreed on.
        secondary = self.copy.secondary
        if secondary is None or secondary.own.numel() != self.hops.cross_hop.size * layouts.kept.nbytes:
            secondary, self._sent = self.hops.new_secondary(layouts.kept, device), Sent()
        return secondary

    def expire(self) -> None:
        """Gather whole weights at the next forward pass. The caller knows why, so these do not count as edits without a cause."""
        super().expire()
        self._sent.edits_in_a_row = 0

    def resync(self) -> None:
        """Gather whole weights at the next forward pass, where deltas brought the secondary shard to what it is."""
        if self.copy.layouts is not None and self.copy.layouts.delta is not None:
            self.expire()

    @property
    def stays_in_group(self) -> bool:
        """Whether a gather of a fresh unit stays among the ranks that share the secondary shards of one copy."""
        return self._keeps_secondary and self.unit.param_dtype in FLOAT_DTYPES

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether a gather now is a collective of all ranks, and not one within a node."""
        # Cross hops that a schedule starts come in one order, whatever units a rank uses.
        starts_by_itself = self._run.schedule.starts_all and self.can_start_ahead
        return not self.stays_in_group or (self.copy.due != Change.NONE and not starts_by_itself)

    @property
    def waits_in_node(self) -> bool:
        """Whether a gather now is a collective of the ranks that share the copy."""
        # Ranks that share memory read a copy that is there, and wait for each other where one lands.
        return not self.hops.shares_memory or self.copy.is_under_way

    def secondary_bytes(self) -> int:
        """Return the bytes that this rank holds between gathers for hpZ."""
        return 0 if self.copy.secondary is None else self.copy.secondary.own.numel()

    def layouts(self, dtype: torch.dtype) -> GatherLayouts:
        """Return the wire layouts for gathering the unit in ``dtype``, with its parameters frozen as they are now."""
        key = (dtype, self.unit.trains)
        if key not in self._layouts:
            self._layouts[key] = gather_layouts(self._run.config, self.unit.param_shards(), dtype, trains=key[1])
        return self._layouts[key]

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step that makes no resync."""
        if self.unit.param_dtype not in FLOAT_DTYPES:
            return super().predict(micro_steps)
        cross, node = self.hops.cross_hop, self.hops.node_hop
        gathers = gathers_per_step(micro_steps, reshards_after_forward=self.unit.reshards_after_forward)
        crossings = crossings_per_step(gathers, keeps_secondary=self._keeps_secondary, trains=self.unit.trains)
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
