"""Two-hop collectives over wire buffers: the core of ZeRO++, without FSDP2.

A flat all-gather or reduce-scatter over W = Y * N ranks sends most bytes across the slow network. Both are split in
two hops, one across nodes (cross group, Y ranks) and one within the node (node group, N ranks). Shapes: a slice is
one rank's shard, S elements; on the wire it takes B bytes; [a, b] are slices, rank r = y * N + x.

    gather   shard [S] --encode--> [B] --hop 1, across--> secondary [Y, B] --hop 2, within--> [N, Y, B] --decode--> [W, S]
    reduce   full [W, S] --encode--> [N, Y, B] --hop 1, within--> sum over N: [Y, S] fp32
             [Y, S] --encode--> [Y, B'] --hop 2, across--> sum over Y: [S]

What a rank holds after the gather's hop 1 is its *secondary shard*: kept, it makes hop 1 unnecessary until the
weights change (the paper's hpZ). What it holds after the reduction's hop 1 is 1/N of the unit's gradient summed over the
node: kept, it accumulates micro-steps, and hop 2 runs once per step (the paper's qgZ exchanges at every micro-step).

Where a secondary shard is kept, hop 1 need only send how the weights moved since: a *delta*, which every rank that keeps a
copy adds to it, the sender included. What a delta leaves out is in the next one, since it is taken against the copy.
Error feedback is the same thought for gradients: what hop 2 leaves out of a sum is kept, and added to the next one.

Ranks lie as [y, x] in the flat buffers and as [x, y] on the wire. That transposition of slices is done by the encode
and decode kernels while they write (the paper's slice reordering), never as a pass of its own.

Each hop is started by one method and finished by another, so that a caller can compute in between (overlap.py). On CPU
the ranks of a node read secondary shards in each other's memory, and hop 2 of a gather moves nothing (node_memory.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from hf_zeropp import ops
from hf_zeropp.comm.hop import Flight, Hop, WireBuffers, new_wire
from hf_zeropp.comm.node_memory import NodeMemory
from hf_zeropp.ops.format import WireLayout


class DeltaFlight(Flight):
    """Hop 1 of a gather under way with differences, which are added to the secondary shard when they land."""


@dataclasses.dataclass(frozen=True)
class GatherLayouts:
    """Wire layouts of one slice of a gather.

    Attributes:
        kept: of a secondary shard, and of what crosses nodes to make one.
        delta: of the differences that cross to bring a secondary shard up to date; None where it is always made anew.
    """

    kept: WireLayout
    delta: WireLayout | None = None


@dataclasses.dataclass
class Secondary:
    """A rank's secondary shard.

    Attributes:
        own: the wire slices [Y * B] of this rank's cross group, in node order.
        node: those of all ranks of the node, [N * Y * B], of which ``own`` is a part; None where they share no memory.
    """

    own: torch.Tensor
    node: torch.Tensor | None = None


class TwoHopGather:
    """All-gather of flat shards in two hops.

    Args:
        cross: the hop across nodes, where ``cross.size`` is Y; the shards of its group form a secondary shard.
        node: the hop over the N ranks that share one secondary copy (hpZ).
        memory: memory that the ranks of ``node`` share, which makes hop 2 a read; None where they have none.
        resync: the hop across nodes under the name of gathers that send whole weights where deltas are the rule.
    """

    def __init__(
        self,
        cross: Hop,
        node: Hop,
        buffers: WireBuffers,
        memory: NodeMemory | None = None,
        resync: Hop | None = None,
    ) -> None:
        self.cross = cross
        self.node = node
        self.resync = resync or cross
        self._buffers = buffers
        self._memory = memory

    def new_secondary(self, layout: WireLayout, device: torch.device) -> Secondary:
        """Room for a secondary shard that is kept. Collective over the node's ranks where they share memory."""
        num_bytes = self.cross.size * layout.nbytes
        if self._memory is None:
            return Secondary(new_wire(num_bytes, device))
        shared = self._memory.allocate(num_bytes)
        return Secondary(shared[self.node.group.rank()], shared.view(-1))

    def start(self, shard: torch.Tensor, layouts: GatherLayouts, secondary: Secondary) -> Flight:
        """Start hop 1: encode this rank's shard [S] and exchange it across nodes, into ``secondary``."""
        if secondary.node is not None:
            self.node.barrier()  # a slower peer may still read what is about to be overwritten
        hop = self.cross if layouts.delta is None else self.resync
        wire = self._buffers.take(layouts.kept.nbytes, shard.device)
        ops.quantize(shard, layouts.kept, out=wire)
        return Flight(secondary.own, hop.all_gather(secondary.own, wire), sent=(wire,))

    def start_delta(self, shards: Sequence[torch.Tensor], layouts: GatherLayouts, secondary: Secondary) -> DeltaFlight:
        """Start hop 1 with what this rank's shard has become since ``secondary`` was brought up to date.

        Args:
            shards: the shard [S], or its segments one by one, where they lie apart.
        """
        assert layouts.delta is not None
        own_slice = secondary.own.view(self.cross.size, layouts.kept.nbytes)[self.cross.group.rank()]
        wire = self._buffers.take(layouts.delta.nbytes, own_slice.device)
        if len(shards) == 1:
            ops.quantize_difference(shards[0], own_slice, layouts.kept, layouts.delta, out=wire)
        else:
            for shard, (kept, base), (here, delta) in zip(shards, layouts.kept.alone, layouts.delta.alone, strict=True):
                ops.quantize_difference(shard, own_slice[kept], base, delta, out=wire[here])
        received = self._buffers.take(self.cross.size * layouts.delta.nbytes, own_slice.device)
        return DeltaFlight(received, self.cross.all_gather(received, wire), sent=(wire,))

    def land(self, flight: Flight, layouts: GatherLayouts, secondary: Secondary) -> None:
        """Finish hop 1: ``secondary`` holds what it is to hold, on every rank that reads it."""
        received = flight.land(self._buffers)
        if isinstance(flight, DeltaFlight):
            assert layouts.delta is not None
            if secondary.node is not None:
                self.node.barrier()
            ops.dequantize_update(received, layouts.delta, secondary.own, layouts.kept, out=secondary.own)
            self._buffers.give(received)
        if secondary.node is not None:
            self.node.barrier()

    def decode(self, secondary: Secondary, layout: WireLayout, output: torch.Tensor) -> None:
        """Hop 2: exchange secondary shards [Y * B] within the node and decode into output [W * S], in rank order."""
        if self.node.size == 1:
            ops.dequantize(secondary.own, layout, dtype=output.dtype, out=output)
            return
        if secondary.node is not None:
            wire = self.node.read_peers(secondary.node)
            ops.dequantize(wire, layout, dtype=output.dtype, slice_rows=self.node.size, out=output)
            return
        wire = self._buffers.take(self.node.size * secondary.own.numel(), secondary.own.device)
        Flight(wire, self.node.all_gather(wire, secondary.own)).land(self._buffers)
        ops.dequantize(wire, layout, dtype=output.dtype, slice_rows=self.node.size, out=output)
        self._buffers.give(wire)

    def __call__(self, output: torch.Tensor, shard: torch.Tensor, layout: WireLayout) -> None:
        """Both hops; nothing is kept."""
        layouts = GatherLayouts(layout)
        secondary = Secondary(self._buffers.take(self.cross.size * layout.nbytes, shard.device))
        self.land(self.start(shard, layouts, secondary), layouts, secondary)
        self.decode(secondary, layout, output)
        self._buffers.give(secondary.own)


