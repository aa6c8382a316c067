"""One rank's training run on real text, with one variant and one seed: losses, bytes, and weights that change."""

from __future__ import annotations

import re

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.tensor import DTensor

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.traffic import GATHER_CROSS, GATHER_RESYNC, REDUCE_CROSS
from library.text import TokenFiles
from library.training_run import build_model, windows
from library.variants import LOSS_VARIANTS, Recipe

ROOT_UNIT = "embeddings and head"
WHOLE_SHARD = 1 << 17
"""A block that holds a rank's whole shard of any parameter in the studies of loss, so that each shard has one scale."""


class TextRun:
    """A model that is trained on token files, which the driver wrote.

    Args:
        variant: a key of ``LOSS_VARIANTS``.
        seed: sets the order of the text, and without a checkpoint the weights, the same for every variant.
        recipe: the settings that all runs share.
        files: tokens to train on, and tokens on which the loss is measured.
        checkpoint: a file that ``save`` wrote, from which the run goes on; None begins from random weights.
    """

    def __init__(
        self, variant: str, seed: int, recipe: Recipe, files: TokenFiles, checkpoint: str | None = None
    ) -> None:
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
        model = build_model(recipe.shape, seed, checkpoint)
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
        self.tokens = np.load(files.train, mmap_mode="r")
        self.validation = _sequences(np.load(files.validation), recipe)
        # A generator of the run's own, so that every variant sees the same batches, however it uses PyTorch's.
        self.random = np.random.default_rng([seed, dist.get_rank()])
        self.step = 0
        # Kept from before the first forward pass: an evaluation leaves the root's weights whole, under the same names.
        self._shards = {name: param.detach() for name, param in self.model.named_parameters()}
        self._changed: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._sent: dict[str, float | None] = {"weights": None, "gradients": None}

    def train(self, steps: int) -> float:
        """Train for ``steps`` more steps, and return the mean training loss over them and over ranks."""
        self._changed, self._seen = {}, {}
        losses = [self._train_step() for _ in range(steps)]
        # The evaluation that follows sends the last step's weights, which belong to no step that is counted here.
        self._sent = self._shares_of_model()
        return round(self._mean(torch.stack(losses).mean()), 5)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the validation sequences of all ranks."""
        self.model.eval()
        own = self.validation[dist.get_rank() :: dist.get_world_size()]
        losses = [self._loss(batch) for batch in own.split(16)]
        self.model.train()
        return round(self._mean(torch.stack(losses).mean()), 5)

    def density(self) -> dict[str, float]:
        """Return the share of bf16 weights that changed in a step, by unit: the mean over the last ``train``."""
        shares = {}
        for unit, changed in self._changed.items():
            counts = torch.tensor([changed, self._seen[unit]])
            dist.all_reduce(counts)
            shares[unit] = round(counts[0].item() / counts[1].item(), 6)
        return shares

    def sent(self) -> dict[str, float | None]:
        """Return ``weights`` and ``gradients``: bytes across nodes per step, over M (Y-1)/Y; None for FSDP2's own.

        The first step is not in them, since it is the one that sends whole weights.
        """
        return dict(self._sent)

    def save(self, path: str) -> None:
        """Write the whole fp32 model to a file, as a checkpoint of later runs."""
        state = self.accelerator.get_state_dict(self.model)
        if dist.get_rank() == 0:
            torch.save(state, path)
        dist.barrier()

    def _train_step(self) -> torch.Tensor:
        before = self._words()
        if self.handle:
            self.handle.set_progress(self.step / self.recipe.steps)
        loss = self._loss(windows(self.tokens, self.random, self.recipe.batch_size, self.recipe.seq_len))
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.handle and self.step == 1:
            self.handle.traffic.reset()
        for name, words in self._words().items():
            unit = _unit_of(name)
            self._changed[unit] = self._changed.get(unit, 0) + int((words != before[name]).sum())
            self._seen[unit] = self._seen.get(unit, 0) + words.numel()
        return loss.detach()

    def _words(self) -> dict[str, torch.Tensor]:
        """Return the bits of this rank's weights in bf16, by parameter."""
        local = {
            name: shard.to_local() if isinstance(shard, DTensor) else shard for name, shard in self._shards.items()
        }
        return {name: shard.to(torch.bfloat16, copy=True).view(torch.int16) for name, shard in local.items()}

    def _shares_of_model(self) -> dict[str, float | None]:
        if self.handle is None:
            return {"weights": None, "gradients": None}
        traffic, nodes = self.handle.traffic, self.handle.topology.num_nodes
        whole = traffic.model_bytes * (nodes - 1) / nodes * max(traffic.steps, 1)

        def share(*collectives: str) -> float:
            counts = traffic.counts
            received = torch.tensor(sum(counts[name].cross_node for name in collectives if name in counts))
            dist.all_reduce(received)  # ranks receive different numbers of changed words
            return round(received.item() / nodes / whole, 5)

        return {"weights": share(GATHER_CROSS, GATHER_RESYNC), "gradients": share(REDUCE_CROSS)}

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


def _unit_of(name: str) -> str:
    layer = re.search(r"layers\.(\d+)\.", name)
    return f"layer {layer[1]}" if layer else ROOT_UNIT


def _share_one_scale() -> None:
    """Let all weights of a shard share one scale, and all gradients, with the reference kernels, which take any block."""
    from hf_zeropp import ops
    from hf_zeropp.fsdp import layouts
    from hf_zeropp.ops import format

    format.MAX_BLOCK = layouts.WEIGHT_BLOCK = layouts.GRAD_BLOCK = WHOLE_SHARD
    ops.set_kernels("reference")
