"""The configurations that studies compare: how ranks communicate, the model, and the recipe of a training run.

This module holds plain data and imports nothing heavy. A study reads it before it enters the sandbox, for its command
line, and sends parts of it to ranks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

OFF = {"qwz_bits": None, "hpz_size": None, "qgz_bits": None, "qgz_intra_bits": None}
"""Settings with everything off, to which a variant adds the one technique that it shows."""

QWZ, HPZ, QGZ = OFF | {"qwz_bits": 8}, OFF | {"hpz_size": "node"}, OFF | {"qgz_bits": 4, "qgz_intra_bits": 8}
PRESETS = {name: {"preset": name} for name in ("balanced", "half_model", "min_traffic", "exact", "pcie", "paper")}
"""Settings of each preset, by its name in README.md."""

LEARNING_RATE = 1e-4
"""The learning rate of AdamW in the studies of step times."""

SHOWN = {
    "compute": "no communication",
    "compute, kept": "no communication, keeps weights",
    "balanced, kept": "balanced that keeps weights",
    "exact, kept": "exact that keeps weights",
    "unquantized, kept": "unquantized, keeps weights",
    "stock": "stock FSDP2",
    "stock-fp32": "stock FSDP2, fp32 reduction",
    "keep": "FSDP2 that keeps weights",
    "node": "FSDP2, backward in nodes",
    "hsdp": "HSDP",
    "deepspeed": "DeepSpeed ZeRO-3",
    "deepspeed-hpz": "DeepSpeed, hpZ",
    "deepspeed-once": "DeepSpeed, reduces once",
    "qwz": "qwZ alone",
    "hpz": "hpZ alone",
    "qgz": "qgZ alone",
    "blocking": "balanced without overlap",
    "sockets": "balanced without shared memory",
    "blocking-sockets": "balanced without both",
    "unblocked": "one scale per shard",
    "lora-stock": "LoRA, stock FSDP2",
    "lora-hsdp": "LoRA, HSDP",
    "lora-16": "LoRA, 16-bit base",
    "lora-8": "LoRA, 8-bit base",
    "lora-4": "LoRA, 4-bit base",
    "lora-nf4": "LoRA, NF4 base, DDP",
}
"""Names in tables and plots, where they differ from those on the command line."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the ranks of a step-time or generation study communicate.

    Attributes:
        name: in tables and on the command line.
        zeropp: settings of this package; None leaves FSDP2's own communication.
        fp32_reduce: reduce gradients in fp32 instead of bf16.
        replicas: replicate over so many groups of nodes, and shard within each of them (HSDP). ``"nodes"`` replicates over
            nodes, which Transformers recommends between nodes.
        keeps_weights: let FSDP2 gather weights once a step, and keep them and full-size gradients until the last micro-step
            (``set_reshard_after_forward``, ``set_reshard_after_backward`` and ``set_requires_gradient_sync``).
        gathers_in_node: keep weights of 1/N after the forward pass, and gather those of the backward pass within nodes
            (``reshard_after_forward=N``).
        deepspeed: train with DeepSpeed's ZeRO-3 in place of FSDP2, with these settings of its ``zero_optimization``. Needs the
            package deepspeed.
        coalesces: let DeepSpeed reduce gradients once per step (``coalesce_grad_reduction``), and not in every micro-step.
        silent: run no collective at all. The time that is left is that of the computation and of FSDP2's own copies.
        lora: train LoRA adapters on the linear layers of a frozen bf16 base, instead of the whole model.
    """

    name: str
    zeropp: dict[str, Any] | None = None
    fp32_reduce: bool = False
    replicas: int | Literal["nodes"] = 1
    keeps_weights: bool = False
    gathers_in_node: bool = False
    deepspeed: dict[str, Any] | None = None
    coalesces: bool = False
    silent: bool = False
    lora: bool = False

    @property
    def gathers_once(self) -> bool:
        """Whether weights are gathered once a step and stay until its last micro-step."""
        return self.keeps_weights or (self.zeropp or {}).get("qgz_accumulate") == "whole"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("compute", silent=True),
        Variant("compute, kept", silent=True, keeps_weights=True),
        Variant("stock"),
        Variant("stock-fp32", fp32_reduce=True),
        Variant("keep", keeps_weights=True),
        Variant("node", gathers_in_node=True),
        Variant("hsdp", replicas="nodes"),
        Variant("hsdp, 2 replicas", replicas=2),
        Variant("deepspeed", deepspeed={}),
        Variant("deepspeed-hpz", deepspeed={"zero_hpz_partition_size": 2}),
        Variant("deepspeed-once", deepspeed={"zero_hpz_partition_size": 2}, coalesces=True),
        Variant("qwz", QWZ),
        Variant("hpz", HPZ),
        Variant("qgz", QGZ),
        *(Variant(name, settings) for name, settings in PRESETS.items()),
        Variant("balanced, kept", PRESETS["balanced"] | {"qgz_accumulate": "whole"}),
        Variant("exact, kept", PRESETS["exact"] | {"qgz_accumulate": "whole"}),
        Variant("unquantized, kept", OFF | {"qgz_accumulate": "whole"}),
        Variant("balanced, 2 replicas", PRESETS["balanced"], replicas=2),
        Variant("exact, 3-bit gradients", {"preset": "exact", "qgz_bits": 3}),
        # The default without one of its parts: see scripts/results/overlap.md.
        Variant("blocking", {"overlap": False}),
        Variant("sockets", {"shared_memory": False}),
        Variant("blocking-sockets", {"overlap": False, "shared_memory": False}),
        Variant("lora-stock", lora=True),
        Variant("lora-hsdp", replicas="nodes", lora=True),
        Variant("lora-16", {}, lora=True),
        Variant("lora-8", {"frozen_bits": 8}, lora=True),
        Variant("lora-4", {"frozen_bits": 4}, lora=True),
    )
}

NF4 = "lora-nf4"
"""LoRA on a base in bitsandbytes' NF4 with nested scales, which FSDP2 cannot shard here: each rank holds all of it, under DDP."""

