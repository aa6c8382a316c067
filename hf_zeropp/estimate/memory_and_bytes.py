"""Memory per rank and bytes per optimizer step of a training job: DDP, ZeRO-1/2/3, hpZ, HSDP, FSDP2 and this package.

An estimate is arithmetic: it takes no process group and no weights. Methods are computed in one of two ways:

- The papers' methods (DDP, ZeRO-1/2/3, hpZ) follow the ZeRO paper, arXiv 1910.02054 section 3: 16-bit parameters and gradients,
  and K bytes per parameter of optimizer states, the fp32 master among them (Adam: K = 12).
- FSDP2, HSDP and this package are computed as they hold it: a shard is the fp32 master itself, and gradients are kept in fp32
  beside it. For Adam both ways come to 16 bytes per parameter.

The estimate of this package is exact where the shape of the model is known (from a config), but for wire buffers: padding,
blocks, scales and 1-D parameters are laid out by the functions that a run uses, and a test compares the result with a run.

Bytes per step are those that enter one node, from other nodes or within it, all its ranks together: what the table "Bytes" of
the README says, times (Y-1)/Y. That is the least that any algorithm can move: each byte of a gather enters a node once. Gathers
and reductions over the world run in flat rings under NCCL and gloo, which put (W-1)/W on the link of a node in place of (Y-1)/Y
(``Estimate.in_rings``). gloo reduces by all-reduces, which carry twice that; the estimate counts NCCL's reduce-scatters.

Activations are left out for every method. The full weights that FSDP2 and this package hold for a moment stand beside the total
(``Estimate.gathered``), because the papers' formulas leave them out.

Frozen weights (LoRA's base) are held by FSDP2 in 16 bits, 1/W on each rank, and by this package as its Accelerate plugin holds
them (``frozen/units.py``): 1/N of the node's copy, packed if ``frozen_bits`` says so. FSDP2 gathers a unit of them within the
node for the forward pass and again for the backward pass, in the form in which it is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from hf_zeropp.estimate.exchanges import (
    HALF_BYTES,
    MASTER_BYTES,
    FrozenUnitGather,
    UnitGather,
    UnitReduce,
    gathers_of,
    gathers_stay_fsdp2,
)
from hf_zeropp.estimate.model_shape import ModelShape, UnitShape, slice_numel
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.traffic import total

KINDS = ("parameters", "gradients", "optimizer", "secondary", "accumulator", "frozen", "wire buffers")
"""Kinds of memory, in the order of a report."""

NO_MEMORY = dict.fromkeys(KINDS, 0.0)

FSDP2 = "FSDP2"
SYNCED = "FSDP2 synced"
KEPT = "FSDP2 kept"
IN_NODE = "FSDP2 node"
THIS_PACKAGE = "this package"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and bytes of one method.

    Attributes:
        method: its name.
        memory: bytes per rank, by kind (``KINDS``).
        cross_node: bytes that enter one node from other nodes per optimizer step, at least.
        in_rings: the same where gathers and reductions over the world run in flat rings.
        intra_node: bytes that move between the ranks of one node per optimizer step.
        gathered: bytes per rank of the full weights that are held at one time, at most: gathered units, and one decoded weight
            of a packed base. They are no part of ``total``. The papers do not count them, so their methods have 0.
    """

    method: str
    memory: dict[str, float]
    cross_node: float = 0
    in_rings: float = 0
    intra_node: float = 0
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """Bytes per rank of all kinds of memory."""
        return sum(self.memory.values())

    def plus(self, across: float, within: float = 0) -> Estimate:
        """Return the estimate with further bytes, which enter the node or move within it, and not in flat rings."""
        traffic = {"cross_node": across, "in_rings": across, "intra_node": within}
        return dataclasses.replace(self, **{name: getattr(self, name) + more for name, more in traffic.items()})


