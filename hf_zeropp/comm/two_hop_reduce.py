"""The reduction in two hops, and what is kept between them. See ``two_hops.py`` for the idea and the shapes.

The node hop carries the whole unit over fast links, encoded in ``ReduceLayouts.node_hop``: each rank sends every other rank of
its node the part that the other one sums. The sums are fp32 and leave each rank with 1/N of the unit: its *partial sums*
[Y, S], one slice for each node. The cross hop encodes these anew, in ``ReduceLayouts.cross_hop``, and sends slice y to node y.
A gradient is therefore quantized twice, whatever the number of ranks. Between micro-steps partial sums may be kept in bf16
(`Rounding`).

With one rank per node the node hop is empty. The partial sums are then the rank's own gradients, and are quantized once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from hf_zeropp import ops
from hf_zeropp.comm.hop import Flight, Hop, WireBuffers
from hf_zeropp.ops.format import WireLayout
from hf_zeropp.ops.rounding import random_word


@dataclasses.dataclass(frozen=True)
class ReduceLayouts:
    """Wire layouts of one slice in the two hops of a reduction.

    Attributes:
        node_hop: the layout in the node hop.
        cross_hop: the layout in the cross hop.
        residual: the layout of a residual; None without error feedback.
        rotates: whether gradients are rotated by a Hadamard matrix when they are first encoded, and rotated back when they
            have arrived. A rotation is linear, so sums of rotated gradients are rotated sums.
    """

    node_hop: WireLayout
    cross_hop: WireLayout
    residual: WireLayout | None = None
    rotates: bool = False
    _chunks: dict[int, tuple[ReduceLayouts, ...]] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def chunks(self, count: int) -> tuple[ReduceLayouts, ...]:
        """Return layouts that carry parts of the slice: ``count`` of them, or fewer where it has fewer blocks.

        All three layouts of a slice are cut at the same elements, so a chunk can pass through both hops on its own.
        """
        # They are kept, because every method of every reduction asks for them.
        if count not in self._chunks:
            self._chunks[count] = self._cut(count)
        return self._chunks[count]

    def _cut(self, count: int) -> tuple[ReduceLayouts, ...]:
        # Equal segment sizes and blocks are cut alike, whatever their bits: see ``WireLayout.chunks``.
        nodes, crosses = self.node_hop.chunks(count), self.cross_hop.chunks(count)
        residuals = [None] * len(nodes) if self.residual is None else self.residual.chunks(count)
        trios = zip(nodes, crosses, residuals, strict=True)
        return tuple(ReduceLayouts(node, cross, residual, self.rotates) for node, cross, residual in trios)


@dataclasses.dataclass
class Rounding:
    """Partial sums are rounded to bf16 between micro-steps, at random (``ops.round_stochastic``).

    Rounding errors of different micro-steps, units and ranks must not be alike, or they would add up. So each rounding has a
    seed of its own, which follows from the rank and a count. A run that continues with the count rounds as if it had not stopped.

    Attributes:
        rank: this rank, in the world.
        count: how many times this rank has rounded.
    """

    rank: int
    count: int = 0

    def next_seed(self) -> int:
        """Return the seed of the rounding that comes now."""
        self.count += 1
        return random_word(self.rank, self.count)


@dataclasses.dataclass
class Feedback:
    """Error feedback for one chunk: its residual, and how the cross hop that comes next takes it in.

    Attributes:
        residual: what earlier cross hops rounded away, in wire form, uint8 [Y * B]. It is changed in place.
        decay: how much of the residual this hop renews, over 0 and up to 1; 1 replaces it.
        rescale: factor from the gradients that the residual is of to those that come now (another loss scale).
    """

    residual: torch.Tensor
    decay: float = 1.0
    rescale: float = 1.0


class TwoHopReduce:
    """Sum of flat gradients over the world, of which each rank receives its slice.

    One micro-step calls ``start`` and then ``accumulate``, which keeps partial sums. The last one calls ``start``,
    ``cross_over`` and ``finish``. ``start_across`` takes the place of the first two where partial sums are all there is. On
    every rank of the world these calls must come in the same order.

    Sums are taken in fp32 and in rank order, so every run and every backend gives the same bits.

    A slice travels in chunks, each in two hops of its own: while one chunk crosses nodes, the next is still in its node hop
    (ZeRO++ section 4.1.2). Therefore each method takes or returns a list of flights, one per chunk. Chunks are cut between
    blocks, so every scale is that of the whole slice, and chunks change no bit of the result.

    Args:
        node_hop: the hop over the node group. Its size is N.
        cross_hop: the hop over the cross group. Its size is Y.
        buffers: where wire buffers come from.
        num_chunks: chunks of a slice; a slice with fewer blocks has fewer.
        rounding: how partial sums are rounded to bf16; None where they are kept in fp32.
    """

    def __init__(
        self,
        node_hop: Hop,
        cross_hop: Hop,
        buffers: WireBuffers,
        num_chunks: int = 1,
        rounding: Rounding | None = None,
    ) -> None:
        self.node_hop = node_hop
        self.cross_hop = cross_hop
        self._buffers = buffers
        self._num_chunks = num_chunks
        self._rounding = rounding

    def chunks(self, layouts: ReduceLayouts) -> tuple[ReduceLayouts, ...]:
        """Return the chunks that a slice travels in. They are the same on every rank, since slices have equal sizes."""
        return layouts.chunks(self._num_chunks)

    def start(self, full: torch.Tensor, layouts: ReduceLayouts) -> list[Flight]:
        """Start the node hop: send each rank of the node its part of this rank's gradients.

        Args:
            full: this rank's gradients of the whole unit [W * S], in rank order.
            layouts: wire layouts of one slice.

        Returns:
            One flight per chunk. With one rank per node nothing moves, and one flight holds ``full`` itself.
        """
        if self.node_hop.size == 1:
            return [Flight(full)]
        # A chunk is encoded while the one before it is on its way. ``accumulate`` and ``cross_over`` wait for them in
        # this order.
        return [self._start_chunk(full, chunk) for chunk in self.chunks(layouts)]

    def accumulate(self, flights: list[Flight], layouts: ReduceLayouts, partial: torch.Tensor | None) -> torch.Tensor:
        """Finish the node hop of a micro-step that is not the last: add what arrived to the partial sums.

        Args:
            flights: result of ``start``.
            layouts: those that ``start`` was called with.
            partial: partial sums of earlier micro-steps, fp32 or bf16 [Y * S], changed in place; None at the first.

        Returns:
            The partial sums, this micro-step included: bf16 where they are rounded, else fp32.
        """
        # Sums are taken in fp32, also of partial sums in bf16: one unit at a time has an fp32 copy of them.
        total = self._add_up(flights, layouts, _in_fp32(partial))
        if self._rounding is None:
            return total
        rounded = _new_partial(tuple(total.shape), torch.bfloat16, total.device) if partial is None else partial
        ops.round_stochastic(total, self._rounding.next_seed(), out=rounded)
        return rounded

    def _add_up(self, flights: list[Flight], layouts: ReduceLayouts, partial: torch.Tensor | None) -> torch.Tensor:
        """Finish the node hop, and add what arrived to ``partial`` [Y * S], in fp32 and in place."""
        received = flights[0].received
        if self.node_hop.size == 1:
            # The caller owns the gradients and may free or reuse their memory, so the first micro-step copies them.
            return received.to(torch.float32, copy=True) if partial is None else partial.add_(received)
        shape = (self.cross_hop.size, layouts.node_hop.numel)
        total = _new_partial(shape, torch.float32, received.device) if partial is None else partial
        for flight, chunk in zip(flights, self.chunks(layouts), strict=True):
            received = flight.land(self._buffers)
            # A chunk's layout has gaps: each call writes its own elements of the sums and leaves the others alone.
            # ``initial`` and ``out`` may be one tensor, since the kernel reads an element before it writes it.
            ops.dequantize_sum(received, chunk.node_hop, num_sources=self.node_hop.size, initial=partial, out=total)
            self._buffers.give(received)
        return total

    def cross_over(
        self,
        flights: list[Flight],
        layouts: ReduceLayouts,
        partial: torch.Tensor | None,
        feedback: Sequence[Feedback] | None = None,
    ) -> list[Flight]:
        """Finish the node hop of the last micro-step, and start the cross hop with the sums of all micro-steps.

        Args:
            flights: result of ``start``.
            layouts: those that ``start`` was called with.
            partial: partial sums of earlier micro-steps, fp32 or bf16 [Y * S]; None where there are none. They are used up.
            feedback: error feedback for each chunk; None without.

        Returns:
            The flights of the cross hop, one per chunk.
        """
        partial = _in_fp32(partial)
        if self.node_hop.size == 1:
            full = flights[0].received
            return self.start_across(full if partial is None else partial.add_(full), layouts, feedback)
        # The cross hop of a chunk starts before the node hop of the next one is waited for, so both networks are in
        # use.
        pairs = zip(flights, self._with_feedback(layouts, feedback), strict=True)
        return [self._cross_chunk(flight, chunk, partial, own) for flight, (chunk, own) in pairs]

    def start_across(
        self, partial: torch.Tensor, layouts: ReduceLayouts, feedback: Sequence[Feedback] | None = None
    ) -> list[Flight]:
        """Start the cross hop with partial sums [Y * S] alone, where no gradients of a last micro-step come."""
        # Gradients are rotated when they are first encoded. With a node hop that has happened, and the sums are
        # rotated.
        rotate = layouts.rotates and self.node_hop.size == 1
        # A residual is added in fp32. ``partial`` may be in 16 bits: rounded sums, or with one rank per node gradients.
        partial = partial if feedback is None else partial.float()
        flights = []
        for chunk, own in self._with_feedback(layouts, feedback):
            wire = self._buffers.take(self.cross_hop.size * chunk.cross_hop.nbytes, partial.device)
            if own is None:
                ops.quantize(partial, chunk.cross_hop, rotate=rotate, out=wire)
            else:
                _encode_with_feedback(None, chunk, own, initial=partial, rotate=rotate, out=wire)
            flights.append(self._exchange_across(wire))
        return flights

    def finish(self, flights: list[Flight], layouts: ReduceLayouts, output: torch.Tensor, scale: float = 1.0) -> None:
        """Finish the cross hop: output [S] <- scale * (sum over the world).

        Args:
            flights: result of ``cross_over`` or ``start_across``.
            layouts: those that it was called with.
            output: this rank's slice of the sum, written.
            scale: factor of the sum, such as 1/W for a mean.
        """
        for flight, chunk in zip(flights, self.chunks(layouts), strict=True):
            received = flight.land(self._buffers)
            # ``rotate`` rotates the sum back and not its Y sources: one rotation in place of Y.
            ops.dequantize_sum(
                received,
                chunk.cross_hop,
                num_sources=self.cross_hop.size,
                scale=scale,
                dtype=output.dtype,
                rotate=layouts.rotates,
                out=output,
            )
            self._buffers.give(received)

    def __call__(self, output: torch.Tensor, full: torch.Tensor, layouts: ReduceLayouts, *, scale: float = 1.0) -> None:
        """Run both hops at once: output [S] <- scale * (sum over ranks of full [W * S])."""
        self.finish(self.cross_over(self.start(full, layouts), layouts, None), layouts, output, scale)

    def _with_feedback(
        self, layouts: ReduceLayouts, feedback: Sequence[Feedback] | None
    ) -> Iterator[tuple[ReduceLayouts, Feedback | None]]:
        """Yield each chunk with its error feedback."""
        chunks = self.chunks(layouts)
        own: Sequence[Feedback | None] = feedback or [None] * len(chunks)
        return zip(chunks, own, strict=True)

    def _start_chunk(self, full: torch.Tensor, chunk: ReduceLayouts) -> Flight:
        num_bytes = self.node_hop.size * self.cross_hop.size * chunk.node_hop.nbytes
        wire, received = (self._buffers.take(num_bytes, full.device) for _ in range(2))
        # The gradients lie as [y, x] and are encoded as [x, y] (``slice_rows``): part x of the wire, the slices of
        # cross group x in all nodes, is then one run of bytes, which the all-to-all sends to rank x of this node.
        ops.quantize(full, chunk.node_hop, slice_rows=self.cross_hop.size, rotate=chunk.rotates, out=wire)
        return Flight(received, self.node_hop.all_to_all(received, wire), sent=(wire,))

    def _cross_chunk(
        self, flight: Flight, chunk: ReduceLayouts, partial: torch.Tensor | None, feedback: Feedback | None
    ) -> Flight:
        received = flight.land(self._buffers)
        wire = self._buffers.take(self.cross_hop.size * chunk.cross_hop.nbytes, received.device)
        num_sources = self.node_hop.size
        # One kernel decodes, sums and encodes block by block: the fp32 sums never go through memory.
        if feedback is None:
            ops.dequantize_sum_quantize(
                received, chunk.node_hop, chunk.cross_hop, num_sources=num_sources, initial=partial, out=wire
            )
        else:
            _encode_with_feedback(received, chunk, feedback, initial=partial, num_sources=num_sources, out=wire)
        # The buffer is free before the cross hop starts: its receive buffer, or the next chunk's, may be this one.
        self._buffers.give(received)
        return self._exchange_across(wire)

    def _exchange_across(self, wire: torch.Tensor) -> Flight:
        if self.cross_hop.size == 1:  # one node: the sums are encoded and decoded all the same, but stay here
            return Flight(wire)
        received = self._buffers.take(wire.numel(), wire.device)
        return Flight(received, self.cross_hop.all_to_all(received, wire), sent=(wire,))


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
    """Encode sums plus residual for the cross hop, and keep in the residual what the encoding rounded away."""
    # The residual stays where the cross hop is encoded, 1/N of the unit on each rank, and is in the domain of the sums:
    # it is rotated if they are. What the node hop rounds away is not corrected, because each rank would need a residual
    # as large as all of its gradients, and INT8 leaves little.
    assert chunk.residual is not None
    ops.quantize_with_feedback(
        received,
        chunk.node_hop,
        chunk.cross_hop,
        feedback.residual,
        chunk.residual,
        num_sources=num_sources,
        initial=initial,
        rotate=rotate,
        decay=feedback.decay,
        rescale=feedback.rescale,
        out=out,
    )


def _in_fp32(partial: torch.Tensor | None) -> torch.Tensor | None:
    """Return partial sums in fp32: themselves, or a copy of those in bf16."""
    return None if partial is None else partial.float()


@torch.inference_mode(False)
def _new_partial(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return room for partial sums, which are kept like a secondary shard: see ``new_wire`` for the inference mode."""
    return torch.empty(shape, dtype=dtype, device=device)
