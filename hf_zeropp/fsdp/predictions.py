"""Predict what the collectives of one unit cost in one optimizer step.

A run predicts its bytes before it counts them (``handle.predict``), and ``hf-zeropp estimate`` predicts them before there is
a run. Both ask the functions below, which know no process group and no FSDP2 object: their inputs are wire layouts, the
number of peers in each hop, and how often the collectives run.

All bytes are those that one rank receives. Peers send equal amounts (but for changed words), so a rank sends as much as it
receives.
"""

from __future__ import annotations

import dataclasses
import math

from hf_zeropp.comm.two_hops import GatherLayouts, ReduceLayouts
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.ops.changes_format import capacity
from hf_zeropp.traffic import REDUCE_REPLICAS, Bytes, Peers, total

SIZE_BYTES = 8
"""Bytes in which a rank tells the size of a unit's changed words."""


@dataclasses.dataclass(frozen=True)
class HopBytes:
    """Calls and bytes of both hops of one unit's gathers, or of its reductions, in one optimizer step.

    Attributes:
        cross_hop: the collectives over the cross group.
        node_hop: the collectives over the node group. It has zero calls where each node has one rank.
        replica_hops: the hops that add up replicas. There are none without replicas.
    """

    cross_hop: Bytes
    node_hop: Bytes
    replica_hops: Bytes = dataclasses.field(default_factory=Bytes)

    def total(self) -> Bytes:
        """Return the sum of all hops."""
        return total((self.cross_hop, self.node_hop, self.replica_hops))

    def by_name(self, *, cross_hop: str, node_hop: str) -> dict[str, Bytes]:
        """Return the bytes under the names of the collectives, without a hop that makes no call."""
        hops = ((cross_hop, self.cross_hop), (node_hop, self.node_hop), (REDUCE_REPLICAS, self.replica_hops))
        return {name: count for name, count in hops if count.calls}


def leaves_gathers_to_fsdp2(config: ZeroPPConfig, hpz_size: int | None, world_size: int) -> bool:
    """Return whether weight gathers stay FSDP2's own, because there is nothing to quantize and nothing to keep.

    Args:
        config: the settings of the run.
        hpz_size: ranks that share the secondary shards of one copy, as ``resolve_hpz_size`` gives it; None where no copy is
            kept. A copy that all ranks share is the shards themselves.
        world_size: number of ranks, W.
    """
    return config.qwz_bits is None and hpz_size in (None, world_size)


def gathers_per_step(micro_steps: int, *, reshards_after_forward: bool) -> int:
    """Return how often FSDP2 gathers a unit in one optimizer step.

    Each micro-step gathers the unit for its forward pass, and again for its backward pass if the unit was resharded in
    between.
    """
    return micro_steps * (2 if reshards_after_forward else 1)


def crossings_per_step(gathers: int, *, keeps_secondary: bool, trains: bool) -> int:
    """Return how many of a unit's gathers cross nodes in one optimizer step.

    With a secondary shard (hpZ, ZeRO++ section 3.2), weights cross once after each change. The weights of a frozen unit
    crossed before this step and never change.
    """
    if not keeps_secondary:
        return gathers
    return 1 if trains else 0


def gather_bytes(
    layouts: GatherLayouts,
    *,
    cross_hop: Peers,
    node_hop: Peers,
    gathers: int,
    crossings: int,
    changes_bytes: int | None = None,
) -> HopBytes:
    """Return what one unit's gathers send in one optimizer step that makes no resync.

    Args:
        layouts: wire layouts of one slice of the unit.
        cross_hop: peers in the cross hop.
        node_hop: peers in the node hop.
        gathers: result of ``gathers_per_step``.
        crossings: result of ``crossings_per_step``.
        changes_bytes: bytes of the words of one slice that change in a step; None where whole weights or deltas are sent.
    """
    # The node hop always moves the copy, as it is kept or decoded. Only the cross hop may send something else in its place.
    whole = layouts.kept if layouts.delta is None else layouts.delta
    crossing = whole.nbytes if changes_bytes is None else changes_bytes
    secondary_bytes = cross_hop.group_size * layouts.node_bytes
    return HopBytes(
        cross_hop=cross_hop.bytes_of(crossing).times(crossings),
        node_hop=node_hop.bytes_of(secondary_bytes).times(gathers if node_hop.group_size > 1 else 0),
    )


def changed_words_bytes(layouts: GatherLayouts, share: float) -> int | None:
    """Return the bytes of one slice's changed words on the wire, and of their size; None where no changed words are sent.

    Args:
        layouts: wire layouts of one slice of the unit.
        share: share of its words that change, at random places.
    """
    if not layouts.sends_changes:
        return None
    # A position takes 2 + log2(1 / share) bits (ops/changes_format.py), the class of a step 2 bits, and one step in eight
    # a byte more, which is what random walks of bf16 weights were measured to take.
    per_word = (5 + math.log2(1 / share)) / 8
    slice_bytes = layouts.kept.nbytes
    return SIZE_BYTES + min(round(share * slice_bytes / 2 * per_word), capacity(slice_bytes))


def reductions_per_step(micro_steps: int, *, accumulates_on_rank: bool) -> int:
    """Return how often FSDP2 reduces a unit in one optimizer step: once where gradients stay on the rank until the last one."""
    return 1 if accumulates_on_rank else micro_steps


def reduce_bytes(
    layouts: ReduceLayouts,
    *,
    cross_hop: Peers,
    node_hop: Peers,
    micro_steps: int,
    crossings: int = 1,
    replica_hops: Bytes | None = None,
) -> HopBytes:
    """Return what one unit's gradient reductions send in one optimizer step.

    Every reduction sums within the node; the last one crosses nodes with the sum of all of them.

    Args:
        layouts: wire layouts of one slice of the unit.
        cross_hop: peers in the cross hop.
        node_hop: peers in the node hop.
        micro_steps: result of ``reductions_per_step``.
        crossings: how many of them cross nodes. More than one do where hooks look at the unit's gradients.
        replica_hops: bytes of the hops that add up replicas (``ReduceLayouts.replica_bytes``); None without replicas.
    """
    # A rank receives from each peer of its node all Y slices of its cross group: their wires, or as many bytes of sums as a
    # ring of reduce-scatters passes on. A hop among one rank makes no call, and the table has no line for it.
    within_node = node_hop.bytes_of(cross_hop.group_size * layouts.node_hop_bytes)
    return HopBytes(
        cross_hop=cross_hop.bytes_of(layouts.cross_hop.nbytes).times(crossings),
        node_hop=within_node.times(micro_steps if node_hop.group_size > 1 else 0),
        replica_hops=(replica_hops or Bytes()).times(crossings),
    )