def estimate(model: ModelShape, setup: Setup) -> list[Estimate]:
    """Return the estimates of all methods: the papers' first, this package last."""
    ways = [FSDP2, *([SYNCED] if setup.micro_steps > 1 else []), KEPT, IN_NODE]
    stock = [fsdp2(model, setup, way) for way in ways]
    return [*paper_methods(model, setup), hsdp(model, setup), *stock, ours(model, setup)]


# ---- The papers' methods.


def paper_methods(model: ModelShape, setup: Setup) -> list[Estimate]:
    """Return the estimates of DDP and ZeRO-1/2/3 by the formulas of their papers, and of hpZ as DeepSpeed runs it.

    DDP and ZeRO-1 communicate once per step, ZeRO-2 and ZeRO-3 at every micro-step. Under hpZ weights cross once per step, and
    gradients at every micro-step: DeepSpeed keeps secondary shards until the optimizer steps.
    """
    # All weights are gathered, the frozen ones too; gradients exist for the trained ones alone.
    everything, trained = HALF_BYTES * model.num_params, HALF_BYTES * model.num_trainable
    world, per_node, steps = setup.world_size, setup.ranks_per_node, setup.micro_steps
    # Over how many ranks parameters, gradients and optimizer states are spread, and what is gathered and reduced over the world.
    methods = {
        # An all-reduce sends as much as a reduce-scatter and an all-gather: twice. ZeRO-2 reduces at every
        # micro-step, because it keeps no full gradient to add up in, and gathers its updated parameters once.
        "DDP": (1, 1, 1, 2 * trained),
        "ZeRO-1": (1, 1, world, 2 * trained),
        "ZeRO-2": (1, world, world, (1 + steps) * trained),
        "ZeRO-3": (world, world, world, (2 * everything + trained) * steps),
        "hpZ": (world, world, world, everything + trained * steps),
    }
    lines = [
        Estimate(
            method,
            NO_MEMORY
            | {
                "parameters": trained / parameters,
                "gradients": trained / gradients,
                "optimizer": (MASTER_BYTES + setup.state_bytes) * model.num_trainable / optimizer,
                "frozen": (everything - trained) / parameters,
            },
            **_flat_bytes(num_bytes, setup),
        )
        for method, (parameters, gradients, optimizer, num_bytes) in methods.items()
    ]
    # All gathers of hpZ but the first of a step find secondary shards within the node.
    lines[-1].memory["secondary"] = everything / per_node
    return [*lines[:-1], lines[-1].plus(0, (per_node - 1) * everything * (2 * steps - 1))]


def _flat_bytes(num_bytes: int, setup: Setup) -> dict[str, float]:
    """Return what one node receives in gathers and reductions of ``num_bytes`` in all over the world."""
    # Each byte is once on the node without a move within it: 1/Y as the node's own shards, the rest as it enters from
    # outside. All N ranks end with all bytes, so N - 1 copies of each move within the node.
    world, nodes = setup.world_size, setup.num_nodes
    across = round(num_bytes * (nodes - 1) / nodes)
    # One rank of a node has its predecessor in the ring on another node, and through that one pass all bytes but its own shard.
    in_rings = across * (world - 1) / world * nodes / (nodes - 1) if nodes > 1 else 0.0
    return {"cross_node": across, "in_rings": in_rings, "intra_node": (setup.ranks_per_node - 1) * num_bytes}


# ---- FSDP2.


