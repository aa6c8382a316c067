"""One rank's training run of the convergence study (bench_convergence.py): real text, one variant, one seed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from training_run import OFF, ModelShape

from hf_zeropp import ZeroPPPlugin

WHOLE_SHARD = 1 << 17
"""A block that holds a rank's whole shard of any parameter of the model: one scale for each."""

VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "qwz": OFF | {"qwz_bits": 8},
    "hpz": OFF | {"hpz_size": "node"},
    "qgz": OFF | {"qgz_bits": 4, "qgz_intra_bits": 8},
    "all": {},
    "all, qgz_until 0.5": {"qgz_until": 0.5},
    "unblocked": {"weight_block": WHOLE_SHARD, "grad_block": WHOLE_SHARD},
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What all runs share. `batch_size`: sequences per rank and step."""

    shape: ModelShape
    steps: int
    batch_size: int = 4
    seq_len: int = 128
    learning_rate: float = 2e-3
    warmup: float = 0.05
    num_validation: int = 64

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        warmup = max(1, round(self.warmup * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))


class ConvergenceRun:
    """A model from scratch on token files that the driver wrote.

    Attributes:
        variants: settings by name; None for the stock engine. Other studies have others.
    """

    variants = VARIANTS

    def __init__(self, variant: str, seed: int, recipe: Recipe, train_file: str, validation_file: str) -> None:
        if variant == "unblocked":
            _allow_any_block()
        settings = self.variants[variant]
        self.recipe = recipe
        self.plugin = ZeroPPPlugin(
            zeropp=False if settings is None else settings,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=self.plugin)
        set_seed(seed)
        model = recipe.shape.build(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_at)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.schedule = schedule
        self.handle = self.plugin.handle_of(self.model)
        self.tokens = np.load(train_file, mmap_mode="r")
        self.validation = _sequences(np.load(validation_file), recipe)
        self.random = np.random.default_rng([seed, dist.get_rank()])  # the same batches for every variant
        self.step = 0

    def train(self, steps: int) -> float:
        """Some more steps; the mean training loss over them and over ranks."""
        losses = [self._train_step() for _ in range(steps)]
        return round(self._mean(torch.stack(losses).mean()), 5)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """A point of the curve: the loss on the validation sequences, each rank its part."""
        self.model.eval()
        losses = [self._loss(batch) for batch in self._validation().split(16)]
        self.model.train()
        return {"validation": round(self._mean(torch.stack(losses).mean()), 5)}

    def summary(self) -> dict[str, Any]:
        """What else is kept of the run."""
        return {}

    def _train_step(self) -> torch.Tensor:
        if self.handle:
            self.handle.set_progress(self.step / self.recipe.steps)
        loss = self._loss(self._batch())
        self.accelerator.backward(loss)
        self._look_at_gradients()
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def _look_at_gradients(self) -> None:
        """For studies that measure them: reduced, and not clipped yet."""

    def _validation(self) -> torch.Tensor:
        return self.validation[dist.get_rank() :: dist.get_world_size()]

    def _batch(self) -> torch.Tensor:
        """Random windows of the training text."""
        length = self.recipe.seq_len
        starts = self.random.integers(len(self.tokens) - length, size=self.recipe.batch_size)
        return torch.from_numpy(np.stack([self.tokens[start : start + length] for start in starts]).astype(np.int64))

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """In fp32, of the logits: a loss that leaves the model has two digits, FSDP2 casts outputs to bf16."""
        logits = self.model(input_ids=tokens).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _mean(self, value: torch.Tensor) -> float:
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()


def _sequences(tokens: np.ndarray, recipe: Recipe) -> torch.Tensor:
    wanted = recipe.num_validation * recipe.seq_len
    return torch.from_numpy(tokens[:wanted].astype(np.int64)).view(-1, recipe.seq_len)


def _allow_any_block() -> None:
    """The negative control: blocks beyond what the package allows, in the reference kernels, which take any."""
    import hf_zeropp.config
    import hf_zeropp.ops.format
    from hf_zeropp import ops

    hf_zeropp.format.MAX_BLOCK = hf_zeropp.config.MAX_BLOCK = WHOLE_SHARD
    ops.set_kernels("reference")
