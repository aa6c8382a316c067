"""The cross hop of a gather carries whole weights, deltas, or the words that changed.

Each crossing of a unit has a carrier of its own, which takes it through three stages:

    prepare    encode this rank's shard, without sending anything
    send       start the cross hop
    land       finish it, and bring the secondary shard up to date

On every rank of the world these calls must come in the same order. Which carrier is next, a policy says (fsdp/weights/policy.py).

*Whole weights* replace a secondary shard. *Deltas* are added to one: a delta is this rank's masters, less its slice of the
secondary shard. It is taken against the copy and not against the last weights, so it includes whatever the last delta rounded
away, and errors do not add up over steps.

*Changed words* are exact weights for a fraction of their bytes (``qwz_mode="exact"``). In a step of fine-tuning
most 16-bit weights keep their bits. Ranks of a cross group that hold a unit in 16 bits therefore need only the words that changed
since they received it. Each rank compares its shard with its own slice of the secondary shard, which is what the others hold of
it, and encodes the difference (``ops/changes_format.py``). Nothing is rounded, so a copy that was brought up to date equals one
that was sent whole, bit for bit, whatever changed the weights. The wires of different ranks differ in size, and a collective
needs equal ones. So ``exchange_sizes`` comes between ``prepare`` and ``send``, once for all units of a mesh that are due: one
all-gather of 8 bytes a unit. Each unit's wires are then padded to the largest.

[Note: the host waits once] On a device with streams the host reads the sizes between the first stage and the last. It waits for
the optimizer and for the encoding then, once a step (and for experts on a mesh of their own once more, for the network alone),
and the device idles until the host has launched the next kernels. Without the wait, buffers would have to be chosen from sizes of
earlier steps, with a margin. That margin is padding, which crosses the network in every step, and words that did not fit would
arrive a step late: weights would not be exact any more. For 7 B weights at 1e-5 (0.03 of the 7 GB that enter a node) a margin of
an eighth takes 4 ms at 50 Gbit/s, and longer on slower networks.

[Note: segments where they lie] On CPU the masters of several parameters lie apart, and are encoded where they lie: joining them
would copy the shard. What a segment is encoded to depends on no other segment, so the bytes are those of the joined shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hf_zeropp import devices, ops
from hf_zeropp.comm.hop import Flight, WireBuffers
from hf_zeropp.comm.two_hop_gather import GatherLayouts, Secondary, TwoHopGather
from hf_zeropp.ops.format import WireLayout

BUFFER_STEP = 1 << 16
"""Bytes. Sizes differ a little from step to step. Buffers of whole multiples fit again where exact sizes would not."""


class Carrier(ABC):
    """One crossing of one unit.

    Args:
        hops: the two hops of the unit.
        layouts: wire layouts of one slice.
        secondary: the secondary shard that is brought up to date.

    Attributes:
        hops, layouts, secondary: as given.
        reads: the dtype of the shard that it encodes; None for the dtype in which the unit is gathered.
    """

    reads: torch.dtype | None = None

    def __init__(self, hops: TwoHopGather, layouts: GatherLayouts, secondary: Secondary) -> None:
        self.hops = hops
        self.layouts = layouts
        self.secondary = secondary
        self._flight: Flight | None = None

    @abstractmethod
    def prepare(self, shards: Sequence[torch.Tensor]) -> None:
        """Encode this rank's shard [S], given as one tensor, or as the segments of the slice one by one."""

    @abstractmethod
    def send(self) -> None:
        """Start the cross hop."""

    def land(self) -> None:
        """Finish the cross hop: wait, bring the secondary shard up to date, and see that those of the whole node can be read.

        Raises:
            ValueError: what arrived is damaged (found on a CPU, where looking costs nothing).
        """
        assert self._flight is not None, "it is sent first"
        received = self._flight.land(self.hops.buffers)
        self._update(received)
        # This rank's part is written. Without this barrier it could read the part of a slower rank before that is.
        self.hops.wait_for_node(self.secondary)

    def expected_slice(self, masters: torch.Tensor) -> torch.Tensor:
        """Return the bytes that this rank's slice has once ``masters`` [S] have crossed. It sends nothing, and serves checks."""
        return ops.quantize(masters, self.layouts.kept)

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
        self._flight = Flight(own, hop.all_gather(own, self._wire), sent=(self._wire,))

    def _update(self, received: torch.Tensor) -> None:
        """The bytes have arrived where they belong."""


