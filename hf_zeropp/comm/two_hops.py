"""Two-hop collectives over wire buffers: the core of ZeRO++ (arXiv 2306.10209), without FSDP2.

The world is Y nodes of N ranks; rank r = y * N + x is rank x of node y. A flat all-gather or reduce-scatter over the W = Y * N
ranks sends most of its bytes across the slow network between nodes. Here each is split into two collectives, called *hops*:
the *cross hop* over the cross group (the Y ranks with one x) and the *node hop* over the node group (the N ranks with one y).

A *slice* is the part of a unit that belongs to one rank: its shard of S weights, or the gradients of that shard. Encoded, a
slice takes B bytes, of codes and scales, in a *wire buffer*. Shapes in brackets count slices, elements or bytes:

    gather   shard [S] --encode--> [B] --cross hop--> secondary shard [Y, B] --node hop--> [N, Y, B] --decode--> [W, S]
             secondary shard [Y, B] --decode--> [Y, S] --native node hop: Y all-gathers over N--> [Y, N, S] = [W, S]
    reduce   gradients [W, S] --encode--> [N, Y, B] --node hop--> [N, Y, B] --decode, sum over N--> partial sums [Y, S]
             gradients [Y, N, S] --native node hop: Y reduce-scatters over N--> partial sums [Y, S]
             partial sums [Y, S] --encode--> [Y, B'] --cross hop--> [Y, B'] --decode, sum over Y--> [S]

What lies between the hops is kept, and that saves more than quantization does:

- After the cross hop of a gather a rank holds its *secondary shard*, 1/N of the unit. While the weights stay as they are,
  every later gather needs the node hop alone (hpZ, section 3.2 of the paper).
- After the node hop of a reduction a rank holds *partial sums*, 1/N of the unit's gradients summed over its node. They add up
  over micro-steps, and the cross hop runs once per step. (The paper's qgZ, section 3.3, runs it in every micro-step.)

Once there is a secondary shard, the cross hop need not send weights. It can send a *delta*: how this rank's masters differ from
its slice of the secondary shard. All ranks that hold a copy of the slice add the delta to it, the sender too, so copies stay
equal. The next delta is taken against the copy, so it includes whatever this one rounded away. Or it can send the 16-bit words
that changed, and round nothing.

Slices are in rank order [y, x] in memory and in the order [x, y] on the wire, so that each peer's part is one run of bytes. The
encode and decode kernels change the order while they write (slice reordering, section 3.3), in no pass of its own.

A hop is started by one method and finished by another, so that a caller can compute in between. ``Flight`` is a hop under way.

The gather is in ``two_hop_gather.py``, the reduction in ``two_hop_reduce.py``. On CPU the ranks of a node read
secondary shards in each other's memory, and the node hop of a gather moves no bytes (``node_memory.py``), unless it is native.
"""

from hf_zeropp.comm.two_hop_gather import (
    Carrier,
    ChangedWords,
    Delta,
    GatherLayouts,
    Secondary,
    TwoHopGather,
    WholeWeights,
    exchange_sizes,
    gather_both_hops,
)
from hf_zeropp.comm.two_hop_reduce import ReduceLayouts, TwoHopReduce

__all__ = [
    "Carrier",
    "ChangedWords",
    "Delta",
    "GatherLayouts",
    "ReduceLayouts",
    "Secondary",
    "TwoHopGather",
    "TwoHopReduce",
    "WholeWeights",
    "exchange_sizes",
    "gather_both_hops",
]
