"""Changed words on their way across nodes: exact weights for a fraction of their bytes (``qwz_mode="exact"``, ``"auto"``).

In a step of fine-tuning most 16-bit weights keep their bits. Ranks of a cross group that hold a unit in 16 bits therefore need
only the words that changed since they received it. Each rank compares its shard with its own slice of the secondary shard, which
is what the others hold of it, and encodes the difference (``ops/changes_format.py``). Nothing is rounded, so a copy that was
brought up to date equals one that was sent whole, bit for bit, whatever changed the weights.

The wires of different ranks differ in size, and a collective needs equal ones. So ranks exchange the sizes first, of all units
that are due in one all-gather of 8 bytes a unit, and pad each unit's wires to the largest. ``TwoHopGather`` runs three stages:

    encode_changes    for every unit that is due: shard [S] -> wire, and its size
    exchange_sizes    once for all of them
    start_changes     for every unit: the cross hop; ``land`` then applies the words

[Note: the host waits once] On a device with streams the host reads the sizes between the first stage and the last. It waits for
the optimizer and for the encoding then, once a step, and the device idles until the host has launched the next kernels. Without
the wait, buffers would have to be chosen from sizes of earlier steps, with a margin. That margin is padding, which crosses the
network in every step, and words that did not fit would arrive a step late: weights would not be exact any more. For 7 B weights
at 1e-5 (0.03 of the 7 GB that enter a node) a margin of an eighth takes 4 ms at 50 Gbit/s, and longer on slower networks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from hf_zeropp import devices, ops
from hf_zeropp.comm.hop import Flight, Hop, WireBuffers

BUFFER_STEP = 1 << 16
"""Bytes. Sizes differ a little from step to step. Buffers of whole multiples fit again where exact sizes would not."""


@dataclasses.dataclass
class Changes:
    """The changed words of this rank's slice of one unit, encoded, and not sent yet.

    Attributes:
        wire: uint8, of which the first ``size`` bytes count.
        size: int64 [1], where the wire lies.
        sizes: the sizes of all ranks of the cross group in group order, int64 [Y], where the wire lies. None until ranks have
            exchanged them.
        row_bytes: the largest of them.
        failed: what ``apply`` returned at the crossing before; None where that cannot have failed.
        failed_on: the ranks, in group order, on which it has failed. Known with the sizes.
    """

    wire: torch.Tensor
    size: torch.Tensor
    sizes: torch.Tensor | None = None
    row_bytes: int = 0
    failed: torch.Tensor | None = None
    failed_on: tuple[int, ...] = ()


@dataclasses.dataclass
class ChangesFlight(Flight):
    """A cross hop under way that carries changed words. They are applied to the secondary shard when they land.

    Attributes:
        changes: this rank's part, with the sizes of all parts. They lie in ``received`` in group order, ``row_bytes`` apart.
    """

    changes: Changes | None = None


def take_rounded(buffers: WireBuffers, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a buffer of ``num_bytes`` whose memory fits the next steps as well."""
    return buffers.take(-(-num_bytes // BUFFER_STEP) * BUFFER_STEP, device)[:num_bytes]


def encode(words: torch.Tensor, base: torch.Tensor, buffers: WireBuffers) -> Changes:
    """Encode how ``words`` differ from ``base``, both uint8 of one size."""
    size, wire, starts = ops.changes_buffers(base.numel(), 1, base.device)
    if devices.has_streams(base.device):
        # The size is not known to the host yet, so the wire stays where it may become as large as the slice.
        ops.encode_changes(words, base, out=(size, wire, starts))
        return Changes(wire.view(-1), size)
    # Here it is known at once. Only as much is kept, since the units that are due wait for each other.
    room = buffers.take(wire.numel(), base.device)
    ops.encode_changes(words, base, out=(size, room.view(1, -1), starts))
    num_bytes = int(size)
    kept = take_rounded(buffers, num_bytes, base.device)
    kept.copy_(room[:num_bytes])
    buffers.give(room)
    return Changes(kept, size)


def exchange_sizes(changes: Sequence[Changes], hop: Hop, buffers: WireBuffers) -> None:
    """Tell each rank of ``hop`` the sizes of all wires. ``changes`` are those of the same units on every rank, in one order."""
    own = torch.cat([_flagged(change) for change in changes])
    received = own.new_empty(hop.size * own.numel())
    # A blocking hop: nothing can be sent before the sizes are known.
    Flight(received, hop.all_gather(received.view(torch.uint8), own.view(torch.uint8))).land(buffers)
    by_unit = received.view(hop.size, -1).t().contiguous()
    flags = by_unit < 0
    by_unit = torch.where(flags, ~by_unit, by_unit)
    # One tensor is read, as the host waits for it.
    told = torch.stack([by_unit, flags.long()]).tolist()
    for change, sizes, numbers, failed in zip(changes, by_unit, *told, strict=True):
        change.sizes, change.row_bytes = sizes, max(numbers)
        change.failed_on = tuple(rank for rank, flag in enumerate(failed) if flag)


def _flagged(change: Changes) -> torch.Tensor:
    """Return the size, as its complement (which is negative) if words of the crossing before were not applied here."""
    # A GPU finds a damaged wire when the host has gone on. This exchange is the next occasion on which the host waits anyway.
    return change.size if change.failed is None else torch.where(change.failed.any(), ~change.size, change.size)


def start(changes: Changes, hop: Hop, buffers: WireBuffers) -> ChangesFlight:
    """Start the cross hop of one unit's changed words, whose sizes are known."""
    assert changes.sizes is not None, "sizes are exchanged first"
    row_bytes, wire = changes.row_bytes, changes.wire
    if wire.numel() < row_bytes:
        # Another rank of the group has more to send. What lies behind this rank's bytes is arbitrary.
        wire = take_rounded(buffers, row_bytes, wire.device)
        wire[: changes.wire.numel()].copy_(changes.wire)
        buffers.give(changes.wire)
    received = take_rounded(buffers, hop.size * row_bytes, wire.device)
    return ChangesFlight(received, hop.all_gather(received, wire[:row_bytes]), (wire,), changes)


def apply(flight: ChangesFlight, copies: torch.Tensor, buffers: WireBuffers) -> torch.Tensor:
    """Bring ``copies``, uint8, the slices of the cross group in group order, up to date with what a landed hop received.

    Returns:
        int64 [Y]: 0 for a slice that is up to date. Others are damaged, and the ranks hear of it with the next sizes.

    Raises:
        ValueError: a wire is damaged (on a CPU, where looking costs nothing).
    """
    assert flight.changes is not None and flight.changes.sizes is not None
    sizes = flight.changes.sizes
    offsets = torch.arange(sizes.numel(), device=sizes.device) * flight.changes.row_bytes
    # Every rank of the cross group applies the same bytes to the same slice, the sender included, so copies stay equal.
    failed = ops.apply_changes(flight.received, sizes, copies, offsets)
    buffers.give(flight.received)
    return failed
