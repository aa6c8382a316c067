"""One rank's training run on real text, with one variant and one seed: losses, and errors that communication adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed

from hf_zeropp import ZeroPPPlugin
from library.error_probe import GradientProbe, weight_error
from library.training_run import build_model
from library.variants import LOSS_VARIANTS, ProbedRecipe, Recipe

WHOLE_SHARD = 1 << 17
"""A block that holds a rank's whole shard of any parameter in the studies of loss, so that each shard has one scale."""

SUM_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Numbers of steps for whose summed gradients an error is kept."""


class TextRun:
    """A model that is trained from scratch on token files, which the driver wrote.

    A run whose errors are measured is not changed by that: its losses are those of the same run without a probe.

    Args:
        variant: a key of ``LOSS_VARIANTS``.
        seed: sets the weights and the order of the text, the same for every variant.
        recipe: the settings that all runs share. With a ``ProbedRecipe`` errors are measured.
        train_file: tokens to train on, a ``.npy`` file of integers.
        validation_file: tokens on which the loss is measured.
    """

    def __init__(self, variant: str, seed: int, recipe: Recipe, train_file: str, validation_file: str) -> None:
        if variant == "unblocked":
            _share_one_scale()
        settings = LOSS_VARIANTS[variant]
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
        self._probe: GradientProbe | None = None
        self._traffic: float | None = None

    def train(self, steps: int) -> float:
        """Train for ``steps`` more steps, and return the mean training loss over them and over ranks.

        The first call also fixes the run's traffic. The first step is left out of it: with deltas, it is the one that
        sends whole weights.
        """
        losses = [self._train_step() for _ in range(steps)]
        if self.handle and self._is_probed and self._traffic is None:
            traffic, nodes = self.handle.traffic, self.handle.topology.num_nodes
            self._traffic = traffic.cross_node_bytes_per_step / (traffic.model_bytes * (nodes - 1) / nodes)
        return round(self._mean(torch.stack(losses).mean()), 5)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return a point of the run's curves.

        ``validation`` is the loss on the validation sequences of all ranks, ``weight_error`` see ``error_probe.py``.
        """
        self.model.eval()
        losses = [self._loss(batch) for batch in self._validation().split(16)]
        self.model.train()
        point = {"validation": round(self._mean(torch.stack(losses).mean()), 5)}
        return point | ({"weight_error": round(weight_error(self.model), 6)} if self._is_probed else {})

    def summary(self) -> dict[str, Any]:
        """Return further results of a run that has ended and whose errors were measured.

        Returns:
            ``traffic``: bytes that cross nodes per step over M (Y-1)/Y; None for FSDP2's own communication.
            ``gradient_error``: errors of summed gradients, and how many steps were summed for each.
        """
        if self._probe is None:
            return {}
        errors = self._probe.errors()
        counts = sorted({count for count in SUM_LENGTHS if count < len(errors)} | {len(errors)})
        sums = {count: round(errors[count - 1], 6) for count in counts}
        return {"traffic": self._traffic, "gradient_error": {"steps": list(sums), "error": list(sums.values())}}

    @property
    def _is_probed(self) -> bool:
        return isinstance(self.recipe, ProbedRecipe)

    def _train_step(self) -> torch.Tensor:
        if isinstance(self.recipe, ProbedRecipe) and self.recipe.steps - self.step == self.recipe.probe_steps:
            self._probe = GradientProbe(self.model)
        if self.handle:
            self.handle.set_progress(self.step / self.recipe.steps)
        loss = self._loss(self._batch())
        self.accelerator.backward(loss)
        if self._probe:
            self._probe.look()
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.handle and self.step == 1:
            self.handle.traffic.reset()  # the first step sends whole weights
        return loss.detach()

    def _build_model(self, seed: int) -> torch.nn.Module:
        """Return the model as it begins. Subclasses begin from elsewhere."""
        return build_model(self.recipe.shape, seed)

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
