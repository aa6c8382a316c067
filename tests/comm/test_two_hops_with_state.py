"""Carriers that bring secondary shards up to date, step by step: deltas and changed words, for every world and node size.

Deltas are compared with the same mathematics without collectives: every rank replays what all ranks do, with the PyTorch
reference, bit for bit. Changed words must give the bits of shards that were sent whole. Hops block or not, and go through shared
memory and through sockets.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import each_case, run_ranks
from two_hops import DTYPES, Case, cross, digest, node_sizes, world_of

from hf_zeropp.comm.two_hops import ChangedWords, Delta, GatherLayouts, TwoHopGather, WholeWeights, exchange_sizes
from hf_zeropp.ops import reference

SLICES = ("one element", "awkward", "empty")
STEPS = 4
SHARES = (0.0, 0.01, 0.3, 1.0)
"""Shares of words that change in a step: another one on each rank, so that their wires differ in size."""


# ---- Deltas.


def masters(case: Case, rank: int, step: int) -> torch.Tensor:
    """Return fp32 weights that move a little at every step, and far in the last one."""
    moved = 0.01 * case.values(rank, 1, step).float() * (100 if step == STEPS - 1 else 1)
    return case.values(rank, 1, 100).float() + moved


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
    world, layouts = world_of(case.ranks_per_node), GatherLayouts(case.layout(copy_bits), case.layout(case.node_bits))
    results = [
        gather_deltas(each, case, layouts, rank) for each in (world.gather, world.gather_async, world.gather_shared)
    ]
    expected = torch.cat(replay_deltas(case, layouts)) if layouts.kept.numel else results[0]
    for name, result in zip(("blocking", "overlapped", "shared"), results, strict=True):
        assert digest(result) == digest(expected), name


# ---- Changed words.


def changed(values: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Return ``values`` with a share of their words replaced by random bits, another share on each rank."""
    words = values.clone().view(torch.int16)
    generator = torch.Generator().manual_seed(100 * step + rank)
    share = SHARES[(step + rank) % len(SHARES)]
    chosen = torch.rand(words.shape, generator=generator) < share
    random = torch.randint(-(2**15), 2**15, words.shape, generator=generator, dtype=torch.int16)
    return torch.where(chosen, random, words).view(values.dtype)


def check_changed_words(case: Case, rank: int) -> None:
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


def run_carriers(rank: int) -> None:
    sizes = [size for size in node_sizes(dist.get_world_size()) if size < dist.get_world_size()]
    dtypes = DTYPES if dist.get_world_size() <= 3 else (torch.bfloat16,)
    deltas = itertools.product(sizes, SLICES, dtypes, (8, 4, 3, 2), (None, 8))
    each_case([(Case(*one), bits) for *one, bits in deltas], lambda pair: check_deltas(*pair, rank))
    changes = itertools.product(sizes, (*SLICES, "20000,-3,400"), DTYPES)
    each_case([Case(*one, None) for one in changes], lambda case: check_changed_words(case, rank))


@pytest.mark.thorough("2", "6", "3")
@pytest.mark.parametrize("world_size", (2, 3, 4, 6))
def test_copies_are_those_of_the_reference_and_of_whole_weights(world_size):
    run_ranks(run_carriers, world_size)
