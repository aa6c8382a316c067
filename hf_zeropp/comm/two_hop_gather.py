"""The all-gather in two hops: what a cross hop carries, the secondary shard that it makes or updates, and the node hop.

See ``two_hops.py`` for the idea and the shapes. Here a node is the group of ranks that share a copy (``hpz_size``).

Each crossing of a unit has a *carrier* of its own, which takes it through three stages:

    prepare    encode this rank's shard, without sending anything
    send       start the cross hop
    land       finish it, and bring the secondary shard up to date

``TwoHopGather.decode``, the node hop, then makes the unit's weights of the secondary shards, any number of times, until the
weights change. All ranks of a cross group send in the same order, and all ranks of a node decode in the same order.

*Whole weights* replace a secondary shard, and *deltas* are added to one. *Changed words* are exact weights for a fraction of the
bytes (``qwz_mode="exact"``): in a step of fine-tuning most 16-bit weights keep their bits. Each rank compares its shard with its
own slice of the secondary shard, which is what the other ranks of its cross group hold of it, and encodes the difference
(``ops/changes_format.py``). Nothing is rounded, so a copy that was brought up to date equals one that was sent whole, bit by bit,
whatever changed the weights. The wires of different ranks differ in size, and a collective needs equal ones. ``exchange_sizes``
therefore comes between ``prepare`` and ``send``, once for all units of a mesh that are due: one all-gather of 8 bytes a unit.
Each unit's wires are then padded to the largest.

[Note: the host waits once] On a device with streams the host reads the sizes between the first stage and the last. It waits for
the optimizer and for the encoding then, once a step (and for experts on a mesh of their own once more, for the network alone),
and the device idles until the host has launched the next kernels (scripts/results/what_did_not_pay.md has the way without it).

[Note: segments where they lie] On CPU the masters of several parameters lie apart, and are encoded where they lie: joining them
would copy the shard. What a segment is encoded to depends on no other segment, so the bytes are those of the joined shard.

[Note: two node hops] A *native* node hop decodes first and moves weights, by the backend's own all-gathers: a kernel of ours sees
1/N of the unit. The other one moves wires, and each rank decodes the whole unit: fewer bytes within the node, but every gather
writes the unit with a kernel that competes with the model for the GPU's memory. ``qwz_intra_bits`` chooses.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch

from hf_zeropp import devices, ops
from hf_zeropp.comm import node_memory
from hf_zeropp.comm.hop import Flight, Hop
from hf_zeropp.comm.wire_buffers import WireBuffers, new_wire
from hf_zeropp.ops.format import WireLayout


@dataclasses.dataclass(frozen=True)
class GatherLayouts:
    """Wire layouts of one slice of a gather.

    Attributes:
        kept: the layout of a slice in a secondary shard, and of whole weights that cross nodes.
        delta: the layout of a delta; None where none is sent.
        sends_changes: whether the words that changed are sent to ranks that hold a secondary shard. It is unquantized then.
        is_native: whether the node hop is native: it moves weights, which each rank decodes before, and not wires.
    """

    kept: WireLayout
    delta: WireLayout | None = None
    sends_changes: bool = False
    is_native: bool = False

    @property
    def replaces_copies(self) -> bool:
        """Whether a secondary shard is always replaced by whole weights."""
        return self.delta is None and not self.sends_changes

    @cached_property
    def holds_weights(self) -> bool:
        """Whether the bytes of a secondary shard are those of its weights: unquantized, and without padding between them."""
        return self.kept.nbytes == self._weight_bytes and not self.kept.quantizes

    @property
    def node_bytes(self) -> int:
        """Bytes of a slice in the node hop."""
        return self._weight_bytes if self.is_native else self.kept.nbytes

    @property
    def _weight_bytes(self) -> int:
        # What travels unquantized travels in the dtype in which the unit is gathered.
        return self.kept.numel * self.kept.raw_dtype.itemsize


@dataclasses.dataclass
class Secondary:
    """A rank's secondary shard.

    Attributes:
        own: the slices of this rank's cross group in node order, uint8 [Y * B].
        shared: the secondary shards of all ranks of the node, uint8 [N * Y * B], in memory that they share. ``own`` is a
            part of it. None where the ranks share no memory.
        failed: int64 [Y]: not 0 for a slice to which the changed words of the last crossing could not be applied, because they
            arrived damaged. A GPU finds that when the host has gone on. None after whole weights.
    """

    own: torch.Tensor
    shared: torch.Tensor | None = None
    failed: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class TwoHopGather:
    """All-gather of flat shards: the cross hop makes secondary shards, the node hop makes whole weights of them.

    Carriers run the cross hop, which brings a secondary shard up to date. ``decode`` is the node hop.

    Args:
        cross_hop: the hop over the cross group. Its size is Y, the number of slices in a secondary shard.
        node_hop: the hop over the N ranks that hold one copy of the weights between them (hpZ).
        buffers: where wire buffers come from.
        shares_memory: whether the ranks of ``node_hop`` read secondary shards in each other's memory (``node_memory.can_share``).
        resync_hop: a second hop over the cross group, whose name counts the gathers that send whole weights where deltas or
            changed words are the rule. By default they are counted with the others.
    """

    cross_hop: Hop
    node_hop: Hop
    buffers: WireBuffers
    shares_memory: bool = False
    resync_hop: Hop | None = None

    def new_secondary(self, layout: WireLayout, device: torch.device) -> Secondary:
        """Return room for a secondary shard that is kept, with arbitrary content.

        Collective over the ranks of the node where they share memory.
        """
        num_bytes = self.cross_hop.size * layout.nbytes
        if not self.shares_memory:
            return Secondary(new_wire(num_bytes, device))
        # Each rank of the node writes its own row and reads all of them.
        shared = node_memory.allocate(self.node_hop.group, num_bytes)
        return Secondary(shared[self.node_hop.group.rank()], shared.view(-1))

    def decode(self, secondary: Secondary, layouts: GatherLayouts, output: torch.Tensor) -> None:
        """Run the node hop: make the unit's weights of the secondary shards [Y * B] that the ranks of the node hold.

        Args:
            secondary: a secondary shard that is up to date.
            layouts: those that it was made with.
            output: the unit's weights [W * S] in rank order, written.
        """
        num_ranks, layout = self.node_hop.size, layouts.kept
        if num_ranks == 1:  # the secondary shard is the whole unit, and lies in rank order
            ops.dequantize(secondary.own, layout, dtype=output.dtype, out=output)
            return
        if layouts.is_native:
            self._gather_natively(secondary, layouts, output)
            return
        if secondary.shared is not None:
            wire = self.node_hop.read_peers(secondary.shared)
            ops.dequantize(wire, layout, dtype=output.dtype, slice_rows=num_ranks, out=output)
            return
        wire = self.buffers.take(num_ranks * secondary.own.numel(), secondary.own.device)
        self.node_hop.all_gather(wire, secondary.own).land(self.buffers)
        # Slices arrive as [x, y]. ``slice_rows`` makes the kernel write them as [y, x], which is rank order.
        ops.dequantize(wire, layout, dtype=output.dtype, slice_rows=num_ranks, out=output)
        self.buffers.give(wire)

    def _gather_natively(self, secondary: Secondary, layouts: GatherLayouts, output: torch.Tensor) -> None:
        """Decode this rank's secondary shard, 1/N of the unit, and gather weights.

        [Note: no reordering] Rank y * N + x of the world holds slice y of this node's rank x. So slice y of all ranks of the node
        is one run of the output, and Y all-gathers put every slice in its place. The backend runs them as one call (one kernel on
        GPUs). A single all-gather would deliver slices as [x, y], and a copy of the whole unit would have to follow it.
        """
        kept, own = layouts.kept, secondary.own
        needs_decoding = not layouts.holds_weights or kept.raw_dtype != output.dtype
        if needs_decoding:
            own = self.buffers.take(output.nbytes // self.node_hop.size, output.device)
            ops.dequantize(secondary.own, kept, dtype=output.dtype, out=own.view(output.dtype))
        num_nodes = self.cross_hop.size
        rows = own.view(output.dtype).view(num_nodes, -1)
        sent = (own,) if needs_decoding else ()
        self.node_hop.all_gather_rows(output.view(num_nodes, -1), rows, sent).land(self.buffers)

    def own_slice(self, secondary: Secondary) -> torch.Tensor:
        """Return the part of a secondary shard that holds this rank's own shard."""
        return secondary.own.view(self.cross_hop.size, -1)[self.cross_hop.group.rank()]

    def wait_for_node(self, secondary: Secondary) -> None:
        """Wait until all ranks of the node are here, where they read each other's secondary shards in shared memory."""
        if secondary.shared is not None:
            self.node_hop.barrier()


