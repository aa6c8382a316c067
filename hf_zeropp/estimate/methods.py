"""Memory per rank and bytes per optimizer step of a training job: DDP, ZeRO-1/2/3, HSDP, hpZ, FSDP2 and this package.

An estimate is arithmetic: it takes no process group and no weights. Methods are computed in one of two ways.

- The papers' methods (DDP, ZeRO-1/2/3, MiCS / HSDP, hpZ) follow the ZeRO paper, arXiv 1910.02054 section 3: 16-bit parameters
  and gradients, and K bytes per parameter of optimizer states, the fp32 master among them (Adam: K = 12).
- FSDP2 and this package are computed as they hold it: a shard is the fp32 master itself, and gradients are kept in fp32
  beside it. For Adam both ways come to 16 bytes per parameter.

The estimate of this package is exact where the shape of the model is known (from a config): padding, blocks, scales and
1-D parameters are laid out by the functions that a run uses, and a test compares the result with what a run holds and sends.
A shape made from a parameter count is that of a transformer of usual proportions.

Bytes per step are those that enter one node, from other nodes or within it, all its ranks together. They are the least that
any algorithm can move: over the network each byte of a gather enters a node once. Flat rings move more, (W-1)/W where this
module counts (Y-1)/Y. Activations are left out for every method. The full weights that FSDP2 and this package hold for a
moment stand beside the total (``Estimate.gathered``), because the papers' formulas leave them out.

Frozen weights (LoRA's base) are held by FSDP2 in 16 bits, 1/W on each rank, and by this package as its Accelerate plugin holds
them: 1/N of the node's copy, packed if ``frozen_bits`` says so (``frozen_base.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from hf_zeropp.comm.topology import resolve_hpz_size
from hf_zeropp.estimate.frozen_base import FrozenGather
from hf_zeropp.estimate.model_shape import ModelShape, ParamShape, UnitShape
from hf_zeropp.estimate.setup import Setup
from hf_zeropp.fsdp.layouts import gather_layouts, reduce_layouts
from hf_zeropp.fsdp.predictions import (
    changed_words_bytes,
    crossings_per_step,
    gather_bytes,
    gather_node_size,
    gathers_per_step,
    leaves_gathers_to_fsdp2,
    reduce_bytes,
)
from hf_zeropp.fsdp.shards import ParamShard
from hf_zeropp.traffic import Bytes, Peers, total

KINDS = ("parameters", "gradients", "optimizer", "secondary", "accumulator", "frozen", "wire buffers")
"""Kinds of memory, in the order of a report."""

# Weights and gradients of 16 bits, and masters of 32, are the paper's assumption and what bf16 mixed precision gives.
MASTER_BYTES = 4
HALF_BYTES = 2

THIS_PACKAGE = "this package"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and bytes of one method.

    Attributes:
        method: its name.
        memory: bytes per rank, by kind (``KINDS``).
        cross_node: bytes that enter one node from other nodes per optimizer step.
        intra_node: bytes that move between the ranks of one node per optimizer step.
        gathered: bytes per rank of the full weights that are held at one time, at most: gathered units, and one decoded weight
            of a packed base. They are no part of ``total``. The papers do not count them, so their methods have 0.
    """

    method: str
    memory: dict[str, float]
    cross_node: float
    intra_node: float
    gathered: float = 0.0

    @property
    def total(self) -> float:
        """Bytes per rank of all kinds of memory."""
        return sum(self.memory.values())

    def times(self, num_groups: int) -> Estimate:
        """Return the estimate of a node on which as many shard groups lie, each with the bytes of this one."""
        return dataclasses.replace(
            self, cross_node=self.cross_node * num_groups, intra_node=self.intra_node * num_groups
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the total, fit for JSON."""
        return {**dataclasses.asdict(self), "total": self.total}


def estimate(model: ModelShape, setup: Setup) -> list[Estimate]:
    """Return the estimates of all methods: the papers' first, this package last.

    With tensor parallelism their ranks are those of one shard group, and their bytes those of all shard groups of a node. What
    tensor parallelism itself sends is not in them.
    """
    if setup.tensor_parallel > 1:
        return [
            one.times(setup.tensor_parallel) for one in estimate(model.cut(setup.tensor_parallel), setup.of_group())
        ]
    return [*paper_methods(model, setup), fsdp2(model, setup), ours(model, setup)]


# ---- The papers' methods.


def paper_methods(model: ModelShape, setup: Setup) -> list[Estimate]:
    """Return the estimates of DDP, ZeRO-1/2/3, MiCS / HSDP and hpZ, by the formulas of their papers.

    Each method accumulates gradients in the way that sends least: DDP and ZeRO-1 communicate once per step, ZeRO-2 and
    ZeRO-3 at every micro-step, HSDP across nodes once per step.
    """
    # All weights are gathered, the frozen ones too; gradients exist for the trained ones alone. LoRA is where both
    # differ.
    everything, trained = HALF_BYTES * model.num_params, HALF_BYTES * model.num_trainable
    world, per_node, steps = setup.world_size, setup.ranks_per_node, setup.micro_steps
    # HSDP all-reduces 1/N of the gradients over each cross group, which is all of them over a node's N cross groups.
    hsdp = Bytes(
        intra_node=(per_node - 1) * (2 * everything + trained) * steps,
        cross_node=_flat_bytes(trained, setup, times=2).cross_node,
    )
    return [
        # An all-reduce sends as much as a reduce-scatter and an all-gather: twice. ZeRO-2 reduces at every
        # micro-step, because it keeps no full gradient to add up in, and gathers its updated parameters once.
        _paper("DDP", model, setup, _Spread(1, 1, 1), _flat_bytes(trained, setup, times=2)),
        _paper("ZeRO-1", model, setup, _Spread(1, 1, world), _flat_bytes(trained, setup, times=2)),
        _paper("ZeRO-2", model, setup, _Spread(1, world, world), _flat_bytes(trained, setup, times=1 + steps)),
        _paper("ZeRO-3", model, setup, _Spread.all(world), _flat_bytes(2 * everything + trained, setup, times=steps)),
        _paper("MiCS / HSDP", model, setup, _Spread.all(per_node), hsdp),
        _paper("hpZ", model, setup, _Spread.all(world), _hpz_bytes(everything, trained, setup), everything / per_node),
    ]


@dataclasses.dataclass(frozen=True)
class _Spread:
    """Over how many ranks each kind of memory is spread; 1 for a copy on every rank."""

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def all(cls, num_ranks: int) -> _Spread:
        return cls(num_ranks, num_ranks, num_ranks)


def _paper(
    method: str, model: ModelShape, setup: Setup, spread: _Spread, traffic: Bytes, secondary: float = 0.0
) -> Estimate:
    trained = model.num_trainable
    memory = _memory(
        parameters=HALF_BYTES * trained / spread.parameters,
        gradients=HALF_BYTES * trained / spread.gradients,
        optimizer=(MASTER_BYTES + setup.state_bytes) * trained / spread.optimizer,
        secondary=secondary,
        frozen=HALF_BYTES * (model.num_params - trained) / spread.parameters,
    )
    return Estimate(method, memory, traffic.cross_node, traffic.intra_node)


def _flat_bytes(num_bytes: float, setup: Setup, times: int = 1) -> Bytes:
    """Return what one node receives in ``times`` gathers or reductions of ``num_bytes`` over the world."""
    # Each byte is once on the node without a move within it: 1/Y as the node's own shards, the rest as it enters from
    # outside. All N ranks end with all bytes, so N - 1 copies of each move within the node.
    from_outside = num_bytes * (setup.num_nodes - 1) / setup.num_nodes
    return Bytes(0, round((setup.ranks_per_node - 1) * num_bytes * times), round(from_outside * times))


def _hpz_bytes(everything: float, trained: float, setup: Setup) -> Bytes:
    """Return what one node receives under the paper's hpZ, where all but the backward gather crosses nodes."""
    # The forward gather and the reduction cross nodes. The backward gather finds its secondary shards within the
    # node.
    result = _flat_bytes(everything + trained, setup, times=setup.micro_steps)
    result.intra_node += round((setup.ranks_per_node - 1) * everything * setup.micro_steps)
    return result


# ---- FSDP2.


def fsdp2(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of FSDP2 as Accelerate runs it.

    Micro-steps before the last are not synchronized: gradients are kept in full and reduced once per step.
    """
    memory = _sharded_memory(model, setup)
    if setup.micro_steps > 1:
        # Full size, and not 1/W: unsynchronized micro-steps add up gradients before they are reduced.
        memory["accumulator"] = setup.reduce_dtype.itemsize * model.num_trainable
    gradients = setup.reduce_dtype.itemsize * model.num_trainable
    traffic = _flat_bytes(_fsdp2_gathered_bytes(model, setup) + gradients, setup)
    gathered = _gathered_at_once((unit, _gathered_bytes(unit, setup)) for unit in model.units)
    return Estimate("FSDP2", memory, traffic.cross_node, traffic.intra_node, gathered)


def _fsdp2_gathered_bytes(model: ModelShape, setup: Setup) -> int:
    """Return the bytes of all weights that FSDP2's own gathers make whole in one step."""
    return sum(
        HALF_BYTES * param.numel * gathers_per_step(setup.micro_steps, reshards_after_forward=unit.reshards)
        for unit in model.units
        for param in unit.params
    )


def _gathered_bytes(unit: UnitShape, setup: Setup) -> int:
    """Return the bytes of a unit over the world while it is gathered."""
    return HALF_BYTES * setup.world_size * sum(shard.padded_numel for shard in flat_shards(unit.params, setup))


def _gathered_at_once(units: Iterable[tuple[UnitShape, int]]) -> int:
    """Return the bytes that are gathered at one time, at most, of units and their bytes while gathered."""
    staying, passing = 0, [0]
    for unit, num_bytes in units:
        if unit.spans_model or not unit.reshards:
            staying += num_bytes
        else:
            passing.append(num_bytes)
    # On accelerators FSDP2 gathers the next unit while one computes. On gloo one unit is over before the next begins.
    return staying + sum(sorted(passing)[-2:])


def _sharded_memory(model: ModelShape, setup: Setup) -> dict[str, float]:
    """Return what FSDP2's shards take on the largest rank: fp32 masters and gradients, states, frozen weights in bf16."""
    # FSDP2 pads every shard to that of rank 0, so rank 0 has the largest memory, and the padded size is what it
    # holds.
    trained = _trained_numel(model.units, setup)
    everything = sum(shard.padded_numel for unit in model.units for shard in flat_shards(unit.params, setup))
    return _memory(
        parameters=MASTER_BYTES * trained,
        gradients=MASTER_BYTES * trained,
        optimizer=setup.state_bytes * trained,
        frozen=HALF_BYTES * (everything - trained),
    )


def _trained_numel(units: Iterable[UnitShape], setup: Setup) -> int:
    return sum(shard.padded_numel for unit in units for shard in flat_shards(unit.trainable, setup))


def _memory(**kinds: float) -> dict[str, float]:
    return dict.fromkeys(KINDS, 0.0) | kinds


# ---- This package.


def ours(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of this package under ``setup.config``, by the layouts that a run would use."""
    # The plugin takes frozen parameters out of the units over the world, and gives them units over the node.
    trained = dataclasses.replace(model, units=model.trained_units, frozen_units=())
    if setup.num_nodes == 1:  # FSDP2's own collectives stay
        line = dataclasses.replace(fsdp2(trained, setup), method=THIS_PACKAGE)
    else:
        line = _two_hops(trained, setup)
    return _with_frozen_base(line, model, setup)


def _with_frozen_base(line: Estimate, model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of the trainable parameters, with the frozen ones added."""
    format = model.frozen_format(setup.config.frozen_bits)
    gathers = [FrozenGather(unit, setup.ranks_per_node, format) for unit in model.frozen_units]
    traffic = total(gather.step_bytes(setup.micro_steps) for gather in gathers).times(setup.ranks_per_node)
    return dataclasses.replace(
        line,
        memory=line.memory | {"frozen": sum(gather.shard_bytes() for gather in gathers)},
        cross_node=line.cross_node + traffic.cross_node,
        intra_node=line.intra_node + traffic.intra_node,
        gathered=line.gathered
        + _gathered_at_once((gather.unit, gather.gathered_bytes()) for gather in gathers)
        + max((gather.decoded_bytes() for gather in gathers), default=0),
    )


def _two_hops(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of a model without frozen parameters on more than one node."""
    hpz_size = resolve_hpz_size(setup.config.hpz_size, setup.ranks_per_node, setup.world_size)
    # The question is the one that ``apply_zeropp`` asks, so the estimate cannot disagree with a run about it.
    stays_fsdp2 = leaves_gathers_to_fsdp2(setup.config, hpz_size, setup.world_size)
    gathers = [] if stays_fsdp2 else [_UnitGather(unit, setup, hpz_size) for unit in model.units]
    reduces = [_UnitReduce(unit, setup) for unit in model.units]
    memory = _sharded_memory(model, setup)
    memory["secondary"] = sum(gather.secondary_bytes() for gather in gathers)
    memory["accumulator"] = sum(reduce.accumulator_bytes() for reduce in reduces)
    if setup.micro_steps > 1:
        # Between micro-steps ``.grad`` holds no memory (fsdp/pending.py). In the last one a unit's gradient is made before its
        # partial sums are freed, and the next one's in their room: they are larger, fp32 or bf16, on two nodes or more.
        memory["gradients"] = MASTER_BYTES * max((_trained_numel([unit], setup) for unit in model.units), default=0)
    # Units use buffers in turn. On accelerators gathers and reductions run on streams of their own, and memory that one stream
    # has freed stays in that stream's pool: the pools add up. On gloo both share one pool, which is smaller.
    pools = [max((user.buffer_bytes() for user in users), default=0) for users in (gathers, reduces)]
    memory["wire buffers"] = sum(pools) + _landing_bytes(gathers, setup)
    users: list[_UnitGather | _UnitReduce] = [*gathers, *reduces]
    # Units count what one rank receives. All ranks receive equally, so a node receives N times that.
    traffic = total(user.step_bytes() for user in users).times(setup.ranks_per_node)
    if stays_fsdp2:
        traffic.add(_flat_bytes(_fsdp2_gathered_bytes(model, setup), setup))
    gathered = _gathered_at_once((unit, _gathered_bytes(unit, setup)) for unit in model.units)
    return Estimate(THIS_PACKAGE, memory, traffic.cross_node, traffic.intra_node, gathered)


def _landing_bytes(gathers: list[_UnitGather], setup: Setup) -> int:
    """Return the bytes of the buffers for deltas and changed words. With overlap, those of all units are under way at once."""
    buffers = [gather.landing_bytes() for gather in gathers]
    return sum(buffers) if setup.config.overlap else max(buffers, default=0)


class _UnitGather:
    """The weight gathers of one unit: the cross hop, then the node hop over the ranks that share a secondary copy."""

    def __init__(self, unit: UnitShape, setup: Setup, hpz_size: int | None) -> None:
        self._unit = unit
        self._setup = setup
        self._keeps_secondary = hpz_size is not None
        # Rank 0 stands for all ranks: groups are regular, so each rank has as many peers on its node and elsewhere.
        # The groups follow ``hpz_size``, and bytes are divided by the true nodes, as in a run.
        node_size = gather_node_size(hpz_size, setup.ranks_per_node)
        self._node_hop = Peers.among(range(node_size), 0, setup.ranks_per_node)
        self._cross_hop = Peers.among(range(0, setup.world_size, node_size), 0, setup.ranks_per_node)
        # bf16 is the compute dtype that is assumed throughout.
        shards = flat_shards(unit.params, setup)
        self._layouts = gather_layouts(setup.config, shards, torch.bfloat16, trains=True)
        self._changes_bytes = changed_words_bytes(self._layouts, setup.share_of_changes)

    def secondary_bytes(self) -> int:
        return self._cross_hop.group_size * self._layouts.kept.nbytes if self._keeps_secondary else 0

    def buffer_bytes(self) -> int:
        """Return the bytes of wire buffers while the unit is gathered.

        The node hop receives the whole unit in wire form. Before it, the cross hop sends one slice. If no secondary shard is
        kept, it also needs a buffer of that size to receive in. A delta is taken of fp32 masters, on a GPU in one piece. Changed
        words are found in a copy of the slice, and encoded in as much room.
        """
        kept, delta = self._layouts.kept, self._layouts.delta
        received = self._setup.world_size * kept.nbytes
        of_delta = 0 if delta is None else delta.nbytes + MASTER_BYTES * delta.numel
        if delta is not None or self._layouts.sends_changes:
            return received + max(of_delta, 2 * kept.nbytes if self._layouts.sends_changes else 0)
        return received + ((0 if self._keeps_secondary else self._cross_hop.group_size) + 1) * kept.nbytes

    def landing_bytes(self) -> int:
        """Return the bytes of the buffers of one cross hop that changes a secondary shard, beside that shard."""
        if self._changes_bytes is not None:
            return (
                1 + self._cross_hop.group_size
            ) * self._changes_bytes  # one wire is sent and kept until it has arrived
        return 0 if self._layouts.delta is None else self._cross_hop.group_size * self._layouts.delta.nbytes

    def step_bytes(self) -> Bytes:
        """Return what one rank receives in a step."""
        gathers = gathers_per_step(self._setup.micro_steps, reshards_after_forward=self._unit.reshards)
        crossings = crossings_per_step(gathers, keeps_secondary=self._keeps_secondary, trains=True)
        return gather_bytes(
            self._layouts,
            cross_hop=self._cross_hop,
            node_hop=self._node_hop,
            gathers=gathers,
            crossings=crossings,
            changes_bytes=self._changes_bytes,
        ).total()


class _UnitReduce:
    """The gradient reductions of one unit: the node hop at every micro-step, the cross hop once per step."""

    def __init__(self, unit: UnitShape, setup: Setup) -> None:
        self._setup = setup
        self._node_hop = Peers.among(range(setup.ranks_per_node), 0, setup.ranks_per_node)
        self._cross_hop = Peers.among(range(0, setup.world_size, setup.ranks_per_node), 0, setup.ranks_per_node)
        config, shards = setup.config, flat_shards(unit.params, setup)
        # ``qgz_until`` is left out: the estimate is of a step in which gradients are quantized.
        layouts = reduce_layouts(config, shards, setup.reduce_dtype, quantizes=config.quantizes_gradients)
        self._numel = layouts.node_hop.numel
        self._layouts = layouts

    def accumulator_bytes(self) -> int:
        """Return the bytes of the partial sums between micro-steps: 1/N of the unit in fp32, or bf16."""
        itemsize = getattr(torch, self._setup.config.qgz_accumulator).itemsize
        return itemsize * self._setup.num_nodes * self._numel if self._setup.micro_steps > 1 else 0

    def buffer_bytes(self) -> int:
        """Return the bytes of wire buffers: both hops send and receive, and the node hop carries the whole unit.

        Partial sums in bf16 are added up in an fp32 copy. The copy is made
        when the node hop has ended, in the room of what was sent, or beyond it.
        """
        node_hop = self._layouts.node_hop.nbytes if self._setup.ranks_per_node > 1 else 0
        cross_hop = self._layouts.cross_hop.nbytes
        sent = received = self._setup.world_size * node_hop
        is_rounded = self._setup.config.qgz_accumulator == "bfloat16" and self._setup.micro_steps > 1
        copy = torch.float32.itemsize * self._setup.num_nodes * self._numel if is_rounded else 0
        return received + max(sent, copy) + 2 * self._setup.num_nodes * cross_hop

    def step_bytes(self) -> Bytes:
        """Return what one rank receives in a step."""
        micro_steps = self._setup.micro_steps
        return reduce_bytes(
            self._layouts, cross_hop=self._cross_hop, node_hop=self._node_hop, micro_steps=micro_steps
        ).total()


def flat_shards(params: Iterable[ParamShape], setup: Setup) -> list[ParamShard]:
    """Return a rank's shards of parameters as wire layouts take them. On rank 0 they have no padding of their own."""
    # The number of dimensions matters beside the size: 1-D parameters travel unquantized.
    sizes = ((param, param.padded_shard_numel(setup.world_size)) for param in params)
    return [ParamShard("", numel, numel, len(param.shape)) for param, numel in sizes]
