"""The reduction in two hops, and what is kept between them. See ``two_hops.py`` for the idea and the shapes.

The node hop carries the whole unit over fast links, and leaves each rank with 1/N of it, summed over its node: its *partial
sums* [Y, S], one slice for each node. There are two forms of it, and ``ReduceLayouts.node_hop`` says which:

- *Quantized*: each rank sends every other rank of its node the part that the other one decodes and sums, in fp32.
- *Native*, where the layout quantizes nothing: the backend's own reduce-scatters sum in the dtype of the gradients, as those of
  stock FSDP2 do. Rank r = y * N + x is place x of node y, so the slices of node y lie together in rank order, and are the input
  of the y-th reduce-scatter as they are. No kernel of ours touches the whole unit.

The cross hop encodes the partial sums, in ``ReduceLayouts.cross_hop``, and sends slice y to node y. A gradient is therefore
quantized twice at most, on any number of ranks, and once more in each round of replicas (below). Micro-steps add up in fp32, and
may be kept in bf16 between them.

Replicas of a model (HSDP) are added up in rounds, two of them in one, four in two: in each round a rank encodes its slice of the
sum as the cross hop does, sends it to the ranks of other replicas that it meets in this round, and sums what all of them sent.
All ranks of a round sum the same codes in the same order, so replicas stay equal bit for bit. Where rounds would take more bytes
than an all-reduce of the sums, that runs in their place, as in stock HSDP: unquantized from three replicas on, and in INT4 beside
bf16 where their number has a large prime factor, as 11 has.

With one rank per node the node hop is empty. The partial sums are then the rank's own gradients, and are quantized once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from hf_zeropp import ops
from hf_zeropp.comm.hop import Flight, Hop
from hf_zeropp.comm.wire_buffers import WireBuffers
from hf_zeropp.ops.format import WireLayout
from hf_zeropp.traffic import Bytes, Peers, total


@dataclasses.dataclass(frozen=True)
class ReduceLayouts:
    """Wire layouts of one slice in the two hops of a reduction."""

    node_hop: WireLayout
    cross_hop: WireLayout

    @property
    def is_native(self) -> bool:
        """Whether the backend sums within the node, because nothing is quantized there."""
        return not self.node_hop.quantizes

    @property
    def node_hop_bytes(self) -> int:
        """Bytes in which one slice moves in the node hop."""
        layout = self.node_hop
        return layout.numel * layout.raw_dtype.itemsize if self.is_native else layout.nbytes

    def replicas_add_whole(self, rounds: Sequence[int]) -> bool:
        """Whether an all-reduce of sums takes fewer bytes than codes in rounds of so many replicas each."""
        num_codes, num_replicas = sum(size - 1 for size in rounds), math.prod(rounds)
        return num_codes * num_replicas * self.cross_hop.nbytes > 2 * (num_replicas - 1) * self._sum_bytes

    def replica_bytes(self, rounds: Sequence[Peers], replicas: Peers | None) -> Bytes:
        """Return what a rank receives to add up replicas, with its peers in each round, and in all."""
        if replicas is not None and self.replicas_add_whole([peers.group_size for peers in rounds]):
            return replicas.bytes_in_all_reduce(self._sum_bytes)
        return total(peers.bytes_of(self.cross_hop.nbytes) for peers in rounds)

    @property
    def _sum_bytes(self) -> int:
        return self.cross_hop.numel * self.cross_hop.raw_dtype.itemsize


@dataclasses.dataclass(eq=False)
class TwoHopReduce:
    """Sum of flat gradients over the world, of which each rank receives its slice.

    One micro-step calls ``start_node_hop`` and then ``accumulate``, which returns partial sums. The last one calls
    ``start_node_hop``, ``start_cross_hop`` and ``finish``. Where partial sums alone are delivered, there is no
    ``start_node_hop``. On every rank of the world these calls must come in the same order.

    Sums are taken in fp32 and in rank order, so every run and every backend gives the same bits. Those of a native node hop are
    the backend's.

    Args:
        node_hop: the hop over the node group. Its size is N.
        cross_hop: the hop over the cross group. Its size is Y.
        buffers: where wire buffers come from.
        accumulator: dtype in which partial sums are kept between micro-steps, fp32 or bf16.
        replica_hops: one for each round in which replicas are added up (``topology.get_replica_rounds``).
        replicas: the hop over all of them, for an all-reduce in place of the rounds; None without replicas.
    """

    node_hop: Hop
    cross_hop: Hop
    buffers: WireBuffers
    accumulator: torch.dtype = torch.float32
    replica_hops: Sequence[Hop] = ()
    replicas: Hop | None = None

    @property
    def has_node_hop(self) -> bool:
        """Whether anything moves within the node."""
        return self.node_hop.size > 1

    @property
    def num_replicas(self) -> int:
        """The number of replicas that are added up."""
        return math.prod(hop.size for hop in self.replica_hops)

    def hops_of_replicas(self, layouts: ReduceLayouts) -> Sequence[Hop]:
        """Return the hops that add up replicas: the rounds, or an all-reduce, whichever takes fewer bytes."""
        if self.replicas is not None and layouts.replicas_add_whole([hop.size for hop in self.replica_hops]):
            return (self.replicas,)
        return self.replica_hops

    def _arrives_summed(self, layouts: ReduceLayouts) -> bool:
        """Whether a node hop leaves partial sums, and no wires to decode."""
        return not self.has_node_hop or layouts.is_native

    def start_node_hop(self, full: torch.Tensor, layouts: ReduceLayouts) -> Flight:
        """Start the node hop: send each rank of the node its part of this rank's gradients.

        Args:
            full: this rank's gradients of the whole unit [W * S], in rank order.
            layouts: wire layouts of one slice.

        Returns:
            The hop under way. With one rank per node nothing moves, and it holds ``full`` itself.
        """
        if not self.has_node_hop:
            return Flight(full)
        if layouts.is_native:
            num_nodes = self.cross_hop.size
            sums = full.new_empty(num_nodes, layouts.node_hop.numel)
            # The backend keeps ``full`` as long as it reads it.
            return self.node_hop.reduce_scatter(sums, full.view(num_nodes, -1))
        num_bytes = self.node_hop.size * self.cross_hop.size * layouts.node_hop.nbytes
        wire, received = (self.buffers.take(num_bytes, full.device) for _ in range(2))
        # The gradients lie as [y, x] and are encoded as [x, y] (``slice_rows``): part x of the wire, the slices of
        # cross group x in all nodes, is then one run of bytes, which the all-to-all sends to rank x of this node.
        ops.quantize(full, layouts.node_hop, slice_rows=self.cross_hop.size, out=wire)
        return self.node_hop.all_to_all(received, wire, sent=(wire,))

    def accumulate(self, flight: Flight, layouts: ReduceLayouts, partial: torch.Tensor | None) -> torch.Tensor:
        """Finish the node hop of a micro-step that is not the last: add what arrived to the partial sums.

        Args:
            flight: result of ``start_node_hop``.
            layouts: those that ``start_node_hop`` was called with.
            partial: partial sums of earlier micro-steps, fp32 or bf16 [Y * S], changed in place; None at the first.

        Returns:
            The partial sums, this micro-step included, in the accumulator's dtype.
        """
        # Sums are taken in fp32, also of partial sums in bf16: one unit at a time has an fp32 copy of them.
        total = None if partial is None else partial.float()
        received = flight.land(self.buffers)
        if self._arrives_summed(layouts):
            # With one rank per node these are the caller's gradients, who may free or reuse their memory.
            is_own = self.has_node_hop
            total = received.to(torch.float32, copy=not is_own) if total is None else total.add_(received)
        else:
            initial = total
            if total is None:
                total = _new_partial((self.cross_hop.size, layouts.node_hop.numel), torch.float32, received.device)
            # ``initial`` and ``out`` may be one tensor, since the kernel reads an element before it writes it.
            ops.dequantize_sum(received, layouts.node_hop, num_sources=self.node_hop.size, initial=initial, out=total)
            self.buffers.give(received)
        if self.accumulator == torch.float32:
            return total
        rounded = _new_partial(total.shape, self.accumulator, total.device) if partial is None else partial
        return rounded.copy_(total)

    def start_cross_hop(
        self, layouts: ReduceLayouts, partial: torch.Tensor | None, flight: Flight | None = None
    ) -> Flight:
        """Encode partial sums, and start the cross hop: send each node its slices.

        Args:
            layouts: those that ``start_node_hop`` was called with.
            partial: partial sums of earlier micro-steps, fp32 or bf16 [Y * S]; None if there are none. They are used up.
            flight: result of ``start_node_hop`` in the last micro-step, which is finished, and added to the partial sums. None
                where they are all there is.

        Returns:
            The cross hop under way.
        """
        if flight is not None and not self._arrives_summed(layouts):
            received = flight.land(self.buffers)
            wire = self.buffers.take(self.cross_hop.size * layouts.cross_hop.nbytes, received.device)
            # One kernel decodes, sums and encodes block by block: the fp32 sums never go through memory.
            ops.dequantize_sum_quantize(
                received,
                layouts.node_hop,
                layouts.cross_hop,
                num_sources=self.node_hop.size,
                initial=None if partial is None else partial.float(),
                out=wire,
            )
            # The buffer is free before the cross hop starts: its receive buffer may be this one.
            self.buffers.give(received)
        else:
            sums = partial
            if flight is not None:
                arrived = flight.land(self.buffers)
                sums = arrived if partial is None else partial.float().add_(arrived)
            assert sums is not None
            wire = self.buffers.take(self.cross_hop.size * layouts.cross_hop.nbytes, sums.device)
            ops.quantize(sums, layouts.cross_hop, out=wire)
        if self.cross_hop.size == 1:  # one node: the sums are encoded and decoded all the same, but stay here
            return Flight(wire)
        received = self.buffers.take(wire.numel(), wire.device)
        return self.cross_hop.all_to_all(received, wire, sent=(wire,))

    def start_replica_hop(self, index: int, flight: Flight, layouts: ReduceLayouts) -> Flight:
        """Finish the hop before, and start one of ``hops_of_replicas``: send the sums to its ranks, encoded anew, or add them up.

        Args:
            index: of the hop.
            flight: the hop before: result of ``start_cross_hop``, or of this method.
            layouts: those that ``start_cross_hop`` was called with.

        Returns:
            The hop under way.
        """
        before, hop = (self.cross_hop, *self.hops_of_replicas(layouts))[index : index + 2]
        layout, received = layouts.cross_hop, flight.land(self.buffers)
        if hop is self.replicas:
            sums = torch.empty(layout.numel, dtype=layout.raw_dtype, device=received.device)
            ops.dequantize_sum(received, layout, num_sources=before.size, dtype=sums.dtype, out=sums)
            self.buffers.give(received)
            return hop.all_reduce(sums)
        wire = self.buffers.take(layout.nbytes, received.device)
        ops.dequantize_sum_quantize(received, layout, layout, num_sources=before.size, out=wire)
        self.buffers.give(received)
        received = self.buffers.take(hop.size * layout.nbytes, wire.device)
        return hop.all_gather(received, wire, sent=(wire,))

    def finish(self, flight: Flight, layouts: ReduceLayouts, output: torch.Tensor, scale: float = 1.0) -> None:
        """Finish the last hop: output [S] <- scale * (sum over the world).

        Args:
            flight: result of ``start_cross_hop``, or of the last ``start_replica_hop``.
            layouts: those that it was called with.
            output: this rank's slice of the sum, written.
            scale: factor of the sum, such as 1/W for a mean.
        """
        received = flight.land(self.buffers)
        last = (self.cross_hop, *self.hops_of_replicas(layouts))[-1]
        if last is self.replicas:
            output.copy_(received).mul_(scale)
            return
        ops.dequantize_sum(
            received, layouts.cross_hop, num_sources=last.size, scale=scale, dtype=output.dtype, out=output
        )
        self.buffers.give(received)


@torch.inference_mode(False)
def _new_partial(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return room for partial sums, which are kept like a secondary shard: see ``new_wire`` for the inference mode."""
    return torch.empty(shape, dtype=dtype, device=device)
