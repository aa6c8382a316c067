"""Memory per rank and bytes per optimizer step of a training job: DDP, ZeRO-1/2/3, hpZ, HSDP, FSDP2 and this package.

An estimate is arithmetic: it takes no process group and no weights. Methods are computed in one of two ways:

- The papers' methods (DDP, ZeRO-1/2/3, hpZ) follow the ZeRO paper, arXiv 1910.02054 section 3: 16-bit parameters and gradients,
  and K bytes per parameter of optimizer states, the fp32 master among them (Adam: K = 12).
- FSDP2, HSDP and this package are computed as they hold it: a shard is the fp32 master itself, and gradients are kept in fp32
  beside it. For Adam both ways come to 16 bytes per parameter.

The estimate of this package is exact where the shape of the model is known (from a config): padding, blocks, scales and
1-D parameters are laid out by the functions that a run uses, and a test compares the result with what a run holds and sends.
A shape made from a parameter count is that of a transformer of usual proportions.

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
from collections.abc import Iterable

import torch

from hf_zeropp.comm.topology import prime_factors, resolve_hpz_size
from hf_zeropp.estimate.model_shape import ModelShape, Packing, ParamShape, UnitShape, slice_numel
from hf_zeropp.estimate.training_job import Setup
from hf_zeropp.fsdp.layouts import gather_layouts, reduce_layouts
from hf_zeropp.fsdp.param_shard import ParamShard
from hf_zeropp.fsdp.predictions import (
    HopBytes,
    changed_words_bytes,
    crossings_per_step,
    gather_bytes,
    gathers_per_step,
    leaves_gathers_to_fsdp2,
    reduce_bytes,
    reductions_per_step,
)
from hf_zeropp.traffic import Bytes, Peers, total

KINDS = ("parameters", "gradients", "optimizer", "secondary", "accumulator", "frozen", "wire buffers")
"""Kinds of memory, in the order of a report."""

# Weights and gradients of 16 bits, and masters of 32, are the paper's assumption and what bf16 mixed precision gives.
MASTER_BYTES = 4
HALF_BYTES = 2

SYNCED = "FSDP2 synced"
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

    def times(self, num_groups: int) -> Estimate:
        """Return the estimate of a node on which as many shard groups lie, each with the bytes of this one."""
        traffic = {name: getattr(self, name) * num_groups for name in ("cross_node", "in_rings", "intra_node")}
        return dataclasses.replace(self, **traffic)

    def plus(self, across: float, within: float = 0) -> Estimate:
        """Return the estimate with further bytes, which enter the node or move within it, and not in flat rings."""
        traffic = {"cross_node": across, "in_rings": across, "intra_node": within}
        return dataclasses.replace(self, **{name: getattr(self, name) + more for name, more in traffic.items()})


def estimate(model: ModelShape, setup: Setup) -> list[Estimate]:
    """Return the estimates of all methods: the papers' first, this package last, with replicas behind the same without.

    All ranks hold one model but under HSDP, and in the last line where there are replicas.
    With tensor parallelism their ranks are those of one shard group, and their bytes those of all shard groups of a node. What
    tensor parallelism itself sends is not in them.
    """
    if (parts := setup.tensor_parallel) > 1:
        world, per_node = setup.world_size // parts, setup.ranks_per_node // parts
        group = dataclasses.replace(setup, world_size=world, ranks_per_node=per_node, tensor_parallel=1)
        return [one.times(parts) for one in estimate(model.cut(parts), group)]
    one = setup.in_replicas(1)
    lines = [*paper_methods(model, one), hsdp(model, setup), fsdp2(model, one)]
    if setup.micro_steps > 1:
        lines.append(fsdp2(model, one, syncs=True))
    lines.append(ours(model, one))
    if setup.replicas > 1:
        lines.append(dataclasses.replace(ours(model, setup), method=f"{setup.replicas} replicas"))
    return lines


# ---- The papers' methods.


def paper_methods(model: ModelShape, setup: Setup) -> list[Estimate]:
    """Return the estimates of DDP, ZeRO-1/2/3 and hpZ, by the formulas of their papers.

    Each method accumulates gradients in the way that sends least: DDP and ZeRO-1 communicate once per step, ZeRO-2 and
    ZeRO-3 at every micro-step.
    """
    # All weights are gathered, the frozen ones too; gradients exist for the trained ones alone. LoRA is where both
    # differ.
    everything, trained = HALF_BYTES * model.num_params, HALF_BYTES * model.num_trainable
    world, per_node, steps = setup.world_size, setup.ranks_per_node, setup.micro_steps
    hpz = _flat_bytes(everything + trained, setup, times=steps)
    # The forward gather and the reduction cross nodes. The backward gather finds its secondary shards within the node.
    hpz["intra_node"] += round((per_node - 1) * everything * steps)
    # Over how many ranks parameters, gradients and optimizer states are spread, and what a node receives.
    methods = {
        # An all-reduce sends as much as a reduce-scatter and an all-gather: twice. ZeRO-2 reduces at every
        # micro-step, because it keeps no full gradient to add up in, and gathers its updated parameters once.
        "DDP": (1, 1, 1, _flat_bytes(trained, setup, times=2)),
        "ZeRO-1": (1, 1, world, _flat_bytes(trained, setup, times=2)),
        "ZeRO-2": (1, world, world, _flat_bytes(trained, setup, times=1 + steps)),
        "ZeRO-3": (world, world, world, _flat_bytes(2 * everything + trained, setup, times=steps)),
        "hpZ": (world, world, world, hpz),
    }
    return [
        Estimate(
            method,
            _memory(
                parameters=trained / parameters,
                gradients=trained / gradients,
                optimizer=(MASTER_BYTES + setup.state_bytes) * model.num_trainable / optimizer,
                secondary=everything / per_node if method == "hpZ" else 0.0,
                frozen=(everything - trained) / parameters,
            ),
            **traffic,
        )
        for method, (parameters, gradients, optimizer, traffic) in methods.items()
    ]


def _flat_bytes(num_bytes: float, setup: Setup, times: int = 1) -> dict[str, float]:
    """Return what one node receives in ``times`` gathers or reductions of ``num_bytes`` over the world."""
    # Each byte is once on the node without a move within it: 1/Y as the node's own shards, the rest as it enters from
    # outside. All N ranks end with all bytes, so N - 1 copies of each move within the node.
    world, nodes = setup.world_size, setup.num_nodes
    across = round(num_bytes * (nodes - 1) / nodes * times)
    # One rank of a node has its predecessor in the ring on another node, and through that one pass all bytes but its own shard.
    in_rings = across * (world - 1) / world * nodes / (nodes - 1) if nodes > 1 else 0.0
    within = round((setup.ranks_per_node - 1) * num_bytes * times)
    return {"cross_node": across, "in_rings": in_rings, "intra_node": within}


# ---- FSDP2.


def fsdp2(model: ModelShape, setup: Setup, *, syncs: bool = False) -> Estimate:
    """Return the estimate of FSDP2 as Accelerate runs it.

    Args:
        model: its units.
        setup: how it is trained.
        syncs: whether gradients are reduced in every micro-step. By default they are kept in full, and reduced once per step.
    """
    memory = _sharded_memory(model, setup)
    gradients = setup.reduce_dtype.itemsize * model.num_trainable
    if setup.micro_steps > 1 and not syncs:
        memory["accumulator"] = gradients
    reduced = gradients * (setup.micro_steps if syncs else 1)
    traffic = _flat_bytes(_fsdp2_gathered_bytes(model, setup) + reduced, setup)
    line = Estimate(SYNCED if syncs else "FSDP2", memory, **traffic, gathered=_gathered_at_once(model, setup))
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
    """Return the estimate of FSDP2 over each replica, whose gradients are all-reduced over replicas once per step."""
    setup = setup.of_hsdp
    line = fsdp2(model, setup)
    # The ranks of a node hold 1/Y of a replica's gradients, and the all-reduce sends that twice.
    of_node = setup.reduce_dtype.itemsize * model.num_trainable / setup.num_nodes
    across = round(2 * of_node * (setup.replicas - 1) / setup.replicas)
    return dataclasses.replace(line.plus(across), method="HSDP")


def _fsdp2_gathered_bytes(model: ModelShape, setup: Setup) -> int:
    """Return the bytes of all weights that FSDP2's own gathers make whole in one step."""
    return sum(
        HALF_BYTES * param.numel * gathers_per_step(setup.micro_steps, reshards_after_forward=unit.reshards)
        for unit in model.units
        for param in unit.params
    )