@dataclasses.dataclass(eq=False)
class Carrier(ABC):
    """One crossing of one unit.

    Attributes:
        hops: the two hops of the unit.
        layouts: wire layouts of one slice.
        secondary: the secondary shard that is brought up to date.
        reads: the dtype of the shard that it encodes; None for the dtype in which the unit is gathered.
    """

    hops: TwoHopGather
    layouts: GatherLayouts
    secondary: Secondary
    reads: ClassVar[torch.dtype | None] = None
    _flight: Flight | None = dataclasses.field(default=None, init=False)

    @abstractmethod
    def prepare(self, shards: Sequence[torch.Tensor]) -> None:
        """Encode this rank's shard [S], given as one tensor, or as the segments of the slice one by one."""

    @abstractmethod
    def send(self) -> None:
        """Start the cross hop."""

    def land(self) -> None:
        """Finish the cross hop: wait, bring the secondary shard up to date, and see that those of the whole node can be read.

        Raises:
            DamagedWireError: what arrived is damaged (found on a CPU, where looking costs nothing).
        """
        assert self._flight is not None, "it is sent first"
        received = self._flight.land(self.hops.buffers)
        self._update(received)
        # This rank's part is written. Without this barrier it could read the part of a slower rank before that is.
        self.hops.wait_for_node(self.secondary)

    @abstractmethod
    def _update(self, received: torch.Tensor) -> None:
        """Bring the secondary shard up to date with what arrived."""


