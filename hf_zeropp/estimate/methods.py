"""Memory per rank and bytes per step before anything is started: DDP, ZeRO-1/2/3, HSDP, hpZ, FSDP2 and this package.

Pure arithmetic: no process group, no weights. Two kinds of lines stand in one table.

The papers' methods (DDP, ZeRO-1/2/3, MiCS / HSDP, hpZ) are computed as the ZeRO paper does, arXiv 1910.02054 section 3:
16-bit parameters and gradients, and K bytes a parameter of optimizer states, the fp32 master weights among them (Adam:
K = 12). FSDP2 and this package are computed as they really hold it: the shard is the fp32 master itself, gradients are
kept in fp32 beside it. For Adam both come to 16 bytes a parameter.

Our line is exact where the model's parameters are known (a config or a path): padding, blocks, scales and 1-D
parameters are laid out as a run lays them out, and a test compares the result with what a run holds and sends. From a
parameter count alone it is that of a transformer of usual proportions.

Bytes per step are those that enter one node, from other nodes or within, all its ranks together: the least that any
algorithm can move, each byte of a gather once per node over the network. Flat rings move more: (W-1)/W where this
counts (Y-1)/Y. Nobody's activations are counted, nor the unit or two of full weights that every sharded method holds
for a moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from hf_zeropp.comm.topology import check_divides, resolve_hpz_size
from hf_zeropp.comm.two_hops import GatherLayouts, ReduceLayouts
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.model_shape import ModelShape, ParamShape, UnitShape
from hf_zeropp.fsdp.comm_object import gather_layouts, reduce_layouts
from hf_zeropp.fsdp.units import ParamShard
from hf_zeropp.traffic import Bytes, Peers

__all__ = ["Estimate", "ModelShape", "Setup", "estimate", "plot", "table", "to_json"]

KINDS = ("parameters", "gradients", "optimizer", "secondary", "accumulator", "residual", "frozen", "wire buffers")
MASTER_BYTES = 4
HALF_BYTES = 2
OPTIMIZER_STATE_BYTES = {"adamw": 8, "adamw-8bit": 2, "lion": 4, "sgd-momentum": 4, "sgd": 0, "adafactor": 0}
"""Bytes a parameter of an optimizer's states, without the master weights."""


# -------------------------------------------------------------------------------------------------------- how it is run


@dataclasses.dataclass(frozen=True)
class Setup:
    """Where and how a model is trained.

    Args:
        world_size: W.
        ranks_per_node: N.
        micro_steps: forward and backward passes per optimizer step.
        optimizer: a key of OPTIMIZER_STATE_BYTES.
        config: settings of this package; its own ``ranks_per_node`` is not read.
        fp32_reduce: FSDP2 and this package reduce gradients in fp32 instead of bf16.
    """

    world_size: int
    ranks_per_node: int
    micro_steps: int = 1
    optimizer: str = "adamw"
    config: ZeroPPConfig = dataclasses.field(default_factory=ZeroPPConfig)
    fp32_reduce: bool = False

    def __post_init__(self) -> None:
        check_divides(f"{self.ranks_per_node} ranks per node", self.ranks_per_node, self.world_size)
        if self.optimizer not in OPTIMIZER_STATE_BYTES:
            raise ValueError(f"expected an optimizer of {', '.join(OPTIMIZER_STATE_BYTES)}, got {self.optimizer!r}")
        if self.micro_steps < 1:
            raise ValueError(f"expected at least one micro-step per step, got {self.micro_steps}")

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def state_bytes(self) -> int:
        return OPTIMIZER_STATE_BYTES[self.optimizer]

    @property
    def reduce_dtype(self) -> torch.dtype:
        return torch.float32 if self.fp32_reduce else torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One method's memory per rank, by kind, and what enters one node per optimizer step, in bytes."""

    method: str
    memory: dict[str, float]
    cross_node: float
    intra_node: float

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "total": self.total}


def estimate(model: ModelShape, setup: Setup) -> list[Estimate]:
    """Every method, the papers' first and ours last."""
    return [*paper_methods(model, setup), fsdp2(model, setup), ours(model, setup)]


# -------------------------------------------------------------------------------------------------- the papers' methods


