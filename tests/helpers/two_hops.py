"""Shared by tests of the two hops: cases of awkward slices, every node size, and the hops as apply.py builds them.

All inputs are functions of (case, rank), so each rank knows without communication what the others hold.
"""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
from op_cases import largest_error

from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.node_memory import can_share
from hf_zeropp.comm.topology import get_topology
from hf_zeropp.comm.two_hops import Carrier, ReduceLayouts, TwoHopGather, TwoHopReduce
from hf_zeropp.comm.wire_buffers import WireBuffers
from hf_zeropp.config import WEIGHT_BITS
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.traffic import GATHER_CROSS, GATHER_NODE, REDUCE_CROSS, REDUCE_NODE, Traffic

WORLDS = (1, 2, 3, 4, 6, pytest.param(8, marks=pytest.mark.long))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (*WEIGHT_BITS, None)
BLOCK = 32
# Lengths of a slice's segments; a negative one always travels raw (a norm). Odd, around a block's length, empty.
SLICES = {
    "one element": (1,),
    "norm only": (-3,),
    "awkward": (65, -7, 0, 31, 1),
    "blocks": (64, -32, 97),
    "empty": (0, 0),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One exchange.

    Args:
        ranks_per_node: N.
        slice: a name of ``SLICES``, or lengths as in there, separated by commas.
        dtype: of the values.
        node_bits: width within the node; the only width of a gather.
        cross_bits: width across nodes.
    """

    ranks_per_node: int
    slice: str
    dtype: torch.dtype
    node_bits: int | None
    cross_bits: int | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        return SLICES[self.slice] if self.slice in SLICES else tuple(map(int, self.slice.split(",")))

    def layout(self, bits: int | None) -> WireLayout:
        segments = [Segment(abs(length), bits if length > 0 else None) for length in self.lengths]
        return WireLayout(segments, BLOCK, self.dtype)

    def values(self, rank: int, num_slices: int, seed: int = 0) -> torch.Tensor:
        """Return the values of ``rank``. Blocks differ much in size, so that an error at their bounds shows."""
        key = int(hashlib.sha1(f"{self}{rank}{seed}".encode()).hexdigest()[:12], 16)
        generator = torch.Generator().manual_seed(key)
        values = torch.randn(num_slices * self.layout(None).numel, generator=generator)
        size = 2.0 ** torch.randint(-6, 4, values.shape, generator=generator).float()
        return (values * size).to(self.dtype)


def node_sizes(world: int) -> list[int]:
    return [size for size in range(1, world + 1) if world % size == 0]


def block_errors(values: torch.Tensor, layout: WireLayout, slack: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return the largest error per element of encoding values [..., S], known up to slack, in the layout.

    In a quantized block it is ``largest_error``. In a raw one it is half a unit in the last place of the raw dtype, or of its
    least normal number.
    """
    errors = torch.zeros_like(values)
    size = values.abs() + slack
    for part in layout.parts:
        here = slice(part.element, part.element + part.numel)
        if not part.bits:
            errors[..., here] = rounding(size[..., here], layout.raw_dtype)
            continue
        for start in range(part.element, part.element + part.numel, layout.block):
            block = slice(start, min(start + layout.block, part.element + part.numel))
            amax = size[..., block].amax(-1, keepdim=True)
            errors[..., block] = amax * largest_error(part.bits)
    return errors


def rounding(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    return values.abs().clamp_min(info.smallest_normal) * info.eps / 2


class World:
    """The hops of one node size, as apply.py builds them: blocking, or started and waited for later (overlap)."""

    def __init__(self, ranks_per_node: int) -> None:
        self.topology = get_topology(ranks_per_node, "cpu")
        self.traffic = Traffic(ranks_per_node, self.topology.num_nodes)
        self.buffers = WireBuffers()
        groups = {"cross": self.topology.cross_group, "node": self.topology.node_group}

        def hop(name: str, group: str, is_async: bool) -> Hop:
            return Hop(name, groups[group], self.traffic, is_async=is_async)

        assert can_share(self.topology.node_group) == (ranks_per_node > 1)
        self.gather, self.gather_async, self.gather_shared = (
            TwoHopGather(hop(GATHER_CROSS, "cross", later), hop(GATHER_NODE, "node", False), self.buffers, shared)
            for later, shared in ((False, False), (True, False), (True, ranks_per_node > 1))
        )
        self.reduce, self.reduce_async = (
            TwoHopReduce(hop(REDUCE_NODE, "node", later), hop(REDUCE_CROSS, "cross", later), self.buffers)
            for later in (False, True)
        )

    def poison(self) -> None:
        """Fill every reused buffer with garbage, so that reading bytes that were not written gives wrong results."""
        for buffer in self.buffers._free:
            buffer.fill_(0xAB)


_worlds: dict[int, World] = {}


def world_of(ranks_per_node: int) -> World:
    if ranks_per_node not in _worlds:
        _worlds[ranks_per_node] = World(ranks_per_node)
    return _worlds[ranks_per_node]


def cross(carrier: Carrier, *shards: torch.Tensor) -> None:
    """Run one cross hop from beginning to end."""
    carrier.prepare(shards)
    carrier.send()
    carrier.land()


def run_both_hops(
    hops: TwoHopReduce, output: torch.Tensor, full: torch.Tensor, layouts: ReduceLayouts, scale: float = 1.0
) -> None:
    """Reduce at once: output [S] <- scale * (sum over ranks of full [W * S])."""
    hops.finish(hops.start_cross_hop(layouts, None, hops.start_node_hop(full, layouts)), layouts, output, scale)


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha1(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()