@dataclasses.dataclass(frozen=True)
class ReduceLayouts:
    """Wire layouts of one slice in the two hops of a reduction.

    Attributes:
        residual: of what hop 2 leaves out, where that is kept.
        rotates: gradients are rotated when they are first encoded, and back when they have arrived. In between, sums are
            sums of rotated gradients, since a rotation is linear.
    """

    node: WireLayout
    cross: WireLayout
    residual: WireLayout | None = None
    rotates: bool = False

    def chunks(self, count: int) -> tuple[ReduceLayouts, ...]:
        """Layouts that carry parts of the slice: `count` of them, or fewer for few blocks."""
        nodes, crosses = self.node.chunks(count), self.cross.chunks(count)
        residuals = [None] * len(nodes) if self.residual is None else self.residual.chunks(count)
        trios = zip(nodes, crosses, residuals, strict=True)
        return tuple(ReduceLayouts(node, cross, residual, self.rotates) for node, cross, residual in trios)


@dataclasses.dataclass
class Feedback:
    """What hop 2 left out of a chunk of a unit's gradients so far, and how the next one takes it in.

    Attributes:
        residual: a wire [Y * B], changed in place.
        decay: how much of a residual is renewed at a time; 1 replaces it.
        rescale: factor between the gradients it is of and those to come (another loss scale).
    """

    residual: torch.Tensor
    decay: float = 1.0
    rescale: float = 1.0