def paper_methods(model: ModelShape, setup: Setup) -> list[Estimate]:
    """DDP, ZeRO-1/2/3, MiCS / HSDP and hpZ, by the papers' formulas.

    Gradient accumulation is each method's best: DDP and ZeRO-1 communicate once per step, ZeRO-2 and -3 at every
    micro-step, HSDP across nodes once per step.
    """
    everything, trained = HALF_BYTES * model.num_params, HALF_BYTES * model.num_trainable
    world, node, steps = setup.world_size, setup.ranks_per_node, setup.micro_steps
    hsdp = _flat_bytes(trained, setup, times=2)  # an all-reduce of 1/N per rank across nodes: all of it per node
    within = Bytes(0, (node - 1) * (2 * everything + trained) * steps, 0)
    return [
        _paper("DDP", model, setup, (1, 1, 1), _flat_bytes(trained, setup, times=2)),
        _paper("ZeRO-1", model, setup, (1, 1, world), _flat_bytes(trained, setup, times=2)),
        _paper("ZeRO-2", model, setup, (1, world, world), _flat_bytes(trained, setup, times=1 + steps)),
        _paper("ZeRO-3", model, setup, (world,) * 3, _flat_bytes(2 * everything + trained, setup, times=steps)),
        _paper("MiCS / HSDP", model, setup, (node,) * 3, Bytes(0, within.intra_node, hsdp.cross_node)),
        _paper("hpZ", model, setup, (world,) * 3, _hpz_bytes(everything, trained, setup), everything / node),
    ]


def _paper(
    method: str,
    model: ModelShape,
    setup: Setup,
    parts: tuple[int, int, int],
    traffic: Bytes,
    secondary: float = 0.0,
) -> Estimate:
    """`parts`: over how many ranks parameters, gradients and optimizer states are spread."""
    trained, (of_params, of_gradients, of_optimizer) = model.num_trainable, parts
    memory = _memory(
        parameters=HALF_BYTES * trained / of_params,
        gradients=HALF_BYTES * trained / of_gradients,
        optimizer=(MASTER_BYTES + setup.state_bytes) * trained / of_optimizer,
        secondary=secondary,
        frozen=HALF_BYTES * (model.num_params - trained) / of_params,
    )
    return Estimate(method, memory, traffic.cross_node, traffic.intra_node)


def _flat_bytes(num_bytes: float, setup: Setup, times: int = 1) -> Bytes:
    """Gathers or reductions of `num_bytes` over the world: what must enter a node, and be spread within it."""
    outside = num_bytes * (setup.num_nodes - 1) / setup.num_nodes
    return Bytes(0, round((setup.ranks_per_node - 1) * num_bytes * times), round(outside * times))


def _hpz_bytes(everything: float, trained: float, setup: Setup) -> Bytes:
    """The paper's: the forward gather and the reduction cross nodes, the backward gather does not."""
    total = _flat_bytes(everything + trained, setup, times=setup.micro_steps)
    total.intra_node += round((setup.ranks_per_node - 1) * everything * setup.micro_steps)
    return total


def fsdp2(model: ModelShape, setup: Setup) -> Estimate:
    """Accelerate's FSDP2: unsynchronized micro-steps keep gradients in full, and reduce them once per step."""
    memory = _sharded_memory(model, setup)
    if setup.micro_steps > 1:
        memory["accumulator"] = setup.reduce_dtype.itemsize * model.num_trainable
    gathers = sum(
        HALF_BYTES * param.numel * setup.micro_steps * (2 if unit.reshards else 1)
        for unit in model.units
        for param in unit.params
    )
    traffic = _flat_bytes(gathers + setup.reduce_dtype.itemsize * model.num_trainable, setup)
    return Estimate("FSDP2", memory, traffic.cross_node, traffic.intra_node)


# ----------------------------------------------------------------------------------------------------------------- ours


def ours(model: ModelShape, setup: Setup) -> Estimate:
    """This package under `setup.config`, by the layouts a run would use."""
    if setup.num_nodes == 1:
        return dataclasses.replace(fsdp2(model, setup), method="this package")
    memory, traffic = _sharded_memory(model, setup), Bytes()
    gather, reduce = _Gather(setup), _Reduce(setup)
    for unit in model.units:
        memory["secondary"] += gather.secondary_bytes(unit)
        memory["accumulator"] += reduce.accumulator_bytes(unit)
        memory["residual"] += reduce.residual_bytes(unit)
        memory["wire buffers"] = max(memory["wire buffers"], gather.buffer_bytes(unit), reduce.buffer_bytes(unit))
        traffic.add(gather.step_bytes(unit))
        traffic.add(reduce.step_bytes(unit))
    ahead = [gather.ahead_bytes(unit) for unit in model.units]
    memory["wire buffers"] += sum(ahead) if setup.config.overlap else max(ahead, default=0)
    per_node = traffic.times(setup.ranks_per_node)
    return Estimate("this package", memory, per_node.cross_node, per_node.intra_node)