class Delta(Carrier):
    """The quantized difference between the fp32 masters and this rank's slice of the secondary shard."""

    # A shard in the compute dtype would hide small updates by its rounding.
    reads = torch.float32

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
        self._flight = Flight(received, hop.all_gather(received, self._wire), sent=(self._wire,))

    def expected_slice(self, masters: torch.Tensor) -> torch.Tensor:
        """Return the bytes that this rank's slice has once a delta of the fp32 ``masters`` [S] has crossed."""
        own_slice = self.hops.own_slice(self.secondary)
        wire = ops.quantize_difference(masters, own_slice, self.layouts.kept, self._layout)
        return ops.dequantize_update(wire, self._layout, own_slice, self.layouts.kept)

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
        failed_on: the ranks, in group order, on which words of the crossing before could not be applied.
    """

    size: torch.Tensor
    row_bytes: int
    failed_on: tuple[int, ...]
    _sizes: torch.Tensor  # of all ranks of the cross group in group order, int64 [Y], where the wire lies

    def prepare(self, shards: Sequence[torch.Tensor]) -> None:
        """Encode how the shard, in fp32, bf16 or fp16, differs from the copy, word by word."""
        assert self.layouts.sends_changes
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
        # A GPU finds a damaged wire when the host has gone on. The exchange of sizes is the next occasion on which the host waits
        # anyway: a size is sent as its complement, which is negative, where words of the crossing before were not applied.
        failed = self.secondary.failed
        self._told = self.size if failed is None else torch.where(failed.any(), ~self.size, self.size)

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
        kept = take_rounded(buffers, num_bytes, base.device)
        kept.copy_(room[:num_bytes])
        buffers.give(room)
        return size, kept

    def drop(self) -> None:
        """Send nothing, and use the memory again."""
        self.hops.buffers.give(self._wire)

    def send(self) -> None:
        """Start the cross hop. Sizes were exchanged."""
        hop, buffers, wire = self.hops.cross_hop, self.hops.buffers, self._wire
        if wire.numel() < self.row_bytes:
            # Another rank of the group has more to send. What lies behind this rank's bytes is arbitrary.
            wire = take_rounded(buffers, self.row_bytes, wire.device)
            wire[: self._wire.numel()].copy_(self._wire)
            buffers.give(self._wire)
        received = take_rounded(buffers, hop.size * self.row_bytes, wire.device)
        self._flight = Flight(received, hop.all_gather(received, wire[: self.row_bytes]), (wire,))

    def _update(self, received: torch.Tensor) -> None:
        self.hops.wait_for_node(self.secondary)  # as with deltas
        # The slices lie in group order, ``row_bytes`` apart.
        offsets = torch.arange(self._sizes.numel(), device=received.device) * self.row_bytes
        # Every rank of the cross group applies the same bytes to the same slice, the sender included, so copies stay equal.
        # Slices that are damaged are left alone. Ranks hear of them with the next sizes.
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
    own = torch.cat([carrier._told for carrier in carriers])
    received = own.new_empty(hops.sizes_hop.size * own.numel())
    # A blocking hop: nothing can be sent before the sizes are known.
    work = hops.sizes_hop.all_gather(received.view(torch.uint8), own.view(torch.uint8))
    Flight(received, work).land(hops.buffers)
    by_unit = received.view(hops.sizes_hop.size, -1).t().contiguous()
    flags = by_unit < 0
    by_unit = torch.where(flags, ~by_unit, by_unit)
    # One tensor is read, as the host waits for it.
    told = torch.stack([by_unit, flags.long()]).tolist()
    for carrier, sizes, numbers, failed in zip(carriers, by_unit, *told, strict=True):
        carrier._sizes, carrier.row_bytes = sizes, max(numbers)
        carrier.failed_on = tuple(rank for rank, flag in enumerate(failed) if flag)


def gather_both_hops(hops: TwoHopGather, output: torch.Tensor, shard: torch.Tensor, layouts: GatherLayouts) -> None:
    """Run both hops with whole weights and keep nothing: output [W * S] <- every rank's shard [S]."""
    secondary = Secondary(hops.buffers.take(hops.cross_hop.size * layouts.kept.nbytes, shard.device))
    carrier = WholeWeights(hops, layouts, secondary)
    carrier.prepare([shard])
    carrier.send()
    carrier.land()
    hops.decode(secondary, layouts, output)
    hops.buffers.give(secondary.own)


def take_rounded(buffers: WireBuffers, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a buffer of ``num_bytes`` whose memory fits the next steps as well."""
    return buffers.take(-(-num_bytes // BUFFER_STEP) * BUFFER_STEP, device)[:num_bytes]