LOSS_VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    **PRESETS,
    "exact, 3-bit gradients": VARIANTS["exact, 3-bit gradients"].zeropp,
    "balanced, native node hops": {"qwz_intra_bits": None, "qgz_intra_bits": None},
    "unblocked": {},  # ``text_run.py`` changes the blocks
    "lora-stock": None,
    "lora-8": {"frozen_bits": 8},
    "lora-4": {"frozen_bits": 4},
    NF4: None,
    **{f"lora-4, {name}": {"preset": name, "frozen_bits": 4} for name in ("half_model", "min_traffic", "exact")},
}
"""Settings in the study of losses by the variant's name; None is FSDP2's own communication."""


def shown(name: str) -> str:
    """Return the name of a variant in tables and plots. What follows a comma, such as a setting that differs, stays."""
    if name in SHOWN:
        return SHOWN[name]
    variant, comma, rest = name.partition(", ")
    return SHOWN.get(variant, variant) + comma + rest


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-style model with random weights. The defaults make 21.4 M parameters."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    vocab_size: int = 2048

    @property
    def num_parameters(self) -> int:
        """The number of weights, embeddings and norms included."""
        hidden = self.hidden_size
        block = 4 * hidden**2 + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.num_hidden_layers * block + 2 * self.vocab_size * hidden + hidden


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings that runs of a loss study share.

    Attributes:
        shape: the model's sizes.
        steps: optimizer steps.
        batch_size: sequences per rank and step.
        seq_len: tokens of a sequence.
        learning_rate: the highest of the schedule.
        warmup: fraction of the steps in which the learning rate rises; None keeps it constant.
        num_validation: sequences on which the loss is measured, over all ranks.
        text: what is trained on, a field of ``TokenFiles``.
        adapters: the rank of LoRA adapters that are trained on a frozen base; None trains the whole model.
        preferences: learn by DPO to prefer the text's own continuations to those of other places.
        model: a pretrained model, which is trained in place of one of ``shape``: a folder in the clone, or a name that
            ``from_pretrained`` takes. The text is then the docstrings of PyTorch.
    """

    shape: ModelShape
    steps: int
    batch_size: int = 4
    seq_len: int = 128
    learning_rate: float = 2e-3
    warmup: float | None = 0.05
    num_validation: int = 64
    text: Literal["code", "documentation"] = "code"
    adapters: int | None = None
    preferences: bool = False
    model: str | None = None

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step over the highest: it rises linearly, then falls to a tenth as a cosine."""
        if self.warmup is None:
            return 1.0
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))
