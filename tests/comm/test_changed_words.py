"""Bring secondary shards up to date by changed words, and compare with shards that were sent whole: the same bits.

For every world, node size and dtype, awkward slices (empty ones among them), and changes from none to all, of any bits. Ranks
change different numbers of words, so that their wires differ in size.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import each_case, run_ranks
from two_hops import DTYPES, Case, cross, node_sizes, world_of

from hf_zeropp.comm.two_hops import ChangedWords, GatherLayouts, WholeWeights, exchange_sizes

WORLDS = (2, 3, 4, 6)
SLICES = ("one element", "awkward", "empty", "20000,-3,400")
SHARES = (0.0, 0.01, 0.3, 1.0)


def changed(values: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Return ``values`` with a share of their words replaced by random bits, another share on each rank."""
    words = values.clone().view(torch.int16)
    generator = torch.Generator().manual_seed(100 * step + rank)
    share = SHARES[(step + rank) % len(SHARES)]
    chosen = torch.rand(words.shape, generator=generator) < share
    random = torch.randint(-(2**15), 2**15, words.shape, generator=generator, dtype=torch.int16)
    return torch.where(chosen, random, words).view(values.dtype)


def check(case: Case, rank: int) -> None:
    """Two units at a time, whose sizes cross together: one changes, and one stays as it is."""
    world, layouts = world_of(case.ranks_per_node), GatherLayouts(case.layout(None), sends_changes=True)
    for gather in (world.gather, world.gather_shared):
        moving = still = case.values(rank, 1)
        copies = [gather.new_secondary(layouts.kept, torch.device("cpu")) for _ in range(3)]
        for copy in copies[:2]:
            cross(WholeWeights(gather, layouts, copy), moving)
        for step in range(3):
            moving = changed(moving, rank, step)
            units = list(zip((moving, still), copies[:2], strict=True))
            carriers = [ChangedWords(gather, layouts, copy) for _, copy in units]
            for carrier, (shard, _) in zip(carriers, units, strict=True):
                carrier.prepare([shard])
            exchange_sizes(carriers)
            world.poison()
            for carrier in carriers:
                carrier.send()
            for carrier in carriers:
                carrier.land()
            cross(WholeWeights(gather, layouts, copies[2]), moving)
            assert torch.equal(copies[0].own, copies[2].own), f"step {step}"


def check_cases(rank: int) -> int:
    sizes = [size for size in node_sizes(dist.get_world_size()) if size < dist.get_world_size()]
    cases = [Case(*choice, None) for choice in itertools.product(sizes, SLICES, DTYPES)]
    each_case(cases, lambda case: check(case, rank))
    return len(cases)


@pytest.mark.thorough("2", "6", "3")
@pytest.mark.parametrize("world_size", WORLDS)
def test_copies_equal_those_sent_whole(world_size):
    assert run_ranks(check_cases, world_size) == [(len(node_sizes(world_size)) - 1) * len(SLICES) * 3] * world_size