def fsdp2(model: ModelShape, setup: Setup, way: str = FSDP2) -> Estimate:
    """Return the estimate of FSDP2 in one of its ways.

    Args:
        model: the model.
        setup: the job.
        way: ``FSDP2`` is what Accelerate runs: gradients are kept in full and reduced once per step. With ``SYNCED`` they are
            reduced in every micro-step. With ``KEPT`` weights are gathered once per step, and kept in full until the last
            micro-step, as gradients are. With ``IN_NODE`` backward passes gather within the node, from shards of 1/N of the
            weights that forward passes leave (``reshard_after_forward=N``).
    """
    # FSDP2 reads no setting of this package. The way says whether weights stay.
    config = dataclasses.replace(setup.config, qgz_accumulate="whole" if way == KEPT else "node")
    setup = dataclasses.replace(setup, config=config)
    memory = _sharded_memory(model, setup)
    gradients = setup.reduce_dtype.itemsize * model.num_trainable
    if setup.micro_steps > 1 and way != SYNCED:
        memory["accumulator"] = gradients
    reduced = gradients * (setup.micro_steps if way == SYNCED else 1)
    over_world = [dataclasses.replace(unit, reshards=unit.reshards and way != IN_NODE) for unit in model.units]
    traffic = _flat_bytes(_gathered_bytes(over_world, setup) + reduced, setup)
    line = Estimate(way, memory, **traffic, gathered=_gathered_at_once(model, setup))
    if way == IN_NODE and setup.num_nodes > 1:
        left = HALF_BYTES * sum(unit.numel for unit in model.units if unit.reshards)
        memory["secondary"] = left / setup.ranks_per_node
        line = line.plus(0, (setup.ranks_per_node - 1) * left * setup.micro_steps)
    return _with_muon(line, model, setup)


def _with_muon(line: Estimate, model: ModelShape, setup: Setup) -> Estimate:
    """Add what ``hf_zeropp.Muon`` sends: each matrix of a layer in 16 bits to the rank that owns it, and back."""
    if setup.optimizer != "muon":
        return line
    layers = [unit for unit in model.units if not unit.spans_model]
    matrices = sum(param.numel for unit in layers for param in unit.trainable if len(param.shape) == 2)
    # Each rank owns 1/W of them, and every two ranks exchange the parts that one has of what the other owns.
    of_pair = 2 * HALF_BYTES * matrices / setup.world_size**2
    across = round(setup.ranks_per_node * (setup.world_size - setup.ranks_per_node) * of_pair)
    within = round(setup.ranks_per_node * (setup.ranks_per_node - 1) * of_pair)
    return line.plus(across, within)


