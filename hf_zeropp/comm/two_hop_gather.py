"""The gather in two hops, and the secondary shard between them. See ``two_hops.py`` for the idea and the shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from hf_zeropp import ops
from hf_zeropp.comm import changed_words
from hf_zeropp.comm.changed_words import Changes, ChangesFlight
from hf_zeropp.comm.hop import Flight, Hop, WireBuffers, new_wire
from hf_zeropp.comm.node_memory import NodeMemory
from hf_zeropp.ops.format import WireLayout


@dataclasses.dataclass(frozen=True)
class GatherLayouts:
    """Wire layouts of one slice of a gather.

    Attributes:
        kept: the layout of a slice in a secondary shard, and of whole weights that cross nodes.
        delta: the layout of a delta; None where none is sent.
        sends_changes: whether the words that changed are sent to ranks that hold a secondary shard. It is unquantized then. With
            ``delta`` as well, the sender chooses.
    """

    kept: WireLayout
    delta: WireLayout | None = None
    sends_changes: bool = False

    @property
    def replaces_copies(self) -> bool:
        """Whether a secondary shard is always replaced by whole weights."""
        return self.delta is None and not self.sends_changes


@dataclasses.dataclass
class Secondary:
    """A rank's secondary shard.

    Attributes:
        own: the slices of this rank's cross group in node order, uint8 [Y * B].
        shared: the secondary shards of all ranks of the node, uint8 [N * Y * B], in memory that they share. ``own`` is a
            part of it. None where the ranks share no memory.
        failed: what ``changed_words.apply`` returned at the last crossing. None after whole weights.
    """

    own: torch.Tensor
    shared: torch.Tensor | None = None
    failed: torch.Tensor | None = None


class DeltaFlight(Flight):
    """A cross hop under way that carries deltas. They are added to the secondary shard when they land."""


class TwoHopGather:
    """All-gather of flat shards: the cross hop makes secondary shards, the node hop makes whole weights of them.

    ``start`` or ``start_delta``, then ``land``, bring a secondary shard up to date; so does ``start_changes``, after two stages
    that ``changed_words.py`` explains. ``decode`` may follow any number of times, until the weights change. On every rank of the
    world these calls must come in the same order.

    Args:
        cross_hop: the hop over the cross group. Its size is Y, the number of slices in a secondary shard.
        node_hop: the hop over the N ranks that hold one copy of the weights between them (hpZ).
        buffers: where wire buffers come from.
        memory: memory that the ranks of ``node_hop`` share, which makes the node hop a read; None where they have none.
        resync_hop: a second hop over the cross group, whose name counts the gathers that send whole weights where deltas or
            changed words are the rule. By default they are counted with the others.
    """

    def __init__(
        self,
        cross_hop: Hop,
        node_hop: Hop,
        buffers: WireBuffers,
        memory: NodeMemory | None = None,
        resync_hop: Hop | None = None,
    ) -> None:
        self.cross_hop = cross_hop
        self.node_hop = node_hop
        self.resync_hop = resync_hop or cross_hop
        # Sizes of changed words are waited for at once: nothing can be sent before they are known.
        self._sizes_hop = cross_hop.blocking()
        self._buffers = buffers
        self._memory = memory

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of a node read secondary shards in each other's memory."""
        return self._memory is not None

    def new_secondary(self, layout: WireLayout, device: torch.device) -> Secondary:
        """Return room for a secondary shard that is kept, with arbitrary content.

        Collective over the ranks of the node where they share memory.
        """
        num_bytes = self.cross_hop.size * layout.nbytes
        if self._memory is None:
            return Secondary(new_wire(num_bytes, device))
        # Each rank of the node writes its own row and reads all of them.
        shared = self._memory.allocate(num_bytes)
        return Secondary(shared[self.node_hop.group.rank()], shared.view(-1))

    def start(self, shard: torch.Tensor, layouts: GatherLayouts, secondary: Secondary) -> Flight:
        """Start the cross hop with whole weights, which replace the content of ``secondary``.

        Args:
            shard: this rank's shard [S], fp32, bf16 or fp16.
            layouts: wire layouts of one slice.
            secondary: where the slices of the cross group arrive. It may not be read until the hop has landed.
        """
        # The slices arrive in the secondary shard itself. Without this barrier, a slower rank of the node that still
        # decodes the last weights from shared memory would read a mixture of both.
        self._wait_for_node(secondary)
        # Whole weights are counted apart where they are the exception: a table of bytes then shows how often that
        # happened.
        hop = self.cross_hop if layouts.replaces_copies else self.resync_hop
        wire = self._buffers.take(layouts.kept.nbytes, shard.device)
        ops.quantize(shard, layouts.kept, out=wire)
        secondary.failed = None
        return Flight(secondary.own, hop.all_gather(secondary.own, wire), sent=(wire,))

    # [Note: segments where they lie]
    # On CPU the masters of several parameters lie apart, and are encoded where they lie: joining them would copy the shard. What
    # a segment is encoded to depends on no other segment, so the bytes are those of the joined shard.

    def start_delta(self, shards: Sequence[torch.Tensor], layouts: GatherLayouts, secondary: Secondary) -> DeltaFlight:
        """Start the cross hop with a delta: this rank's masters, less its slice of the secondary shard.

        The delta is taken against the copy and not against the last weights. So it includes whatever the last delta rounded
        away, and errors do not add up over steps.

        Args:
            shards: the fp32 masters [S], as one tensor or as the segments of the slice one by one.
            layouts: wire layouts of one slice, ``delta`` among them.
            secondary: a secondary shard that holds older weights. It may be read until the hop lands.
        """
        assert layouts.delta is not None
        own_slice = self._own_slice(secondary)
        wire = self._buffers.take(layouts.delta.nbytes, own_slice.device)
        if len(shards) == 1:
            ops.quantize_difference(shards[0], own_slice, layouts.kept, layouts.delta, out=wire)
        else:  # [Note: segments where they lie]
            for shard, (kept, base), (here, delta) in zip(shards, layouts.kept.alone, layouts.delta.alone, strict=True):
                ops.quantize_difference(shard, own_slice[kept], base, delta, out=wire[here])
        # Deltas arrive beside the secondary shard, which other ranks of the node may still read meanwhile.
        received = self._buffers.take(self.cross_hop.size * layouts.delta.nbytes, own_slice.device)
        return DeltaFlight(received, self.cross_hop.all_gather(received, wire), sent=(wire,))

    def encode_changes(self, shards: Sequence[torch.Tensor], layouts: GatherLayouts, secondary: Secondary) -> Changes:
        """Encode how this rank's weights differ from its slice of ``secondary``, word by word, without sending anything.

        Args:
            shards: the shard [S] in fp32, bf16 or fp16, as one tensor or as the segments of the slice one by one.
            layouts: wire layouts of one slice. ``kept`` is unquantized.
            secondary: a secondary shard that holds older weights.
        """
        assert layouts.sends_changes
        own_slice = self._own_slice(secondary)
        words = self._buffers.take(layouts.kept.nbytes, own_slice.device)
        # Nothing is quantized here: this casts the shard, and lays it out as the slice is.
        if len(shards) == 1:
            ops.quantize(shards[0], layouts.kept, out=words)
        else:  # [Note: segments where they lie]
            for shard, (here, layout) in zip(shards, layouts.kept.alone, strict=True):
                ops.quantize(shard, layout, out=words[here])
        changes = changed_words.encode(words, own_slice, self._buffers)
        changes.failed = secondary.failed
        self._buffers.give(words)
        return changes

    def exchange_sizes(self, changes: Sequence[Changes]) -> None:
        """Tell all ranks of the cross group the sizes of ``changes``, those of the same units on every rank, in one order."""
        changed_words.exchange_sizes(changes, self._sizes_hop, self._buffers)

    def drop(self, changes: Changes) -> None:
        """Send nothing of ``changes``, and use their memory again."""
        self._buffers.give(changes.wire)

    def start_changes(self, changes: Changes) -> ChangesFlight:
        """Start the cross hop with changed words, whose sizes were exchanged."""
        return changed_words.start(changes, self.cross_hop, self._buffers)

    def expected_slice(self, shard: torch.Tensor, layouts: GatherLayouts, base: Secondary | None) -> torch.Tensor:
        """Return the bytes that this rank's slice has once ``shard`` [S] has crossed. It sends nothing, and serves checks.

        Args:
            shard: this rank's shard.
            layouts: wire layouts of one slice.
            base: the secondary shard to which a delta is added. None where whole weights or changed words cross.
        """
        if base is None:
            return ops.quantize(shard, layouts.kept)
        assert layouts.delta is not None
        own_slice = self._own_slice(base)
        delta = ops.quantize_difference(shard, own_slice, layouts.kept, layouts.delta)
        return ops.dequantize_update(delta, layouts.delta, own_slice, layouts.kept)

    def land(self, flight: Flight, layouts: GatherLayouts, secondary: Secondary) -> None:
        """Finish the cross hop: wait, add what changed, and see that the secondary shards of the whole node can be read."""
        received = flight.land(self._buffers)
        if isinstance(flight, ChangesFlight):
            self._wait_for_node(secondary)  # as with deltas
            secondary.failed = changed_words.apply(flight, secondary.own, self._buffers)
        if isinstance(flight, DeltaFlight):
            assert layouts.delta is not None
            # Deltas are added in place, so a slower rank of the node must have read the last weights before (as in
            # ``start``).
            self._wait_for_node(secondary)
            # Every rank of the cross group adds the same bytes to the same slice, the sender of a delta included: it
            # adds the decoded delta, not its exact weights. So all copies stay equal bit for bit.
            ops.dequantize_update(received, layouts.delta, secondary.own, layouts.kept, out=secondary.own)
            self._buffers.give(received)
        # This rank's part is written. Without this barrier it could read the part of a slower rank before that is.
        self._wait_for_node(secondary)

    def decode(self, secondary: Secondary, layout: WireLayout, output: torch.Tensor) -> None:
        """Run the node hop: exchange secondary shards [Y * B] within the node and decode them.

        Args:
            secondary: a secondary shard that is up to date.
            layout: its layout, ``GatherLayouts.kept``.
            output: the unit's weights [W * S] in rank order, written.
        """
        num_ranks = self.node_hop.size
        if num_ranks == 1:  # the secondary shard is the whole unit, and lies in rank order
            ops.dequantize(secondary.own, layout, dtype=output.dtype, out=output)
            return
        if secondary.shared is not None:
            wire = self.node_hop.read_peers(secondary.shared)
            ops.dequantize(wire, layout, dtype=output.dtype, slice_rows=num_ranks, out=output)
            return
        wire = self._buffers.take(num_ranks * secondary.own.numel(), secondary.own.device)
        Flight(wire, self.node_hop.all_gather(wire, secondary.own)).land(self._buffers)
        # Slices arrive as [x, y]. ``slice_rows`` makes the kernel write them as [y, x], which is rank order.
        ops.dequantize(wire, layout, dtype=output.dtype, slice_rows=num_ranks, out=output)
        self._buffers.give(wire)

    def __call__(self, output: torch.Tensor, shard: torch.Tensor, layout: WireLayout) -> None:
        """Run both hops and keep nothing: output [W * S] <- every rank's shard [S]."""
        layouts = GatherLayouts(layout)
        secondary = Secondary(self._buffers.take(self.cross_hop.size * layout.nbytes, shard.device))
        self.land(self.start(shard, layouts, secondary), layouts, secondary)
        self.decode(secondary, layout, output)
        self._buffers.give(secondary.own)

    def _own_slice(self, secondary: Secondary) -> torch.Tensor:
        return secondary.own.view(self.cross_hop.size, -1)[self.cross_hop.group.rank()]

    def _wait_for_node(self, secondary: Secondary) -> None:
        """Wait until all ranks of the node are here, where they read each other's secondary shards in shared memory."""
        if secondary.shared is not None:
            self.node_hop.barrier()