def _gathered_at_once(model: ModelShape, setup: Setup) -> int:
    """Return the bytes that are gathered at one time, at most, of units over the world."""
    whole = HALF_BYTES * setup.world_size
    return _largest_at_once((unit, whole * slice_numel(unit.params, setup.world_size)) for unit in model.units)


def _largest_at_once(units: Iterable[tuple[UnitShape, int]]) -> int:
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
    # FSDP2 pads every shard to that of rank 0, so rank 0 has the largest memory, and the padded size is what it holds.
    trained = sum(slice_numel(unit.trainable, setup.world_size) for unit in model.units)
    everything = sum(slice_numel(unit.params, setup.world_size) for unit in model.units)
    return _memory(
        parameters=MASTER_BYTES * trained,
        gradients=MASTER_BYTES * trained,
        optimizer=setup.state_bytes * trained,
        frozen=HALF_BYTES * (everything - trained),
    )


def _memory(**kinds: float) -> dict[str, float]:
    return dict.fromkeys(KINDS, 0.0) | kinds


# ---- This package.


def ours(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of this package under ``setup.config``, by the layouts that a run would use."""
    # The plugin takes frozen parameters out of the units over the world, and gives them units over the node.
    trained = dataclasses.replace(model, units=model.trained_units, frozen_units=())
    if setup.num_nodes == 1:  # FSDP2's own collectives stay
        stock = fsdp2 if setup.replicas == 1 else hsdp
        line = dataclasses.replace(stock(trained, setup), method=THIS_PACKAGE)
    else:
        line = _with_muon(_two_hops(trained, setup), trained, setup)
    packing = model.packing(setup.config)
    gathers = [FrozenGather(unit, setup.ranks_per_node, packing) for unit in model.frozen_units]
    traffic = total(gather.step_bytes(setup.micro_steps) for gather in gathers).times(setup.ranks_per_node)
    gathered = _largest_at_once((gather.unit, gather.gathered_bytes()) for gather in gathers)
    decoded = max((gather.decoded_bytes() for gather in gathers), default=0)
    return dataclasses.replace(
        line.plus(traffic.cross_node, traffic.intra_node),
        memory=line.memory | {"frozen": sum(gather.shard_bytes() for gather in gathers)},
        gathered=line.gathered + gathered + decoded,
    )


def saved_by_packing_embeddings(model: ModelShape, setup: Setup) -> int:
    """Return the bytes per rank that ``pack_embeddings`` would take less; 0 where nothing is packed, or they are."""
    packing = model.packing(setup.config)
    if packing is None:
        return 0
    dense, packed = (
        sum(FrozenGather(unit, setup.ranks_per_node, each).shard_bytes() for unit in model.frozen_units)
        for each in (packing, packing._replace(embeddings=True))
    )
    return dense - packed


def _two_hops(model: ModelShape, setup: Setup) -> Estimate:
    """Return the estimate of a model without frozen parameters on more than one node."""
    stays_fsdp2 = gathers_stay_fsdp2(setup, setup.ranks_per_node)
    reduces = [UnitReduce(unit.params, setup, setup.ranks_per_node) for unit in model.units]
    gathers = [] if stays_fsdp2 else [UnitGather(unit.params, setup, setup.ranks_per_node) for unit in model.units]
    memory = _sharded_memory(model, setup)
    memory["secondary"] = sum(gather.secondary_bytes() for gather in gathers)
    memory["accumulator"] = sum(reduce.accumulator_bytes() for reduce in reduces)
    if setup.micro_steps > 1 and not setup.config.accumulates_on_rank:
        # Between micro-steps ``.grad`` holds no memory (fsdp/gradients/pending.py). In the last one a unit's gradient is made
        # before its partial sums are freed, and the next one's in their room: both are larger, fp32 or bf16, on two nodes or
        # more.
        largest = max((slice_numel(unit.trainable, setup.world_size) for unit in model.units), default=0)
        memory["gradients"] = MASTER_BYTES * largest
    # Units use buffers in turn. On accelerators gathers and reductions run on streams of their own, and memory that one stream
    # has freed stays in that stream's pool: the pools add up. On gloo both share one pool, which is smaller.
    pools = [max((user.buffer_bytes() for user in users), default=0) for users in (gathers, reduces)]
    landing = [gather.landing_bytes() for gather in gathers]
    # Buffers for deltas and changed words: with overlap, those of all units are under way at once.
    memory["wire buffers"] = sum(pools) + (sum(landing) if setup.config.overlap else max(landing, default=0))
    traffic = total(reduce.hops(setup.micro_steps).total() for reduce in reduces)
    for unit, gather in zip(model.units, gathers, strict=False):  # no gathers where they stay FSDP2's
        times = gathers_per_step(setup.micro_steps, reshards_after_forward=unit.reshards)
        crossings = crossings_per_step(times, keeps_secondary=gather.keeps_secondary, trains=True)
        traffic.add(gather.hops(times, crossings).total())
    # Units count what one rank receives. All ranks receive equally, so a node receives N times that.
    traffic = traffic.times(setup.ranks_per_node)
    flat = _flat_bytes(_fsdp2_gathered_bytes(model, setup), setup) if stays_fsdp2 else {}
    line = Estimate(THIS_PACKAGE, memory, **flat, gathered=_gathered_at_once(model, setup))
    return line.plus(traffic.cross_node, traffic.intra_node)


# ---- The exchanges of one unit, by which the model of step times (unit_work.py) counts as well.


def two_hop_peers(node_size: int, setup: Setup) -> tuple[Peers, Peers]:
    """Return the peers of a node hop among ``node_size`` ranks, and of the cross hop between such groups."""
    # Rank 0 stands for all ranks: groups are regular, so each rank has as many peers on its node and elsewhere. Settings may
    # divide ranks in other groups than the true nodes. Bytes are within a node or across by the true ones.
    node_hop = Peers.among(range(node_size), 0, setup.ranks_per_node)
    return node_hop, Peers.among(range(0, setup.world_size, node_size), 0, setup.ranks_per_node)


def gathers_stay_fsdp2(setup: Setup, node_size: int) -> bool:
    """Return whether weight gathers stay FSDP2's own, where the settings take ``node_size`` ranks for a node."""
    hpz_size = resolve_hpz_size(setup.config.hpz_size, node_size, setup.world_size)
    # The question is the one that ``apply_zeropp`` asks, so the estimate cannot disagree with a run about it.
    return leaves_gathers_to_fsdp2(setup.config, hpz_size, setup.world_size)


class UnitGather:
    """The weight gathers of one unit: the cross hop, then the node hop over the ranks that share a secondary copy.

    Args:
        params: of the unit.
        setup: how it is trained.
        node_size: how many ranks the settings take for a node.
    """

    def __init__(self, params: Iterable[ParamShape], setup: Setup, node_size: int) -> None:
        hpz_size = resolve_hpz_size(setup.config.hpz_size, node_size, setup.world_size)
        self.keeps_secondary = hpz_size is not None
        # The ranks that share a copy take part in the node hop, or without copies those of a node.
        self.node_hop, self.cross_hop = two_hop_peers(hpz_size or node_size, setup)
        # bf16 is the compute dtype that is assumed throughout.
        self.layouts = gather_layouts(setup.settings, flat_shards(params, setup), torch.bfloat16, trains=True)
        # The backend's own all-gathers move weights in 16 bits within the node.
        self.is_native = self.layouts.is_native and self.node_hop.group_size > 1
        self.changes_bytes = changed_words_bytes(self.layouts, setup.share_of_changes)
        self._world_size = setup.world_size

    def secondary_bytes(self) -> int:
        """Return the bytes of the copy that a rank keeps."""
        return self.cross_hop.group_size * self.layouts.kept.nbytes if self.keeps_secondary else 0

    def buffer_bytes(self) -> int:
        """Return the bytes of wire buffers while the unit is gathered.

        The node hop receives the whole unit in wire form. Before it, the cross hop sends one slice. If no secondary shard is
        kept, it also needs a buffer of that size to receive in. A delta is taken of fp32 masters, on a GPU in one piece. Changed
        words are found in a copy of the slice, and encoded in as much room.
        """
        kept, delta = self.layouts.kept, self.layouts.delta
        received = self._world_size * kept.nbytes
        if self.is_native:  # the backend receives in FSDP2's own buffer
            received = 0 if self.layouts.holds_weights else self.cross_hop.group_size * self.layouts.node_bytes
        if delta is not None:
            return received + delta.nbytes + MASTER_BYTES * delta.numel
        if self.layouts.sends_changes:
            return received + 2 * kept.nbytes
        return received + ((0 if self.keeps_secondary else self.cross_hop.group_size) + 1) * kept.nbytes

    def landing_bytes(self) -> int:
        """Return the bytes of the buffers of one cross hop that changes a secondary shard, beside that shard."""
        if self.changes_bytes is not None:
            # One wire is sent, and kept until it has arrived.
            return (1 + self.cross_hop.group_size) * self.changes_bytes
        return 0 if self.layouts.delta is None else self.cross_hop.group_size * self.layouts.delta.nbytes

    def hops(self, gathers: int, crossings: int) -> HopBytes:
        """Return what one rank receives in so many gathers, of which some cross nodes."""
        return gather_bytes(
            self.layouts,
            cross_hop=self.cross_hop,
            node_hop=self.node_hop,
            gathers=gathers,
            crossings=crossings,
            changes_bytes=self.changes_bytes,
        )


class UnitReduce:
    """The gradient reductions of one unit: the node hop at every micro-step, the cross hop once per step.

    Args:
        params: of the unit.
        setup: how it is trained.
        node_size: how many ranks the settings take for a node.
    """

    def __init__(self, params: Iterable[ParamShape], setup: Setup, node_size: int) -> None:
        self.node_hop, self.cross_hop = two_hop_peers(node_size, setup)
        # The ranks that meet in a round are of different replicas, and so on different nodes.
        self._rounds = [Peers(0, factor - 1) for factor in prime_factors(setup.replicas)]
        # ``qgz_until`` is left out: the estimate is of a step in which gradients are quantized.
        quantizes = setup.settings.quantizes_gradients
        self.layouts = reduce_layouts(
            setup.settings, flat_shards(params, setup), setup.reduce_dtype, quantizes=quantizes
        )
        # The backend's own reduce-scatters run within the node.
        self.is_native = self.layouts.is_native and self.node_hop.group_size > 1
        self._setup = setup

    def accumulator_bytes(self) -> int:
        """Return the bytes of the gradients between micro-steps: full-size ones on the rank, or 1/N of their sums in the node."""
        setup, numel = self._setup, self.layouts.node_hop.numel
        if setup.micro_steps == 1:
            return 0
        if setup.config.accumulates_on_rank:
            return setup.reduce_dtype.itemsize * setup.world_size * numel
        return getattr(torch, setup.config.qgz_accumulator).itemsize * self.cross_hop.group_size * numel

    def buffer_bytes(self) -> int:
        """Return the bytes of wire buffers: both hops send and receive, and the node hop carries the whole unit.

        Partial sums in bf16 are added up in an fp32 copy. The copy is made when the node hop has ended, in the room of what was
        sent, or beyond it.
        """
        layouts, num_nodes = self.layouts, self.cross_hop.group_size
        sent = received = self._setup.world_size * layouts.node_hop.nbytes if self.node_hop.group_size > 1 else 0
        if self.is_native:  # the backend sends what FSDP2 has laid out, and leaves the sums over the node
            sent, received = 0, num_nodes * layouts.node_hop_bytes
        is_rounded = self._setup.config.qgz_accumulator == "bfloat16" and self._setup.micro_steps > 1
        copy = torch.float32.itemsize * num_nodes * layouts.node_hop.numel if is_rounded else 0
        # Rounds of replicas follow the cross hop. They send one slice, and receive one of each rank.
        wire = layouts.cross_hop.nbytes
        of_replicas = wire + layouts.replica_buffer_bytes([peers.group_size for peers in self._rounds])
        return received + max(sent, copy) + max(2 * num_nodes * wire, of_replicas)

    def hops(self, micro_steps: int) -> HopBytes:
        """Return what one rank receives in so many micro-steps."""
        times = reductions_per_step(micro_steps, accumulates_on_rank=self._setup.config.accumulates_on_rank)
        return reduce_bytes(
            self.layouts,
            cross_hop=self.cross_hop,
            node_hop=self.node_hop,
            micro_steps=times,
            replica_hops=total(received for _, received in self.replica_hops()),
        )

    def replica_hops(self) -> list[tuple[Peers, Bytes]]:
        """Return the peers and bytes of each hop that adds up replicas."""
        if self.layouts.replicas_add_whole([peers.group_size for peers in self._rounds]):
            replicas = Peers(0, self._setup.replicas - 1)
            return [(replicas, self.layouts.replica_bytes(self._rounds, replicas))]
        return [(peers, self.layouts.replica_bytes([peers], None)) for peers in self._rounds]


class FrozenGather:
    """The gathers of one frozen unit.

    Args:
        unit: its parameters are all frozen.
        ranks_per_node: the number of ranks over which the unit is sharded, N.
        packing: which of its weights are packed, and how; None where they stay in 16 bits.
    """

    def __init__(self, unit: UnitShape, ranks_per_node: int, packing: Packing | None) -> None:
        self.unit = unit
        self._num_ranks = ranks_per_node
        self._packing = packing
        self._packed = [param for param in unit.params if packing is not None and packing.packs(param)]

    def shard_bytes(self) -> int:
        """Return the bytes that each rank holds: the largest shard of the node, to which FSDP2 pads the others."""
        return sum(self._shard_bytes(param) for param in self.unit.params)

    def gathered_bytes(self) -> int:
        """Return the bytes of the unit while it is gathered. Packed weights stay packed."""
        return self._num_ranks * self.shard_bytes()

    def decoded_bytes(self) -> int:
        """Return the bytes of the largest weight that a layer decodes. Layers compute one after the other."""
        # A layer decodes its weight into new memory and frees it when it has computed, so one weight at a time counts.
        return HALF_BYTES * max((param.numel for param in self._packed), default=0)

    def decoding_bytes(self) -> int:
        """Return the bytes that decoding all packed weights reads and writes."""
        return sum(self._num_ranks * self._shard_bytes(param) + HALF_BYTES * param.numel for param in self._packed)

    def step_bytes(self, micro_steps: int) -> Bytes:
        """Return what one rank receives in a step."""
        # The same function counts the gathers of a run. Frozen weights have no secondary shard: their own shards lie in the
        # node already, and every gather is one over the node. All of its ranks receive equally.
        gathers = gathers_per_step(micro_steps, reshards_after_forward=self.unit.reshards)
        return Peers(self._num_ranks - 1, 0).bytes_in_ring(self.shard_bytes()).times(gathers)

    def _shard_bytes(self, param: ParamShape) -> int:
        # Norms, biases and small matrices stay in 16 bits beside packed weights, in the same unit.
        if self._packing is None or not self._packing.packs(param):
            return HALF_BYTES * param.padded_shard_numel(self._num_ranks)
        return self._packing.format.nbytes(param.padded_shard(self._num_ranks))


def flat_shards(params: Iterable[ParamShape], setup: Setup) -> list[ParamShard]:
    """Return a rank's shards of parameters as wire layouts take them. On rank 0 they have no padding of their own."""
    # The number of dimensions matters beside the size: 1-D parameters travel unquantized.
    sizes = ((param, param.padded_shard_numel(setup.world_size)) for param in params)
    return [ParamShard("", numel, numel, len(param.shape)) for param, numel in sizes]
