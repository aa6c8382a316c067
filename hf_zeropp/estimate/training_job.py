"""The job that is estimated: how a model is trained (``Setup``), on which cluster and with how many tokens (``Job``)."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from hf_zeropp.comm.topology import check_divides
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.estimate.cluster import Cluster
from hf_zeropp.estimate.model_shape import ModelShape, UnitShape

OPTIMIZER_STATE_BYTES = {
    "adamw": 8,
    "adamw-8bit": 2,
    "lion": 4,
    "muon": 4,
    "sgd-momentum": 4,
    "sgd": 0,
    "adafactor": 0,
}
"""Bytes per parameter of an optimizer's states, without the master. For Muon those of its matrices; of embeddings it keeps 8."""

ASSUMED_LEARNING_RATE = 1e-5
"""That of fine-tuning, where none is given."""

FORWARD_FLOPS = 2
"""Operations per weight and token of a forward pass: one multiplication and one addition."""

BACKWARD_FLOPS = 4
"""The same of a backward pass: gradients of inputs, and gradients of weights. Frozen weights need the first alone."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The job that is estimated: the ranks over which the model is sharded, their nodes, and how the model is trained.

    Args:
        world_size: W, the ranks of the job, or with replicas those of one.
        ranks_per_node: N.
        micro_steps: forward and backward passes per optimizer step.
        optimizer: a key of ``OPTIMIZER_STATE_BYTES``.
        config: settings of this package, as a user writes them. Their own ``ranks_per_node`` is not read.
        fp32_reduce: whether FSDP2 and this package reduce gradients in fp32 instead of bf16.
        tensor_parallel: neighbouring ranks of a node that cut every layer between them. Each of them shards its part over the
            ranks of the same place among their neighbours.
        replicas: of the model (HSDP), each over nodes of its own. Their gradients are averaged.
        learning_rate: of AdamW. How many weights change in a step depends on it (``qwz_mode="exact"``). None where it is unknown;
            ``ASSUMED_LEARNING_RATE`` is taken then.
        on_cpu: whether ranks compute on CPUs. Settings that say ``"auto"`` depend on it.

    Raises:
        ValueError: the nodes do not divide the world, the tensor-parallel ranks do not divide the node, the optimizer is
            unknown, there is no micro-step, or the learning rate is not above zero.
    """

    world_size: int
    ranks_per_node: int
    micro_steps: int = 1
    optimizer: str = "adamw"
    config: ZeroPPConfig = dataclasses.field(default_factory=ZeroPPConfig)
    fp32_reduce: bool = False
    tensor_parallel: int = 1
    replicas: int = 1
    learning_rate: float | None = None
    on_cpu: bool = False

    def __post_init__(self) -> None:
        check_divides(f"{self.ranks_per_node} ranks per node", self.ranks_per_node, self.world_size)
        if self.tensor_parallel < 1 or self.ranks_per_node % self.tensor_parallel:
            raise ValueError(
                f"expected tensor-parallel ranks that divide the {self.ranks_per_node} ranks of a node, got "
                f"{self.tensor_parallel}. Across nodes tensor parallelism would send activations in every layer."
            )
        if self.optimizer not in OPTIMIZER_STATE_BYTES:
            raise ValueError(f"expected an optimizer of {', '.join(OPTIMIZER_STATE_BYTES)}, got {self.optimizer!r}")
        if self.micro_steps < 1:
            raise ValueError(f"expected at least one micro-step per step, got {self.micro_steps}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(f"expected a learning rate above zero, such as 1e-5, got {self.learning_rate}")

    def in_replicas(self, replicas: int) -> Setup:
        """Return the same ranks as so many replicas of the model.

        Raises:
            ValueError: they do not divide the nodes.
        """
        nodes = self.num_nodes * self.replicas
        if replicas < 1 or nodes % replicas:
            raise ValueError(
                f"expected replicas that divide the {nodes} nodes, got {replicas}. Divisors: "
                f"{[number for number in range(1, nodes + 1) if nodes % number == 0]}."
            )
        world_size = nodes * self.ranks_per_node // replicas
        return dataclasses.replace(self, world_size=world_size, replicas=replicas)

    @property
    def numbers_of_replicas(self) -> list[int]:
        """How many replicas of several nodes each the ranks can be divided in, 1 among them."""
        nodes = self.num_nodes * self.replicas
        return [number for number in range(1, nodes) if nodes % number == 0] or [1]

    @property
    def of_hsdp(self) -> Setup:
        """The replicas of stock HSDP: as many as here, or where there is one, a replica on each node."""
        return self if self.replicas > 1 else self.in_replicas(self.num_nodes)

    @functools.cached_property
    def settings(self) -> ZeroPPConfig:
        """The settings as they are in force on these ranks."""
        size = self.config.hpz_size
        spans_nodes = isinstance(size, int) and size > self.ranks_per_node
        return self.config.resolve_node_bits(on_cpu=self.on_cpu, copies_span_nodes=spans_nodes)

    @property
    def rate(self) -> float:
        """The learning rate, or what is assumed for it."""
        return ASSUMED_LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def share_of_changes(self) -> float:
        """The share of bf16 weights whose value changes in a step of AdamW at the learning rate."""
        # Fitted to the six rates from 1e-6 to 1e-3 of scripts/results/exact.md, each within 5 %: 0.07 at 1e-5.
        return 1 / (1 + (2.2e-4 / self.rate) ** 0.838)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, Y, or with replicas those of one."""
        return self.world_size // self.ranks_per_node

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of the optimizer's states, without the master."""
        return OPTIMIZER_STATE_BYTES[self.optimizer]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 and this package reduce gradients."""
        return torch.float32 if self.fp32_reduce else torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Job:
    """One job on one cluster.

    Args:
        model: its units.
        setup: world, nodes, micro-steps and settings.
        cluster: of the same world and nodes.
        tokens: tokens per rank and micro-step.
        checkpointing: whether activations are recomputed in the backward pass, which costs one forward pass more.

    Raises:
        ValueError: the cluster is another one than the setup's, or there are no tokens.
    """

    model: ModelShape
    setup: Setup
    cluster: Cluster
    tokens: int
    checkpointing: bool = False

    def __post_init__(self) -> None:
        ours, theirs = ((one.world_size, one.ranks_per_node) for one in (self.setup.in_replicas(1), self.cluster))
        if ours != theirs:
            raise ValueError(
                f"expected a cluster of {ours[0]} ranks, {ours[1]} per node, got one of {theirs[0]} ranks, {theirs[1]} per node"
            )
        # The cluster says on what ranks compute.
        object.__setattr__(self, "setup", dataclasses.replace(self.setup, on_cpu=self.cluster.backend == "gloo"))
        if self.tokens < 1:
            raise ValueError(f"expected at least one token per rank and micro-step, got {self.tokens}")

    def in_replicas(self, replicas: int) -> Job:
        """Return the same job with so many replicas of the model."""
        return dataclasses.replace(self, setup=self.setup.in_replicas(replicas))

    @property
    def model_flops(self) -> float:
        """Operations of one step on one rank, without recomputation: those that MFU counts."""
        return self.setup.micro_steps * sum(self._flops(unit, recomputes=False) for unit in self.model.units)

    def forward_s(self, unit: UnitShape) -> float:
        """Return the seconds of one unit's forward pass."""
        return self.model.active * FORWARD_FLOPS * self.tokens * unit.numel / self.cluster.device.flops

    def backward_s(self, unit: UnitShape) -> float:
        """Return the seconds of one unit's backward pass, with what is recomputed in it."""
        flops = self._flops(unit, recomputes=self.checkpointing)
        return flops / self.cluster.device.flops - self.forward_s(unit)

    def _flops(self, unit: UnitShape, *, recomputes: bool) -> float:
        trained = sum(param.numel for param in unit.trainable)
        # The backward pass takes gradients of inputs for all weights, and gradients of weights for the trained ones.
        passes = FORWARD_FLOPS * (1 + recomputes) + BACKWARD_FLOPS / 2
        return self.model.active * self.tokens * (passes * unit.numel + BACKWARD_FLOPS / 2 * trained)
