"""The node hop of a gather, and the secondary shard that it reads. Carriers (carriers.py) run the cross hop.

See ``two_hops.py`` for the idea and the shapes. Here a node is the group of ranks that share a copy (``hpz_size``).

[Note: two node hops] A *native* node hop decodes first and moves weights, by the backend's own all-gathers: a kernel of ours sees
1/N of the unit. The other one moves wires, and each rank decodes the whole unit: fewer bytes within the node, but every gather
writes the unit with a kernel that competes with the model for the GPU's memory. ``qwz_intra_bits`` chooses.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch

from hf_zeropp import ops
from hf_zeropp.comm import node_memory
from hf_zeropp.comm.hop import Flight, Hop, WireBuffers, new_wire
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
            arrived damaged. None after whole weights.
    """

    own: torch.Tensor
    shared: torch.Tensor | None = None
    failed: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class TwoHopGather:
    """All-gather of flat shards: the cross hop makes secondary shards, the node hop makes whole weights of them.

    Carriers (``carriers.py``) run the cross hop, which brings a secondary shard up to date. ``decode``, the node hop, may follow
    any number of times, until the weights change. On every rank of the world these calls must come in the same order.

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

    @cached_property
    def sizes_hop(self) -> Hop:
        """The cross hop for the sizes of changed words. It is waited for at once: nothing can be sent before they are known."""
        return self.cross_hop.blocking()

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
        Flight(wire, self.node_hop.all_gather(wire, secondary.own)).land(self.buffers)
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
        is_decoded = layouts.holds_weights and kept.raw_dtype == output.dtype
        if not is_decoded:
            own = self.buffers.take(output.nbytes // self.node_hop.size, output.device)
            ops.dequantize(secondary.own, kept, dtype=output.dtype, out=own.view(output.dtype))
        num_nodes = self.cross_hop.size
        work = self.node_hop.all_gather_rows(output.view(num_nodes, -1), own.view(output.dtype).view(num_nodes, -1))
        Flight(output, work, () if is_decoded else (own,)).land(self.buffers)

    def own_slice(self, secondary: Secondary) -> torch.Tensor:
        """Return the part of a secondary shard that holds this rank's own shard."""
        return secondary.own.view(self.cross_hop.size, -1)[self.cross_hop.group.rank()]

    def wait_for_node(self, secondary: Secondary) -> None:
        """Wait until all ranks of the node are here, where they read each other's secondary shards in shared memory."""
        if secondary.shared is not None:
            self.node_hop.barrier()