class WholeWeights(Carrier):
    """Whole weights, fp32, bf16 or fp16, which replace the content of the secondary shard. It needs no content before."""

    def prepare(self, shards: Sequence[torch.Tensor]) -> None:
        """Encode the shard, given as one tensor."""
        [shard] = shards
        self._wire = self.hops.buffers.take(self.layouts.kept.nbytes, shard.device)
        ops.quantize(shard, self.layouts.kept, out=self._wire)

    def send(self) -> None:
        """Start the cross hop. The secondary shard may not be read until it has landed."""
        # The slices arrive in the secondary shard itself. Without this barrier, a slower rank of the node that still
        # decodes the last weights from shared memory would read a mixture of both.
        self.hops.wait_for_node(self.secondary)
        # Whole weights are counted apart where they are the exception: a table of bytes then shows how often that
        # happened.
        hop = self.hops.cross_hop
        if self.hops.resync_hop is not None and not self.layouts.replaces_copies:
            hop = self.hops.resync_hop
        self.secondary.failed = None
        own = self.secondary.own
        self._flight = hop.all_gather(own, self._wire, sent=(self._wire,))

    def _update(self, received: torch.Tensor) -> None:
        """The bytes have arrived where they belong."""


class Delta(Carrier):
    """The quantized difference between the fp32 masters and this rank's slice of the secondary shard."""

    # A shard in the compute dtype would hide small updates by its rounding.
    reads: ClassVar[torch.dtype] = torch.float32

    def prepare(self, shards: Sequence[torch.Tensor]) -> None:
        """Encode the difference between the fp32 masters and the copy."""
        kept, delta = self.layouts.kept, self._layout
        own_slice = self.hops.own_slice(self.secondary)
        self._wire = self.hops.buffers.take(delta.nbytes, own_slice.device)
        if len(shards) == 1:
            ops.quantize_difference(shards[0], own_slice, kept, delta, out=self._wire)
            return
        # [Note: segments where they lie]
        for shard, (place, base), (here, layout) in zip(shards, kept.alone, delta.alone, strict=True):
            ops.quantize_difference(shard, own_slice[place], base, layout, out=self._wire[here])

    def send(self) -> None:
        """Start the cross hop. The secondary shard may be read until it lands."""
        # Deltas arrive beside the secondary shard, which other ranks of the node may still read meanwhile.
        hop = self.hops.cross_hop
        received = self.hops.buffers.take(hop.size * self._layout.nbytes, self._wire.device)
        self._flight = hop.all_gather(received, self._wire, sent=(self._wire,))

    def _update(self, received: torch.Tensor) -> None:
        # Deltas are added in place, so a slower rank of the node must have read the last weights before.
        self.hops.wait_for_node(self.secondary)
        # Every rank of the cross group adds the same bytes to the same slice, the sender of a delta included: it
        # adds the decoded delta, not its exact weights. So all copies stay equal bit for bit.
        own = self.secondary.own
        ops.dequantize_update(received, self._layout, own, self.layouts.kept, out=own)
        self.hops.buffers.give(received)

    @property
    def _layout(self) -> WireLayout:
        assert self.layouts.delta is not None
        return self.layouts.delta


