"""A training job whose step time is estimated: the model, how it is trained, and the cluster."""

from __future__ import annotations

import dataclasses

from hf_zeropp.estimate.cluster import Cluster
from hf_zeropp.estimate.model_shape import ModelShape, UnitShape
from hf_zeropp.estimate.setup import Setup
from hf_zeropp.estimate.unit_work import BACKWARD_FLOPS, FORWARD_FLOPS


@dataclasses.dataclass(frozen=True)
class Job:
    """One job on one cluster.

    Args:
        model: its units.
        setup: world, nodes, micro-steps and settings.
        cluster: of the same world and nodes.
        tokens: tokens per rank and micro-step.
        checkpointing: whether activations are recomputed in the backward pass, which costs one forward pass more.
        active: share of the parameters that a token meets; under 1 for mixtures of experts.

    Raises:
        ValueError: the cluster is another one than the setup's, or there are no tokens.
    """

    model: ModelShape
    setup: Setup
    cluster: Cluster
    tokens: int
    checkpointing: bool = False
    active: float = 1.0

    def __post_init__(self) -> None:
        ours, theirs = ((one.world_size, one.ranks_per_node) for one in (self.setup, self.cluster))
        if ours != theirs:
            raise ValueError(
                f"expected a cluster of {ours[0]} ranks, {ours[1]} per node, got one of {theirs[0]} ranks, {theirs[1]} per node"
            )
        if self.tokens < 1:
            raise ValueError(f"expected at least one token per rank and micro-step, got {self.tokens}")

    @property
    def model_flops(self) -> float:
        """Operations of one step on one rank, without recomputation: those that MFU counts."""
        return self.setup.micro_steps * sum(self._flops(unit, recomputes=False) for unit in self.ordered_units)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step on all ranks."""
        return self.tokens * self.setup.micro_steps * self.setup.world_size

    @property
    def ordered_units(self) -> tuple[UnitShape, ...]:
        """The units in the order of a forward pass: embeddings come first, whatever their place in the model's shape."""
        return forward_order(self.model.units)

    def forward_s(self, unit: UnitShape) -> float:
        """Return the seconds of one unit's forward pass."""
        numel = sum(param.numel for param in unit.params)
        return self.active * FORWARD_FLOPS * self.tokens * numel / self.cluster.device.flops

    def backward_s(self, unit: UnitShape) -> float:
        """Return the seconds of one unit's backward pass, with what is recomputed in it."""
        flops = self._flops(unit, recomputes=self.checkpointing)
        return flops / self.cluster.device.flops - self.forward_s(unit)

    def _flops(self, unit: UnitShape, *, recomputes: bool) -> float:
        everything = sum(param.numel for param in unit.params)
        trained = sum(param.numel for param in unit.trainable)
        # The backward pass takes gradients of inputs for all weights, and gradients of weights for the trained ones.
        passes = FORWARD_FLOPS * (1 + recomputes) + BACKWARD_FLOPS / 2
        return self.active * self.tokens * (passes * everything + BACKWARD_FLOPS / 2 * trained)


def forward_order(units: tuple[UnitShape, ...]) -> tuple[UnitShape, ...]:
    """Return units in the order in which a forward pass needs them."""
    return tuple(sorted(units, key=lambda unit: unit.name != "embeddings"))
