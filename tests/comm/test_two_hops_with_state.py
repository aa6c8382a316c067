"""Compare deltas, which keep state between steps, with the same mathematics without collectives.

Every rank replays what all ranks do, with the PyTorch reference, and compares bit for bit: in every world, for every node size,
with hops blocking and not, through shared memory and through sockets.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import each_case, run_ranks
from two_hops import DTYPES, Case, cross, digest, node_sizes, world_of

from hf_zeropp.comm.two_hops import Delta, GatherLayouts, TwoHopGather, WholeWeights
from hf_zeropp.ops import reference

WORLDS = (3, 4, 6)
STEPS = 4


def dtypes() -> tuple[torch.dtype, ...]:
    return DTYPES if dist.get_world_size() <= 3 else (torch.bfloat16,)


def masters(case: Case, rank: int, step: int) -> torch.Tensor:
    """Return fp32 weights that move a little at every step, and far in the last one."""
    moved = 0.01 * case.values(rank, 1, step).float() * (100 if step == STEPS - 1 else 1)
    return case.values(rank, 1, 100).float() + moved


def gather_layouts(case: Case, copy_bits: int | None) -> GatherLayouts:
    return GatherLayouts(case.layout(copy_bits), case.layout(case.node_bits))


def replay_deltas(case: Case, layouts: GatherLayouts) -> list[torch.Tensor]:
    """Return the slice of every rank as it is decoded at the end."""
    slices = []
    for rank in range(dist.get_world_size()):
        base = reference.quantize(masters(case, rank, 0).to(case.dtype), layouts.kept)
        for step in range(1, STEPS):
            wire = reference.quantize_difference(masters(case, rank, step), base, layouts.kept, layouts.delta)
            base = reference.dequantize_update(wire, layouts.delta, base, layouts.kept)
        slices.append(reference.dequantize(base, layouts.kept, case.dtype).flatten())
    return slices


def gather_deltas(gather: TwoHopGather, case: Case, layouts: GatherLayouts, rank: int) -> torch.Tensor:
    secondary = gather.new_secondary(layouts.kept, torch.device("cpu"))
    output = torch.empty(dist.get_world_size() * layouts.kept.numel, dtype=case.dtype)
    for step in range(STEPS):
        world_of(case.ranks_per_node).poison()
        if step == 0:
            cross(WholeWeights(gather, layouts, secondary), masters(case, rank, 0).to(case.dtype))
        else:
            cross(Delta(gather, layouts, secondary), *in_pieces(masters(case, rank, step), layouts, step))
        gather.decode(secondary, layouts, output)
    return output


def in_pieces(shard: torch.Tensor, layouts: GatherLayouts, step: int) -> list[torch.Tensor]:
    """Return the shard as one tensor, or at even steps segment by segment. Both are encoded to the same bytes."""
    return [shard] if step % 2 else list(shard.split([segment.numel for segment in layouts.kept.segments]))


def check_deltas(case: Case, copy_bits: int | None, rank: int) -> None:
    world, layouts = world_of(case.ranks_per_node), gather_layouts(case, copy_bits)
    results = [
        gather_deltas(each, case, layouts, rank) for each in (world.gather, world.gather_async, world.gather_shared)
    ]
    expected = torch.cat(replay_deltas(case, layouts)) if layouts.kept.numel else results[0]
    for name, result in zip(("blocking", "overlapped", "shared"), results, strict=True):
        assert digest(result) == digest(expected), name


def run_deltas(rank: int) -> None:
    sizes = [size for size in node_sizes(dist.get_world_size()) if size < dist.get_world_size()]
    cases = itertools.product(sizes, ("one element", "awkward", "empty"), dtypes(), (8, 4, 3, 2), (None, 8))
    each_case([(Case(*one), bits) for *one, bits in cases], lambda pair: check_deltas(*pair, rank))


@pytest.mark.thorough("6", "3")
@pytest.mark.parametrize("world_size", WORLDS)
def test_deltas_make_the_copies_that_the_reference_makes(world_size):
    run_ranks(run_deltas, world_size)