class ChangedWords(Carrier):
    """The words in which this rank's shard differs from its slice of the secondary shard. ``layouts.kept`` is unquantized.

    Attributes:
        size: bytes of this rank's wire, int64 [1], where the wire lies. Known when it is prepared.
        row_bytes: the most bytes of any rank of the cross group. Known when sizes were exchanged, as all below.
    """

    size: torch.Tensor
    row_bytes: int
    _sizes: torch.Tensor  # of all ranks of the cross group in group order, int64 [Y], where the wire lies
    _is_behind_damage = False  # whether words of the crossing before could not be applied here

    def prepare(self, shards: Sequence[torch.Tensor]) -> None:
        """Encode how the shard, in fp32, bf16 or fp16, differs from the copy, word by word."""
        kept, buffers, own_slice = self.layouts.kept, self.hops.buffers, self.hops.own_slice(self.secondary)
        words = buffers.take(kept.nbytes, own_slice.device)
        # Nothing is quantized here: this casts the shard, and lays it out as the slice is.
        if len(shards) == 1:
            ops.quantize(shards[0], kept, out=words)
        else:  # [Note: segments where they lie]
            for shard, (here, layout) in zip(shards, kept.alone, strict=True):
                ops.quantize(shard, layout, out=words[here])
        self.size, self._wire = self._encode(words, own_slice)
        buffers.give(words)

    def _encode(self, words: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the size and the wire of how ``words`` differ from ``base``, both uint8 of one size."""
        size, wire, starts = ops.changes_buffers(base.numel(), 1, base.device)
        if devices.has_streams(base.device):
            # The size is not known to the host yet, so the wire stays where it may become as large as the slice.
            ops.encode_changes(words, base, out=(size, wire, starts))
            return size, wire.view(-1)
        # Here it is known at once. Only as much is kept, since the units that are due wait for each other.
        buffers = self.hops.buffers
        room = buffers.take(wire.numel(), base.device)
        ops.encode_changes(words, base, out=(size, room.view(1, -1), starts))
        num_bytes = int(size)
        kept = buffers.take_rounded(num_bytes, base.device)
        kept.copy_(room[:num_bytes])
        buffers.give(room)
        return size, kept

    def send(self) -> None:
        """Start the cross hop. Sizes were exchanged.

        Raises:
            DamagedWireError: words of the crossing before were damaged. A CPU raises that when they land.
        """
        if self._is_behind_damage:
            assert self.secondary.failed is not None
            ops.refuse_damaged(self.secondary.failed)
        hop, buffers, wire = self.hops.cross_hop, self.hops.buffers, self._wire
        if wire.numel() < self.row_bytes:
            # Another rank of the group has more to send. What lies behind this rank's bytes is arbitrary.
            wire = buffers.take_rounded(self.row_bytes, wire.device)
            wire[: self._wire.numel()].copy_(self._wire)
            buffers.give(self._wire)
        received = buffers.take_rounded(hop.size * self.row_bytes, wire.device)
        self._flight = hop.all_gather(received, wire[: self.row_bytes], sent=(wire,))

    def _update(self, received: torch.Tensor) -> None:
        self.hops.wait_for_node(self.secondary)  # as with deltas
        # The slices lie in group order, ``row_bytes`` apart.
        offsets = torch.arange(self._sizes.numel(), device=received.device) * self.row_bytes
        # Every rank of the cross group applies the same bytes to the same slice, the sender included, so copies stay equal.
        self.secondary.failed = ops.apply_changes(received, self._sizes, self.secondary.own, offsets)
        self.hops.buffers.give(received)


def exchange_sizes(carriers: Sequence[ChangedWords]) -> None:
    """Tell all ranks of a cross group the sizes of what is prepared: those of the same units on every rank, in one order.

    Args:
        carriers: of units that share their hops. Units of another mesh have other ranks to exchange with.
    """
    if not carriers:
        return
    hops = carriers[0].hops
    assert all(carrier.hops is hops for carrier in carriers), "sizes of units with other hops go to other ranks"
    own = torch.cat([carrier.size for carrier in carriers])
    received = own.new_empty(hops.cross_hop.size * own.numel())
    # The hop is landed at once: nothing can be sent before the sizes are known.
    hops.cross_hop.all_gather(received.view(torch.uint8), own.view(torch.uint8)).land(hops.buffers)
    by_unit = received.view(hops.cross_hop.size, -1).t().contiguous()
    # One tensor is read, as the host waits for it. What a GPU found in the crossing before is read with it.
    failed = [carrier.secondary.failed for carrier in carriers]
    damage = torch.stack([own.new_zeros(()) if each is None else each.any().long() for each in failed])
    told = torch.column_stack([by_unit, damage]).tolist()
    for carrier, sizes, (*numbers, is_damaged) in zip(carriers, by_unit, told, strict=True):
        carrier._sizes, carrier.row_bytes, carrier._is_behind_damage = sizes, max(numbers), bool(is_damaged)


def gather_both_hops(hops: TwoHopGather, output: torch.Tensor, shard: torch.Tensor, layouts: GatherLayouts) -> None:
    """Run both hops with whole weights and keep nothing: output [W * S] <- every rank's shard [S]."""
    secondary = Secondary(hops.buffers.take(hops.cross_hop.size * layouts.kept.nbytes, shard.device))
    carrier = WholeWeights(hops, layouts, secondary)
    carrier.prepare([shard])
    carrier.send()
    carrier.land()
    hops.decode(secondary, layouts, output)
    hops.buffers.give(secondary.own)
