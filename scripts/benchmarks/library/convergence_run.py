"""One rank's training run in ``bench_convergence.py``: a small model on real text, with one variant and one seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed

from hf_zeropp import ZeroPPPlugin
from library.training_run import build_model
from library.variants import LOSS_VARIANTS, WHOLE_SHARD, Recipe


class ConvergenceRun:
    """A model that is trained from scratch on token files, which the driver wrote.

    Args:
        variant: a key of ``variants``.
        seed: sets the weights and the order of the text, the same for every variant.
        recipe: the settings that all runs share.
        train_file: tokens to train on, a ``.npy`` file of integers.
        validation_file: tokens on which the loss is measured.

    Attributes:
        variants: settings of the package by the variant's name; None leaves FSDP2's own communication.
    """

    variants = LOSS_VARIANTS

    def __init__(self, variant: str, seed: int, recipe: Recipe, train_file: str, validation_file: str) -> None:
        if variant == "unblocked":
            _share_one_scale()
        settings = self.variants[variant]
        self.recipe = recipe
        self.plugin = ZeroPPPlugin(
            zeropp=False if settings is None else settings,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=self.plugin)
        set_seed(seed)
        model = self._build_model(seed)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,  # the Trainer's default
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_at)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.schedule = schedule
        self.handle = self.plugin.handle_of(self.model)
        self.tokens = np.load(train_file, mmap_mode="r")
        self.validation = _sequences(np.load(validation_file), recipe)
        # A generator of the run's own, so that every variant sees the same batches, however it uses PyTorch's.
        self.random = np.random.default_rng([seed, dist.get_rank()])
        self.step = 0

    def train(self, steps: int) -> float:
        """Train for ``steps`` more steps, and return the mean training loss over them and over ranks."""
        losses = [self._train_step() for _ in range(steps)]
        return round(self._mean(torch.stack(losses).mean()), 5)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return a point of the run's curves: ``validation`` is the loss on the validation sequences of all ranks."""
        self.model.eval()
        losses = [self._loss(batch) for batch in self._validation().split(16)]
        self.model.train()
        return {"validation": round(self._mean(torch.stack(losses).mean()), 5)}

    def summary(self) -> dict[str, Any]:
        """Return further results of a run that has ended. Subclasses have some."""
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

    def _build_model(self, seed: int) -> torch.nn.Module:
        """Return the model as it begins. Subclasses begin from elsewhere."""
        return build_model(self.recipe.shape, seed)

    def _look_at_gradients(self) -> None:
        """Called with gradients that are reduced and not yet clipped. Subclasses measure them."""

    def _validation(self) -> torch.Tensor:
        """Return this rank's validation sequences: [sequences, seq_len]."""
        return self.validation[dist.get_rank() :: dist.get_world_size()]

    def _batch(self) -> torch.Tensor:
        """Return random windows of the training text: [batch_size, seq_len]."""
        length = self.recipe.seq_len
        starts = self.random.integers(len(self.tokens) - length, size=self.recipe.batch_size)
        return torch.from_numpy(np.stack([self.tokens[start : start + length] for start in starts]).astype(np.int64))

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the loss in fp32, from the logits.

        A loss that the model computes is an output, which FSDP2 casts to bf16: two or three digits would be left of it.
        """
        logits = self.model(input_ids=tokens).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _mean(self, value: torch.Tensor) -> float:
        """Return the mean over ranks."""
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()


def _sequences(tokens: np.ndarray, recipe: Recipe) -> torch.Tensor:
    wanted = recipe.num_validation * recipe.seq_len
    return torch.from_numpy(tokens[:wanted].astype(np.int64)).view(-1, recipe.seq_len)


def _share_one_scale() -> None:
    """Let all weights of a shard share one scale, and all gradients, with the reference kernels, which take any block."""
    from hf_zeropp import ops
    from hf_zeropp.fsdp import layouts
    from hf_zeropp.ops import format

    format.MAX_BLOCK = layouts.WEIGHT_BLOCK = layouts.GRAD_BLOCK = WHOLE_SHARD
    ops.set_kernels("reference")