def hsdp(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of FSDP2 with a replica on each node, whose gradients are all-reduced over nodes once per step."""
    # The ranks of a node hold a replica's gradients, and the all-reduce sends them twice.
    gradients = setup.reduce_dtype.itemsize * model.num_trainable
    across = round(2 * gradients * (setup.num_nodes - 1) / setup.num_nodes)
    of_node = dataclasses.replace(setup, world_size=setup.ranks_per_node)
    return dataclasses.replace(fsdp2(model, of_node).plus(across), method="HSDP")


def _gathered_bytes(units: Iterable[UnitShape], setup: Setup) -> int:
    """Return the bytes of all weights that FSDP2's own gathers make whole in one step."""
    return sum(HALF_BYTES * unit.numel * gathers_of(unit, setup) for unit in units)


def _gathered_at_once(model: ModelShape, setup: Setup) -> int:
    """Return the bytes of full weights that a rank holds at one time, at most."""
    whole = HALF_BYTES * setup.world_size
    units = [(unit, whole * slice_numel(unit.params, setup.world_size)) for unit in model.units]
    return sum(num_bytes for _, num_bytes in units) if setup.config.keeps_weights else _largest_at_once(units)


def _largest_at_once(units: Sequence[tuple[UnitShape, int]]) -> int:
    """Return the bytes that are gathered at one time, at most, of units and their bytes while gathered."""
    passing = [num_bytes for unit, num_bytes in units if unit.reshards and not unit.spans_model]
    staying = sum(num_bytes for _, num_bytes in units) - sum(passing)
    # On accelerators FSDP2 gathers the next unit while one computes. On gloo one unit is over before the next begins.
    return staying + sum(sorted(passing)[-2:])


def _sharded_memory(model: ModelShape, setup: Setup) -> dict[str, float]:
    """Return what FSDP2's shards take on the largest rank: fp32 masters and gradients, states, frozen weights in bf16."""
    # FSDP2 pads every shard to that of rank 0, so rank 0 has the largest memory, and the padded size is what it holds.
    trained = sum(slice_numel(unit.trainable, setup.world_size) for unit in model.units)
    everything = sum(slice_numel(unit.params, setup.world_size) for unit in model.units)
    return NO_MEMORY | {
        "parameters": MASTER_BYTES * trained,
        "gradients": MASTER_BYTES * trained,
        "optimizer": setup.state_bytes * trained,
        "frozen": HALF_BYTES * (everything - trained),
    }


# ---- This package.


def ours(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of this package under ``setup.config``, by the layouts that a run would use."""
    # The plugin takes frozen parameters out of the units over the world, and gives them units over the node.
    trained = model.without_frozen
    if setup.world_size == setup.group_size:  # FSDP2's own collectives stay
        line = dataclasses.replace(fsdp2(trained, setup), method=THIS_PACKAGE)
    else:
        line = _with_muon(_two_hops(trained, setup), trained, setup)
    gathers = [FrozenUnitGather(unit, setup, model.packing(setup.config)) for unit in model.frozen_units]
    traffic = total(gather.step_bytes() for gather in gathers).times(setup.ranks_per_node)
    gathered = _largest_at_once([(gather.unit, gather.gathered_bytes) for gather in gathers])
    decoded = max((gather.decoded_bytes for gather in gathers), default=0)
    return dataclasses.replace(
        line.plus(traffic.cross_node, traffic.intra_node),
        memory=line.memory | {"frozen": sum(gather.shard_bytes for gather in gathers)},
        gathered=line.gathered + gathered + decoded,
    )


def _two_hops(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of a model without frozen parameters, in several groups of ranks."""
    stays_fsdp2 = gathers_stay_fsdp2(setup)
    reduces = [UnitReduce(unit, setup) for unit in model.units]
    gathers = [] if stays_fsdp2 else [UnitGather(unit, setup) for unit in model.units]
    memory = _sharded_memory(model, setup)
    memory["secondary"] = sum(gather.secondary_bytes() for gather in gathers)
    memory["accumulator"] = sum(reduce.accumulator_bytes() for reduce in reduces)
    if setup.micro_steps > 1 and not setup.config.accumulates_on_rank:
        # Between micro-steps ``.grad`` holds no memory (fsdp/gradients/pending.py). In the last one a unit's gradient is made
        # before its partial sums are freed, and the next one's in their room, which is larger.
        largest = max((slice_numel(unit.trainable, setup.world_size) for unit in model.units), default=0)
        memory["gradients"] = MASTER_BYTES * largest
    # Wires of gathers and reductions come to about one unit in 16 bits, or to 3/N of it where the backend's own collectives run
    # within the node. Those of deltas and changed words come beside it, with overlap of all units at once.
    is_native = setup.settings.qwz_intra_bits is None and setup.settings.qgz_intra_bits is None
    share = min(1.0, 3 / setup.group_size) if is_native else 1.0
    one_unit = HALF_BYTES * share * max((unit.numel for unit in model.units), default=0)
    landing = [gather.landing_bytes() for gather in gathers]
    memory["wire buffers"] = one_unit + (sum(landing) if setup.config.overlap else max(landing, default=0))
    # Units count what one rank receives. All ranks receive equally, so a node receives N times that.
    exchanges: list[UnitReduce | UnitGather] = [*reduces, *gathers]
    traffic = total(exchange.step_bytes() for exchange in exchanges).times(setup.ranks_per_node)
    flat = _flat_bytes(_gathered_bytes(model.units, setup), setup) if stays_fsdp2 else {}
    line = Estimate(THIS_PACKAGE, memory, **flat, gathered=_gathered_at_once(model, setup))
    return line.plus(traffic.cross_node, traffic.intra_node)
