"""The configurations that studies compare: how ranks communicate, the model, and the recipe of a training run.

This module holds plain data and imports nothing heavy. A study reads it before it enters the sandbox, for its command
line, and sends parts of it to ranks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

OFF = {"qwz_bits": None, "hpz_size": None, "qgz_bits": None, "qgz_intra_bits": None}
"""Settings with everything off, to which a variant adds the one technique that it shows."""

PAPER = {"preset": "paper"}
DELTA = {"qwz_mode": "delta", "qwz_bits": 4}
DELTA_2 = DELTA | {"qwz_bits": 2}

LEARNING_RATE = 1e-4
"""The learning rate of AdamW in the studies of step times."""

WHOLE_SHARD = 1 << 17
"""A block that holds a rank's whole shard of any parameter in the loss studies, so that each shard has one scale."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the ranks of a step-time or generation study communicate.

    Attributes:
        name: in tables and on the command line.
        zeropp: settings of this package; None leaves FSDP2's own communication.
        fp32_reduce: reduce gradients in fp32 instead of bf16.
        hsdp: shard within the node and replicate over nodes, which Transformers recommends between nodes.
        silent: run no collective at all. The time that is left is that of the computation and of FSDP2's own copies.
        lora: train LoRA adapters on the linear layers of a frozen bf16 base, instead of the whole model.
    """

    name: str
    zeropp: dict[str, Any] | None = None
    fp32_reduce: bool = False
    hsdp: bool = False
    silent: bool = False
    lora: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("compute", silent=True),
        Variant("stock"),
        Variant("stock-fp32", fp32_reduce=True),
        Variant("hsdp", hsdp=True),
        Variant("qwz", OFF | {"qwz_bits": 8}),
        Variant("hpz", OFF | {"hpz_size": "node"}),
        Variant("qgz", OFF | {"qgz_bits": 4, "qgz_intra_bits": 8}),
        Variant("all", {}),
        # Fewer bits: see scripts/results/half_model.md.
        Variant("paper", PAPER),
        Variant("half-values", DELTA),
        Variant("exact", {"preset": "exact"}),
        Variant("pcie", {"preset": "pcie"}),
        Variant("half-values-hpz-8", DELTA | {"hpz_bits": 8}),
        Variant("three-eighths-values", DELTA_2),
        # The default without one of its parts: see scripts/results/overlap.md.
        Variant("blocking", {"overlap": False}),
        Variant("sockets", {"shared_memory": False}),
        Variant("blocking-sockets", {"overlap": False, "shared_memory": False}),
        Variant("lora-stock", lora=True),
        Variant("lora-16", {}, lora=True),
        Variant("lora-8", {"frozen_bits": 8}, lora=True),
        Variant("lora-4", {"frozen_bits": 4}, lora=True),
    )
}

LOSS_VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "qwz": OFF | {"qwz_bits": 8},
    "hpz": OFF | {"hpz_size": "node"},
    "qgz": OFF | {"qgz_bits": 4, "qgz_intra_bits": 8},
    "all": {},
    "all, qgz_until 0.5": {"qgz_until": 0.5},
    "unblocked": {},  # ``convergence_run.py`` changes the blocks
}
"""Settings in ``bench_convergence.py`` by the variant's name; None is FSDP2's own communication."""

HALF_MODEL_VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "paper": PAPER,
    # One setting changed in the paper's configuration. The first of these is the package's default.
    "int8-inside": PAPER | {"qgz_intra_bits": 8},
    "delta-4": PAPER | DELTA,
    "delta-2": PAPER | DELTA_2,
    # Several changed together, all with INT8 gradients inside the node.
    "half-values": DELTA,
    "half-values-hpz-8": DELTA | {"hpz_bits": 8},
    "three-eighths-values": DELTA_2,
}
"""Settings in ``bench_half_model.py`` by the variant's name; None is FSDP2's own communication."""

FINE_TUNING_VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    **{preset: {"preset": preset} for preset in ("balanced", "half_model", "min_traffic", "exact")},
    "exact, 3-bit gradients": {"preset": "exact", "qgz_bits": 3},
    "auto": {"qwz_mode": "auto"},
}
"""Settings in ``bench_fine_tuning.py`` by the variant's name; None is FSDP2's own communication."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-style model with random weights. The defaults make 21.4 M parameters."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    vocab_size: int = 2048


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings that all runs of a loss study share.

    Attributes:
        shape: the model's sizes.
        steps: optimizer steps.
        batch_size: sequences per rank and step.
        seq_len: tokens of a sequence.
        learning_rate: the highest of the schedule.
        warmup: fraction of the steps in which the learning rate rises.
        num_validation: sequences on which the loss is measured, over all ranks.
    """

    shape: ModelShape
    steps: int
    batch_size: int = 4
    seq_len: int = 128
    learning_rate: float = 2e-3
    warmup: float = 0.05
    num_validation: int = 64

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step over the highest: it rises linearly, then falls to a tenth as a cosine."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))


@dataclasses.dataclass(frozen=True)
class ProbedRecipe(Recipe):
    """Settings of runs whose communication errors are measured.

    Attributes:
        probe_steps: the number of last steps in which gradients are compared with exactly reduced ones.
        repeat: train and validate on the same sequences at every step. Gradients are then free of the noise of a random
            text, and show the errors of communication alone.
    """

    probe_steps: int = 100
    repeat: bool = False


@dataclasses.dataclass(frozen=True)
class ConstantRecipe(Recipe):
    """Settings of runs that go on from a checkpoint at one learning rate."""

    def rate_at(self, step: int) -> float:
        """Return 1: every step has the recipe's learning rate, the first one too."""
        return 1.0
