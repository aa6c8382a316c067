"""Compare deltas and error feedback, which keep state between steps, with the same mathematics without collectives.

Every rank replays what all ranks do, with the PyTorch reference, and compares bit for bit: in every world, for every node size,
with hops blocking and not, in chunks, through shared memory and through sockets.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from harness import each_case, run_ranks
from two_hops import DTYPES, Case, digest, node_sizes, world_of

from hf_zeropp import ops
from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import Feedback, GatherLayouts, ReduceLayouts, TwoHopGather, TwoHopReduce
from hf_zeropp.ops import reference
from hf_zeropp.ops.format import WireLayout

WORLDS = (3, 4, 6)
STEPS = 4


def dtypes() -> tuple[torch.dtype, ...]:
    return DTYPES if dist.get_world_size() <= 3 else (torch.bfloat16,)


def masters(case: Case, rank: int, step: int) -> torch.Tensor:
    """Return fp32 weights that move a little at every step, and far in the last one."""
    moved = 0.01 * case.values(rank, 1, step).float() * (100 if step == STEPS - 1 else 1)
    return case.values(rank, 1, 100).float() + moved


# ---- Deltas.


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
            flight: Flight = gather.start(masters(case, rank, 0).to(case.dtype), layouts, secondary)
        else:
            flight = gather.start_delta(in_pieces(masters(case, rank, step), layouts, step), layouts, secondary)
        gather.land(flight, layouts, secondary)
        gather.decode(secondary, layouts.kept, output)
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


@pytest.mark.parametrize("world_size", WORLDS)
def test_deltas_make_the_copies_that_the_reference_makes(world_size):
    run_ranks(run_deltas, world_size)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_a_copy_is_off_by_half_a_step_of_the_last_delta_and_its_own_rounding(bits):
    """Errors of earlier deltas do not add up. Half a step is half of amax(delta) / qmax, rounded up to bf16."""
    case = Case(1, "blocks", torch.bfloat16, bits)
    layouts = gather_layouts(case, None)
    base = ops.quantize(masters(case, 0, 0), layouts.kept)
    for step in range(1, 20):
        weights = masters(case, 0, step)
        wire = ops.quantize_difference(weights, base, layouts.kept, layouts.delta)
        scales = decoded_scales(wire, layouts.delta)
        base = ops.dequantize_update(wire, layouts.delta, base, layouts.kept)
        copy = ops.dequantize(base, layouts.kept, dtype=torch.float32)
        half_ulp = (weights.abs() + scales) * 2.0**-8
        assert ((copy - weights).abs() <= scales / 2 * (1 + 1e-5) + half_ulp).all(), step


def decoded_scales(wire: torch.Tensor, layout: WireLayout) -> torch.Tensor:
    """Return the scale of every element's block, and 0 for elements that travel raw."""
    scales = torch.zeros(layout.numel)
    for part in layout.parts:
        if part.bits and part.numel:
            count = -(-part.numel // layout.block)
            stored = wire[part.scales : part.scales + 2 * count].clone().view(torch.bfloat16).float()
            scales[part.element : part.element + part.numel] = stored.repeat_interleave(layout.block)[: part.numel]
    return scales


# ---- Rotations and error feedback.


def reduce_layouts(case: Case, rotates: bool) -> ReduceLayouts:
    return ReduceLayouts(case.layout(case.node_bits), case.layout(case.cross_bits), case.layout(8), rotates)


def replay_feedback(case: Case, layouts: ReduceLayouts, owner: int, decay: float) -> list[torch.Tensor]:
    """Return what rank ``owner`` gets at each step: its slice, summed within every node and then over nodes."""
    num_nodes = dist.get_world_size() // case.ranks_per_node
    residuals = [torch.zeros(1, layouts.residual.nbytes, dtype=torch.uint8) for _ in range(num_nodes)]
    outputs = []
    for step in range(STEPS):
        rescale = 1.0 if step != 2 else 0.5
        wires = [
            node_wire(case, layouts, node, owner, step, decay, rescale, residuals[node]) for node in range(num_nodes)
        ]
        total = reference.dequantize_sum(
            torch.cat(wires), layouts.cross_hop, num_nodes, dtype=case.dtype, scale=0.5, rotate=layouts.rotates
        )
        outputs.append(total.flatten())
    return outputs


def node_wire(
    case: Case,
    layouts: ReduceLayouts,
    node: int,
    owner: int,
    step: int,
    decay: float,
    rescale: float,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Return the wire that a node sends to ``owner``."""
    world_size, size = dist.get_world_size(), case.ranks_per_node
    slices = [case.values(node * size + x, world_size, step).view(world_size, -1)[owner] for x in range(size)]
    settings = {"decay": decay, "rescale": rescale, "residual": residual}
    if size == 1:
        return reference.quantize_with_feedback(
            None,
            layouts.node_hop,
            layouts.cross_hop,
            layouts.residual,
            0,
            slices[0].float(),
            layouts.rotates,
            **settings,
        )
    wire = torch.cat([reference.quantize(one, layouts.node_hop, rotate=layouts.rotates) for one in slices])
    return reference.quantize_with_feedback(
        wire, layouts.node_hop, layouts.cross_hop, layouts.residual, size, None, False, **settings
    )


def reduce_with_feedback(two_hops: TwoHopReduce, case: Case, layouts: ReduceLayouts, rank: int, decay: float) -> list:
    num_slices = two_hops.cross_hop.size
    chunks = two_hops.chunks(layouts)
    residuals = [torch.zeros(num_slices * chunk.residual.nbytes, dtype=torch.uint8) for chunk in chunks]
    outputs = []
    for step in range(STEPS):
        world_of(case.ranks_per_node).poison()
        feedback = [Feedback(residual, decay, 1.0 if step != 2 else 0.5) for residual in residuals]
        flights = two_hops.start(case.values(rank, dist.get_world_size(), step), layouts)
        output = torch.empty(layouts.cross_hop.numel, dtype=case.dtype)
        two_hops.finish(two_hops.cross_over(flights, layouts, None, feedback), layouts, output, scale=0.5)
        outputs.append(output)
    return outputs


def check_feedback(case: Case, rotates: bool, decay: float, rank: int) -> None:
    world, layouts = world_of(case.ranks_per_node), reduce_layouts(case, rotates)
    expected = replay_feedback(case, layouts, rank, decay) if layouts.cross_hop.numel else [torch.empty(0)] * STEPS
    for name in ("reduce", "reduce_async", "reduce_in_chunks"):
        outputs = reduce_with_feedback(getattr(world, name), case, layouts, rank, decay)
        for step, (one, other) in enumerate(zip(outputs, expected, strict=True)):
            assert digest(one) == digest(other), (name, step)


def run_feedback(rank: int) -> None:
    sizes = node_sizes(dist.get_world_size())
    shapes = itertools.product(sizes, ("awkward", "blocks", "empty"), dtypes(), ((8, 4), (4, 4), (8, 8)))
    kinds = ((True, 1.0), (False, 1.0), (True, 0.25)) if dist.get_world_size() <= 4 else ((True, 0.25),)
    cases = [(Case(*one, *pair), *kind) for (*one, pair), kind in itertools.product(shapes, kinds)]
    each_case(cases, lambda case: check_feedback(*case, rank))


@pytest.mark.parametrize("world_size", WORLDS)
def test_feedback_and_rotation_reduce_as_the_reference_does(world_size):
    run_ranks(run_feedback, world_size)


def run_rotated_accumulation(rank: int) -> None:
    """Node hops add up rotated sums, and one cross hop with one rotation back ends all micro-steps."""
    for size, (name, dtype) in itertools.product(node_sizes(4), itertools.product(("awkward", "blocks"), DTYPES)):
        case = Case(size, name, dtype, 8, 4)
        layouts = reduce_layouts(case, rotates=True)
        reduce = world_of(size).reduce_in_chunks
        partial = None
        for seed in (1, 2):
            partial = reduce.accumulate(reduce.start(case.values(rank, 4, seed), layouts), layouts, partial)
        output, flushed = (torch.empty(layouts.cross_hop.numel) for _ in range(2))
        reduce.finish(reduce.start_across(partial.clone(), layouts), layouts, flushed)
        last = reduce.start(torch.zeros_like(case.values(rank, 4, 3)), layouts)
        reduce.finish(reduce.cross_over(last, layouts, partial), layouts, output)
        exact = sum(case.values(source, 4, seed).view(4, -1)[rank].double() for source in range(4) for seed in (1, 2))
        assert torch.equal(output, flushed), "a last micro-step of zeros is no micro-step"
        assert (output - exact).norm() <= 0.2 * exact.norm(), "INT4 of sums: a twentieth of the largest, at most"


def test_rotated_sums_accumulate():
    run_ranks(run_rotated_accumulation, 4)