class _Gather:
    """Weight gathers: hop 1 over a cross group, hop 2 over the ranks that share a secondary copy."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        config = setup.config
        size = resolve_hpz_size(config.hpz_size, setup.ranks_per_node, setup.world_size)
        self._keeps = size is not None
        self._size = size or setup.ranks_per_node
        self._is_engine = config.qwz_bits is None and size in (None, setup.world_size)
        self._cross = _peers(range(0, setup.world_size, self._size), setup)
        self._node = _peers(range(self._size), setup)

    @property
    def _num_slices(self) -> int:
        return self._setup.world_size // self._size

    def secondary_bytes(self, unit: UnitShape) -> int:
        return 0 if self._is_engine or not self._keeps else self._num_slices * self._layouts(unit).kept.nbytes

    def buffer_bytes(self, unit: UnitShape) -> int:
        """Hop 2 receives the whole unit in wire form; so does hop 1, a secondary's worth, where none is kept. A delta is
        taken of fp32 masters, on a GPU in one piece."""
        if self._is_engine:
            return 0
        layouts = self._layouts(unit)
        received = self._setup.world_size * layouts.kept.nbytes
        if layouts.delta is not None:
            return received + layouts.delta.nbytes + MASTER_BYTES * layouts.delta.numel
        return received + ((0 if self._keeps else self._num_slices) + 1) * layouts.kept.nbytes

    def ahead_bytes(self, unit: UnitShape) -> int:
        """Deltas are received beside the secondary shard that they change; with overlap those of all units at once."""
        delta = None if self._is_engine else self._layouts(unit).delta
        return 0 if delta is None else self._num_slices * delta.nbytes

    def step_bytes(self, unit: UnitShape) -> Bytes:
        """What one rank receives. Frozen units are gathered across nodes once in a run, which rounds to nothing."""
        gathers = self._setup.micro_steps * (2 if unit.reshards else 1)
        if self._is_engine:
            num_bytes = HALF_BYTES * sum(param.numel for param in unit.params) * gathers
            return _per_rank(_flat_bytes(num_bytes, self._setup), self._setup)
        layouts = self._layouts(unit)
        hop1 = gathers if not self._keeps else 1 if unit.trainable else 0
        total = self._cross.bytes_of((layouts.delta or layouts.kept).nbytes).times(hop1)
        total.add(self._node.bytes_of(layouts.kept.nbytes * self._num_slices).times(gathers))
        return total

    def _layouts(self, unit: UnitShape) -> GatherLayouts:
        shards = _shards(unit.params, self._setup)
        return gather_layouts(self._setup.config, shards, torch.bfloat16, trains=bool(unit.trainable))


class _Reduce:
    """Gradient reductions: hop 1 within the node at every micro-step, hop 2 across nodes once per step."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        size, world = setup.ranks_per_node, setup.world_size
        self._node = _peers(range(size), setup)
        self._cross = _peers(range(0, world, size), setup)

    def accumulator_bytes(self, unit: UnitShape) -> int:
        """1/N of the unit in fp32, while micro-steps are accumulated."""
        if self._setup.micro_steps == 1:
            return 0
        numel = sum(param.padded_shard_numel(self._setup.world_size) for param in unit.trainable)
        return torch.float32.itemsize * self._setup.num_nodes * numel

    def residual_bytes(self, unit: UnitShape) -> int:
        """What hop 2 left out, 1/N of the unit in INT8."""
        residual = self._layouts(unit).residual
        return 0 if residual is None else self._setup.num_nodes * residual.nbytes

    def buffer_bytes(self, unit: UnitShape) -> int:
        """Both hops send and receive; hop 1 carries the whole unit each way."""
        layouts = self._layouts(unit)
        hop1 = 2 * self._setup.world_size * layouts.node.nbytes if self._setup.ranks_per_node > 1 else 0
        return hop1 + 2 * self._setup.num_nodes * layouts.cross.nbytes

    def step_bytes(self, unit: UnitShape) -> Bytes:
        layouts = self._layouts(unit)
        total = self._node.bytes_of(self._setup.num_nodes * layouts.node.nbytes).times(self._setup.micro_steps)
        total.add(self._cross.bytes_of(layouts.cross.nbytes))
        return total

    def _layouts(self, unit: UnitShape) -> ReduceLayouts:
        config = self._setup.config
        shards = _shards(unit.trainable, self._setup)
        return reduce_layouts(config, shards, self._setup.reduce_dtype, quantizes=config.quantizes_gradients)