class TwoHopReduce:
    """Sum of flat gradients over the world, each rank receiving its slice, in two hops.

    Sums are fp32 in rank order, so every run and every backend gives the same bits. With one rank per node hop 1 is
    empty and the gradients are encoded once.

    A slice travels in chunks, each in its own two hops: while a chunk crosses the nodes, the next is still within one
    (paper section 4.1.2). Chunks are cut between blocks and change no bit.

    Args:
        num_chunks: of a slice, fewer where it has fewer blocks.
    """

    def __init__(self, node: Hop, cross: Hop, buffers: WireBuffers, num_chunks: int = 1) -> None:
        self.node = node
        self.cross = cross
        self._buffers = buffers
        self._num_chunks = num_chunks

    def chunks(self, layouts: ReduceLayouts) -> tuple[ReduceLayouts, ...]:
        """What one slice is cut into: the same on every rank, since slices have equal sizes."""
        return _chunks_of(layouts, self._num_chunks)

    def start(self, full: torch.Tensor, layouts: ReduceLayouts) -> list[Flight]:
        """Start hop 1: encode full [y, x, S] as wire [x, y, B], send part x to rank x; [source, y, B] arrives."""
        if self.node.size == 1:
            return [Flight(full)]
        return [self._start_chunk(full, chunk) for chunk in self.chunks(layouts)]

    def accumulate(self, flights: list[Flight], layouts: ReduceLayouts, partial: torch.Tensor | None) -> torch.Tensor:
        """Finish hop 1 and stop there: partial, fp32 [Y * S], plus the node's sum (None starts it)."""
        if self.node.size == 1:
            full = flights[0].received
            return full.to(torch.float32, copy=True) if partial is None else partial.add_(full)
        shape = (self.cross.size, layouts.node.numel)
        total = partial if partial is not None else _new_partial(shape, flights[0].received.device)
        for flight, chunk in zip(flights, self.chunks(layouts), strict=True):
            received = flight.land(self._buffers)
            ops.dequantize_sum(received, chunk.node, num_sources=self.node.size, initial=partial, out=total)
            self._buffers.give(received)
        return total

    def cross_over(
        self,
        flights: list[Flight],
        layouts: ReduceLayouts,
        partial: torch.Tensor | None,
        feedback: Sequence[Feedback] | None = None,
    ) -> list[Flight]:
        """Finish hop 1 and start hop 2 with the node's sum, plus the partial sums so far."""
        if self.node.size == 1:
            full = flights[0].received
            return self.start_across(full if partial is None else partial.add_(full), layouts, feedback)
        chunks = zip(flights, *self._with_feedback(layouts, feedback), strict=True)
        return [self._cross_chunk(flight, chunk, partial, own) for flight, chunk, own in chunks]

    def start_across(
        self, partial: torch.Tensor, layouts: ReduceLayouts, feedback: Sequence[Feedback] | None = None
    ) -> list[Flight]:
        """Start hop 2 with partial sums [Y * S] alone."""
        rotate = layouts.rotates and self.node.size == 1  # otherwise hop 1 did
        partial = partial if feedback is None else partial.float()
        flights = []
        for chunk, own in zip(*self._with_feedback(layouts, feedback), strict=True):
            wire = self._buffers.take(self.cross.size * chunk.cross.nbytes, partial.device)
            if own is None:
                ops.quantize(partial, chunk.cross, rotate=rotate, out=wire)
            else:
                _encode_with_feedback(None, chunk, own, initial=partial, rotate=rotate, out=wire)
            flights.append(self._exchange_across(wire))
        return flights

    def finish(self, flights: list[Flight], layouts: ReduceLayouts, output: torch.Tensor, scale: float = 1.0) -> None:
        """Finish hop 2: output [S] <- scale * (sum over nodes)."""
        for flight, chunk in zip(flights, self.chunks(layouts), strict=True):
            received = flight.land(self._buffers)
            ops.dequantize_sum(
                received,
                chunk.cross,
                num_sources=self.cross.size,
                scale=scale,
                dtype=output.dtype,
                rotate=layouts.rotates,
                out=output,
            )
            self._buffers.give(received)

    def abandon(self, flights: list[Flight]) -> None:
        """Wait for hops whose results nobody wants any more."""
        for flight in flights:
            received = flight.land(self._buffers)
            if received.dtype == torch.uint8:  # with one rank per node hop 1 is empty, and these are the gradients
                self._buffers.give(received)

    def __call__(self, output: torch.Tensor, full: torch.Tensor, layouts: ReduceLayouts, *, scale: float = 1.0) -> None:
        """Both hops at once: output [S] <- scale * (sum over ranks of full [W * S])."""
        self.finish(self.cross_over(self.start(full, layouts), layouts, None), layouts, output, scale)

    def _with_feedback(
        self, layouts: ReduceLayouts, feedback: Sequence[Feedback] | None
    ) -> tuple[Sequence[ReduceLayouts], Sequence[Feedback | None]]:
        chunks = self.chunks(layouts)
        return chunks, feedback or [None] * len(chunks)

    def _start_chunk(self, full: torch.Tensor, chunk: ReduceLayouts) -> Flight:
        num_bytes = self.node.size * self.cross.size * chunk.node.nbytes
        wire, received = (self._buffers.take(num_bytes, full.device) for _ in range(2))
        ops.quantize(full, chunk.node, slice_rows=self.cross.size, rotate=chunk.rotates, out=wire)
        return Flight(received, self.node.all_to_all(received, wire), sent=(wire,))

    def _cross_chunk(
        self, flight: Flight, chunk: ReduceLayouts, partial: torch.Tensor | None, feedback: Feedback | None
    ) -> Flight:
        received = flight.land(self._buffers)
        wire = self._buffers.take(self.cross.size * chunk.cross.nbytes, received.device)
        num_sources = self.node.size
        if feedback is None:
            ops.dequantize_sum_quantize(
                received, chunk.node, chunk.cross, num_sources=num_sources, initial=partial, out=wire
            )
        else:
            _encode_with_feedback(received, chunk, feedback, initial=partial, num_sources=num_sources, out=wire)
        self._buffers.give(received)
        return self._exchange_across(wire)

    def _exchange_across(self, wire: torch.Tensor) -> Flight:
        if self.cross.size == 1:
            return Flight(wire)
        received = self._buffers.take(wire.numel(), wire.device)
        return Flight(received, self.cross.all_to_all(received, wire), sent=(wire,))


@functools.cache
def _chunks_of(layouts: ReduceLayouts, count: int) -> tuple[ReduceLayouts, ...]:
    return layouts.chunks(count)


def _encode_with_feedback(
    received: torch.Tensor | None,
    chunk: ReduceLayouts,
    feedback: Feedback,
    *,
    initial: torch.Tensor | None,
    num_sources: int = 0,
    rotate: bool = False,
    out: torch.Tensor,
) -> None:
    assert chunk.residual is not None
    ops.quantize_with_feedback(
        received,
        chunk.node,
        chunk.cross,
        feedback.residual,
        chunk.residual,
        num_sources=num_sources,
        initial=initial,
        rotate=rotate,
        decay=feedback.decay,
        rescale=feedback.rescale,
        out=out,
    )


@torch.inference_mode(False)
def _new_partial(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)
