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
    """The ranks over which the model is sharded, their nodes, and how the model is trained.

    Args:
        world_size: W.
        ranks_per_node: N.
        micro_steps: forward and backward passes per optimizer step.
        optimizer: a key of ``OPTIMIZER_STATE_BYTES``.
        config: settings of this package, as a user writes them.
        fp32_reduce: whether FSDP2 and this package reduce gradients in fp32 instead of bf16.
        learning_rate: of AdamW. How many weights change in a step depends on it (``qwz_mode="exact"``).
        on_cpu: whether ranks compute on CPUs. Settings that say ``"auto"`` depend on it.

    Raises:
        ValueError: the nodes do not divide the world, or the learning rate is not above zero.
    """

    world_size: int
    ranks_per_node: int
    micro_steps: int = 1
    optimizer: str = "adamw"
    config: ZeroPPConfig = dataclasses.field(default_factory=ZeroPPConfig)
    fp32_reduce: bool = False
    learning_rate: float = ASSUMED_LEARNING_RATE
    on_cpu: bool = False

    def __post_init__(self) -> None:
        for size in (self.ranks_per_node, self.group_size):
            check_divides(f"{size} ranks per node", size, self.world_size)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"expected a learning rate above zero, such as 1e-5, got {self.learning_rate}")

    @functools.cached_property
    def settings(self) -> ZeroPPConfig:
        """The settings as they are in force on these ranks."""
        size = self.config.hpz_size
        spans_nodes = isinstance(size, int) and size > self.group_size
        return self.config.resolve_node_bits(on_cpu=self.on_cpu, copies_span_nodes=spans_nodes)

    @property
    def group_size(self) -> int:
        """How many ranks this package takes for a node: N, unless the settings say otherwise (preset ``pcie``)."""
        return self.config.ranks_per_node if isinstance(self.config.ranks_per_node, int) else self.ranks_per_node

    @property
    def share_of_changes(self) -> float:
        """The share of bf16 weights whose value changes in a step of AdamW at the learning rate."""
        # Fitted to the six rates from 1e-6 to 1e-3 of scripts/results/exact.md, each within 5 %: 0.07 at 1e-5.
        return 1 / (1 + (2.2e-4 / self.learning_rate) ** 0.838)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, Y."""
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
        setup: micro-steps and settings. Its ranks are those of the cluster, which says on what they compute.
        cluster: of the same world and nodes.
        tokens: tokens per rank and micro-step.
        checkpointing: whether activations are recomputed in the backward pass, which costs one forward pass more.
    """

    model: ModelShape
    setup: Setup
    cluster: Cluster
    tokens: int
    checkpointing: bool = False

    def __post_init__(self) -> None:
        ours, theirs = ((one.world_size, one.ranks_per_node) for one in (self.setup, self.cluster))
        assert ours == theirs, f"a setup of {ours} ranks in all and per node, and a cluster of {theirs}"
        object.__setattr__(self, "setup", dataclasses.replace(self.setup, on_cpu=self.cluster.backend == "gloo"))

    @property
    def model_flops(self) -> float:
        """Operations of one step on one rank, without recomputation: those that MFU counts."""
        return self.setup.micro_steps * sum(self._flops(unit, recomputes=False) for unit in self.model.units)

    def seconds(self, unit: UnitShape) -> tuple[float, float]:
        """Return the seconds of one unit's forward pass, and of its backward pass with what is recomputed in it."""
        forward_s = self.model.active * FORWARD_FLOPS * self.tokens * unit.numel / self.cluster.device.flops
        return forward_s, self._flops(unit, recomputes=self.checkpointing) / self.cluster.device.flops - forward_s

    def _flops(self, unit: UnitShape, *, recomputes: bool) -> float:
        trained = sum(param.numel for param in unit.trainable)
        # The backward pass takes gradients of inputs for all weights, and gradients of weights for the trained ones.
        passes = FORWARD_FLOPS * (1 + recomputes) + BACKWARD_FLOPS / 2
        return self.model.active * self.tokens * (passes * unit.numel + BACKWARD_FLOPS / 2 * trained)
