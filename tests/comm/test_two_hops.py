"""Compare the two hops with the exact collective, for several worlds and every node size, dtype and width.

Each rank computes the exact answer for itself, in fp64. Bounds are per element, from the largest value of the element's block
(see ``two_hops.block_errors``).
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import each_case, run_ranks
from two_hops import (
    BITS,
    DTYPES,
    SLICES,
    WORLDS,
    Case,
    block_errors,
    cross,
    digest,
    node_sizes,
    rounding,
    run_both_hops,
    world_of,
)

from hf_zeropp.comm import collectives
from hf_zeropp.comm.two_hops import (
    GatherLayouts,
    ReduceLayouts,
    TwoHopGather,
    TwoHopReduce,
    WholeWeights,
    gather_both_hops,
)
from hf_zeropp.config import GRADIENT_BITS, NODE_GRADIENT_BITS
from hf_zeropp.traffic import REDUCE_NODE


def gather(case: Case, rank: int, *, is_native: bool = False) -> torch.Tensor:
    world, layout = world_of(case.ranks_per_node), case.layout(case.node_bits)
    output = torch.full((dist.get_world_size() * layout.numel,), float("nan"), dtype=case.dtype)
    gather_both_hops(world.gather, output, case.values(rank, 1), GatherLayouts(layout, is_native=is_native))
    return output


def gather_twice_from_secondary(
    gather: TwoHopGather, case: Case, rank: int, *, is_native: bool = False
) -> torch.Tensor:
    """Run the cross hop once and the node hop twice, with buffers overwritten in between. Return the second result."""
    world, layout = world_of(case.ranks_per_node), case.layout(case.node_bits)
    layouts = GatherLayouts(layout, is_native=is_native)
    secondary = gather.new_secondary(layout, torch.device("cpu"))
    assert secondary.own.numel() == world.topology.num_nodes * layout.nbytes
    cross(WholeWeights(gather, layouts, secondary), case.values(rank, 1))
    output = torch.empty(dist.get_world_size() * layout.numel, dtype=case.dtype)
    for _ in range(2):
        world.poison()
        output.fill_(float("nan"))
        gather.decode(secondary, layouts, output)
    return output


def check_gather(case: Case, rank: int, digests: dict) -> None:
    """Check that a gather is within the bound of the exact one, and that a second run and kept shards give equal bits."""
    world_size, layout = dist.get_world_size(), case.layout(case.node_bits)
    first = gather(case, rank)
    world = world_of(case.ranks_per_node)
    world.poison()
    second = gather(case, rank)
    digests[case] = digest(first)
    exact = torch.stack([case.values(source, 1) for source in range(world_size)])
    first, second = first.view(world_size, -1), second.view(world_size, -1)
    assert torch.equal(first, second), "two runs differ"
    from_secondary = gather_twice_from_secondary(world.gather_async, case, rank)
    assert torch.equal(first, from_secondary.view(world_size, -1)), "a kept secondary shard decodes differently"
    for native in (
        gather(case, rank, is_native=True),
        gather_twice_from_secondary(world.gather_async, case, rank, is_native=True),
    ):
        assert torch.equal(first, native.view(world_size, -1)), "a native node hop gives other weights"
    if case.dtype == torch.bfloat16:  # one dtype: each case maps memory anew
        from_shared = gather_twice_from_secondary(world.gather_shared, case, rank)
        assert torch.equal(first, from_shared.view(world_size, -1)), "a shared secondary shard decodes differently"
    for part in layout.parts:
        if not part.bits:
            here = slice(part.element, part.element + part.numel)
            assert torch.equal(first[:, here], exact[:, here]), "an unquantized segment changed"
    error = (first.double() - exact.double()).abs()
    bound = block_errors(exact.double(), layout) + rounding(exact.double(), case.dtype)
    assert (error <= bound).all(), f"error {error.max()} over the bound by {(error - bound).max()}"


def run_gathers(rank: int) -> dict[Case, str]:
    digests: dict[Case, str] = {}
    sizes = node_sizes(dist.get_world_size())
    cases = [Case(*choice) for choice in itertools.product(sizes, SLICES, DTYPES, BITS)]
    each_case(cases, lambda case: check_gather(case, rank, digests))
    return digests


@pytest.mark.thorough("2", "6", "3")
@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_equals_all_gather_up_to_half_a_step(world_size):
    """Every rank also holds the same bits, its own shard included."""
    per_rank = run_ranks(run_gathers, world_size)
    assert all(digests == per_rank[0] for digests in per_rank), "ranks hold different gathered bits"


def reduce_layouts(case: Case) -> ReduceLayouts:
    return ReduceLayouts(case.layout(case.node_bits), case.layout(case.cross_bits))


def reduce(two_hops: TwoHopReduce, case: Case, rank: int, scale: float = 1.0) -> torch.Tensor:
    layouts = reduce_layouts(case)
    output = torch.full((layouts.node_hop.numel,), float("nan"), dtype=case.dtype)
    run_both_hops(two_hops, output, case.values(rank, dist.get_world_size()), layouts, scale)
    return output


def exact_and_bound(case: Case, rank: int, seeds=(0,)) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's slice of the sum over ranks and micro-steps (seeds) in fp64, and the bound of its error."""
    world_size, layouts = dist.get_world_size(), reduce_layouts(case)
    ranks_per_node = case.ranks_per_node
    total, error = 0.0, 0.0
    for node in range(world_size // ranks_per_node):
        partial = torch.zeros(layouts.node_hop.numel, dtype=torch.float64)
        slack, magnitude = torch.zeros_like(partial), torch.zeros_like(partial)
        for source, seed in itertools.product(range(node * ranks_per_node, (node + 1) * ranks_per_node), seeds):
            values = case.values(source, world_size, seed).view(world_size, -1)[rank].double()
            partial += values
            magnitude += values.abs()
            slack += values.abs() * 2.0**-22 * world_size * len(seeds)  # fp32 sums
            if ranks_per_node > 1:  # with one rank per node the node hop is empty
                slack += block_errors(values, layouts.node_hop)
        if layouts.is_native:  # the backend rounds each of its sums
            slack += rounding(magnitude, case.dtype) * (ranks_per_node - 1)
        total = total + partial
        error = error + slack + block_errors(partial, layouts.cross_hop, slack)
    return total, error + (total.abs() + error) * 2.0**-22 * world_size


def check_reduce(case: Case, rank: int, digests: dict) -> None:
    """Check that a sum and a mean are within the bound, and that other runs give the same bits."""
    world_size = dist.get_world_size()
    world = world_of(case.ranks_per_node)
    first = reduce(world.reduce, case, rank)
    world.poison()
    second, mean = reduce(world.reduce_async, case, rank), reduce(world.reduce, case, rank, scale=1 / world_size)
    digests[case] = digest(first)
    assert torch.equal(first, second), "two runs differ (the second started its hops and waited later)"
    of_the_sum = exact_and_bound(case, rank)
    for result, scale in ((first, 1.0), (mean, 1 / world_size)):
        exact, bound = (scale * tensor for tensor in of_the_sum)
        error = (result.double() - exact).abs()
        bound = bound + rounding(exact.abs() + bound, case.dtype)
        assert (error <= bound).all(), f"scale {scale}: error {error.max()} over the bound by {(error - bound).max()}"


def run_reduces(rank: int) -> dict[Case, str]:
    """Reduce with all pairs of bits within and across nodes, or in large worlds with some."""
    digests: dict[Case, str] = {}
    world_size = dist.get_world_size()
    bits = list(itertools.product((*NODE_GRADIENT_BITS, None), (*GRADIENT_BITS, None)))
    if world_size > 4:
        bits = [(8, 4), (4, None), (None, 8), (None, None)]
    slices = [name for name in SLICES if name != "norm only"]
    cases = [Case(*one, *pair) for *one, pair in itertools.product(node_sizes(world_size), slices, DTYPES, bits)]
    each_case(cases, lambda case: check_reduce(case, rank, digests))
    return digests


@pytest.mark.thorough("2", "6", "3")
@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_equals_the_sum_up_to_half_a_step_per_hop(world_size):
    """A second start of the whole world also gives the same bits."""
    digests = run_ranks(run_reduces, world_size)
    assert world_size != 3 or digests == run_ranks(run_reduces, world_size)


def check_native_sums(case: Case, rank: int) -> None:
    """Check that partial sums are what stock reduce-scatters of the same rows give, bit for bit, and count as a ring's bytes."""
    world, layouts = world_of(case.ranks_per_node), reduce_layouts(case)
    num_nodes, group = world.topology.num_nodes, world.topology.node_group
    full = case.values(rank, dist.get_world_size())
    expected = torch.empty(num_nodes, layouts.node_hop.numel, dtype=case.dtype)
    for sums, rows in zip(expected, full.view(num_nodes, -1), strict=True):
        dist.reduce_scatter_tensor(sums, rows, group=group)
    for reduce in (world.reduce, world.reduce_async):
        world.traffic.reset()
        flight = reduce.start_node_hop(full.clone(), layouts)  # the clone is freed while the hop is under way
        assert torch.equal(flight.land(world.buffers), expected)
        assert not flight.sent, "buffers are held that the backend holds already"
        counted = world.traffic.counts[REDUCE_NODE]
        assert counted.intra_node == (case.ranks_per_node - 1) * expected.nbytes, counted
    kept = reduce.accumulate(reduce.start_node_hop(full, layouts), layouts, None)
    assert torch.equal(kept, expected.float())
    full.fill_(float("nan"))
    assert kept.isfinite().all(), "the sums are a view of the gradients"


def run_native_sums(rank: int) -> None:
    sizes = [size for size in node_sizes(dist.get_world_size()) if size > 1]
    each_case(
        [Case(size, "awkward", dtype, None, 4) for size, dtype in itertools.product(sizes, DTYPES)],
        lambda case: check_native_sums(case, rank),
    )


@pytest.mark.thorough("6")
@pytest.mark.parametrize("world_size", (4, 6))
def test_without_bits_the_backend_sums_within_the_node(world_size):
    run_ranks(run_native_sums, world_size)


def run_rows(rank: int) -> None:
    """Gather rows one by one, as for a GPU's tensors over gloo, and all in one call."""
    group = world_of(2).topology.node_group
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    expected, output = torch.empty(3, 10), torch.empty(3, 10)
    collectives.all_gather_rows(expected, rows, group, async_op=False)
    collectives.all_gather_row_by_row(output, rows, group)
    assert torch.equal(output, expected)


def test_rows_that_are_gathered_one_by_one_are_those_of_one_call():
    run_ranks(run_rows, 4)


def run_special_values(rank: int) -> dict[str, list]:
    """Put NaN, Inf and zeros into one block of one rank's gradients. Return how this rank's slice shows them."""
    result = {}
    for bits, poison in itertools.product(((8, 4), (4, 4), (None, None)), ("nan", "inf", "-inf", "zero")):
        case = Case(2, "blocks", torch.float32, *bits)
        world, layouts = world_of(2), reduce_layouts(case)
        full = torch.zeros(4, layouts.node_hop.numel) if poison == "zero" else case.values(rank, 4).view(4, -1)
        if poison != "zero" and rank == 1:
            full[2, 40] = float(poison)  # slice of rank 2, second block of the first matrix
        output = torch.empty(layouts.node_hop.numel)
        run_both_hops(world.reduce, output, full.flatten(), layouts)
        result[bits, poison] = (~output.isfinite()).nonzero().flatten().tolist(), output.abs().max().item()
    return result


def test_nan_and_inf_reach_the_owner_of_the_block_and_zeros_stay_zeros():
    results = run_ranks(run_special_values, 4)
    for rank, result in enumerate(results):
        for (bits, poison), (spoiled, largest) in result.items():
            if poison == "zero":
                assert largest == 0.0
            elif rank == 2:  # the whole block when quantized, the element alone when not
                assert spoiled == (list(range(32, 64)) if bits[0] else [40]), (bits, poison)
            else:
                assert spoiled == [], (rank, bits, poison)


def run_inference_then_training(rank: int) -> None:
    """Use buffers under inference_mode first and in training later: none may be an inference tensor."""
    case = Case(2, "awkward", torch.float32, 8)
    world, layout = world_of(2), case.layout(8)
    layouts = GatherLayouts(layout)
    with torch.inference_mode():
        gather(case, rank)
        secondaries = [each.new_secondary(layout, torch.device("cpu")) for each in (world.gather, world.gather_shared)]
    for each, secondary in zip((world.gather, world.gather_shared), secondaries, strict=True):
        cross(WholeWeights(each, layouts, secondary), case.values(rank, 1))
    gather(case, rank)


def test_buffers_made_in_inference_mode_serve_training():
    run_ranks(run_inference_then_training, 4)