def _shards(params: Iterable[ParamShape], setup: Setup) -> list[ParamShard]:
    """A rank's, of a unit's parameters, as its layouts see them."""
    sizes = ((param, param.padded_shard_numel(setup.world_size)) for param in params)
    return [ParamShard("", numel, numel, len(param.shape)) for param, numel in sizes]


def _peers(group: Iterable[int], setup: Setup) -> Peers:
    """Partners of rank 0 in a group that contains it; by symmetry those of every rank."""
    ranks = list(group)
    on_node = sum(rank < setup.ranks_per_node for rank in ranks)
    return Peers(on_node - 1, len(ranks) - on_node)


def _per_rank(node: Bytes, setup: Setup) -> Bytes:
    share = setup.ranks_per_node
    return Bytes(0, round(node.intra_node / share), round(node.cross_node / share))


def _sharded_memory(model: ModelShape, setup: Setup) -> dict[str, float]:
    """FSDP2's shards of the largest rank: fp32 weights, fp32 gradients, states; frozen weights in bf16."""
    world = setup.world_size
    trained = sum(param.padded_shard_numel(world) for unit in model.units for param in unit.trainable)
    total = sum(param.padded_shard_numel(world) for unit in model.units for param in unit.params)
    return _memory(
        parameters=MASTER_BYTES * trained,
        gradients=MASTER_BYTES * trained,
        optimizer=setup.state_bytes * trained,
        frozen=HALF_BYTES * (total - trained),
    )


def _memory(**kinds: float) -> dict[str, float]:
    return dict.fromkeys(KINDS, 0.0) | kinds


# ------------------------------------------------------------------------------------------------------------- shown


def table(estimates: list[Estimate], model: ModelShape, setup: Setup) -> Table:
    """GB of memory per rank by kind, and GB that enter a node per optimizer step."""
    title = (
        f"{model.name}: {_count(model.num_params)} parameters, {_count(model.num_trainable)} trained, "
        f"{setup.num_nodes} nodes x {setup.ranks_per_node} ranks, {setup.optimizer}, {setup.micro_steps} micro-steps"
    )
    result = Table(title=title, caption="GB (10^9 bytes) per rank; per node and step")
    kinds = [kind for kind in KINDS if any(one.memory[kind] for one in estimates)]
    result.add_column("method", no_wrap=True)
    for column in (*kinds, "total", "across nodes", "within node"):
        result.add_column(column, justify="right")
    for one in estimates:
        cells = (*(one.memory[kind] for kind in kinds), one.total, one.cross_node, one.intra_node)
        result.add_row(one.method, *map(_gigabytes, cells), style="bold" if one is estimates[-1] else None)
    return result


def to_json(estimates: list[Estimate], model: ModelShape, setup: Setup) -> dict[str, Any]:
    """Everything in bytes, with the question beside the answer."""
    return {
        "model": {"name": model.name, "parameters": model.num_params, "trainable": model.num_trainable},
        "setup": dataclasses.asdict(setup),
        "estimates": [one.to_dict() for one in estimates],
    }


def plot(estimates: list[Estimate], path: Path) -> None:
    """Two panels of bars: memory per rank by kind, and bytes across nodes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    methods = [one.method for one in reversed(estimates)]
    starts = [0.0] * len(methods)
    for kind in (kind for kind in KINDS if any(one.memory[kind] for one in estimates)):
        widths = [one.memory[kind] / 1e9 for one in reversed(estimates)]
        left.barh(methods, widths, left=starts, label=kind)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    right.barh(methods, [one.cross_node / 1e9 for one in reversed(estimates)], color="tab:gray")
    left.set_xlabel("memory, GB per rank")
    right.set_xlabel("across nodes, GB per node and step")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _count(number: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)


def _gigabytes(num_bytes: float) -> str:
    return "-" if num_bytes == 0 else f"{num_bytes / 1e9:.3g}" if num_bytes < 1e11 else f"{num_bytes / 1e9:.0f}"
