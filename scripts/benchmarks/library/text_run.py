"""One rank's training run on real text, with one variant and one seed: losses and bytes."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.traffic import GATHER_CROSS, GATHER_RESYNC, REDUCE_CROSS
from library.text import TokenFiles, place_of
from library.training_run import build_model, windows, with_lora
from library.variants import LOSS_VARIANTS, Recipe

WHOLE_SHARD = 1 << 17
"""A block that holds a rank's whole shard of any parameter in the studies of loss, so that each shard has one scale."""
PROMPT = 32
"""Tokens that a preferred continuation and another one share."""
BETA = 0.1
"""DPO's factor (Rafailov et al., arXiv 2305.18290, equation 7), TRL's default."""
VALIDATION_BATCH = 16


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
        model = self._build_model(seed, checkpoint)
        self._objective = Preference(self._build_model(seed, checkpoint)) if recipe.preferences else NextToken()
        if recipe.adapters:
            model = with_lora(model)
        optimizer = torch.optim.AdamW(
            [param for param in model.parameters() if param.requires_grad],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,  # the Trainer's default
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_at)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.handle = self.plugin.handle_of(self.model)
        text = getattr(files, recipe.text)
        self.tokens = np.load(text.train, mmap_mode="r")
        own = _sequences(np.load(text.validation), recipe)[dist.get_rank() :: dist.get_world_size()]
        self.validation = [self._objective.batch(part) for part in own.split(VALIDATION_BATCH)]
        # A generator of the run's own, so that every variant sees the same batches, however it uses PyTorch's.
        self.random = np.random.default_rng([seed, dist.get_rank()])
        self._steps = 0

    def train(self, steps: int) -> dict[str, float | None]:
        """Train for ``steps`` more steps, and return ``weights`` and ``gradients``: what crossed nodes since the first step.

        Both are bytes per step over M (Y-1)/Y; None for FSDP2's own. The first step of a run is the one that sends whole weights.
        An evaluation sends the weights of the step before it, which belong to no step that is counted here.
        """
        for _ in range(steps):
            self._train_step()
        return self._shares_of_model()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the validation sequences of all ranks."""
        self.model.eval()
        losses = [self._objective.loss(self.model, batch) for batch in self.validation]
        self.model.train()
        loss = torch.stack(losses).mean()
        dist.all_reduce(loss)
        return round(loss.item() / dist.get_world_size(), 6)

    def save(self, path: str) -> None:
        """Write the whole fp32 model to a file, as a checkpoint of later runs."""
        state = self.accelerator.get_state_dict(self.model)
        if dist.get_rank() == 0:
            torch.save(state, path + ".partial")
            os.replace(path + ".partial", path)
        dist.barrier()

    def _build_model(self, seed: int, checkpoint: str | None) -> torch.nn.Module:
        if self.recipe.model is not None:
            return pretrained(self.recipe.model)
        return build_model(self.recipe.shape, seed, checkpoint)

    def _train_step(self) -> None:
        batch = windows(self.tokens, self.random, self.recipe.batch_size, self.recipe.seq_len)
        loss = self._objective.loss(self.model, self._objective.batch(batch))
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self._steps += 1
        if self.handle and self._steps == 1:
            self.handle.traffic.reset()

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


class NextToken:
    """Language modelling. A batch is the tokens [batch, length]."""

    def batch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the batch of these sequences."""
        return tokens

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token.

        It is computed in fp32, from the logits. A loss that the model computes is an output, which FSDP2 casts to bf16: two or
        three digits would be left of it.
        """
        return -_log_probs(model, batch).mean()


class Preference:
    """DPO: the text's own continuations are preferred to those of the sequence before them in the batch.

    A batch is the tokens [2 * batch, length], preferred ones first, and their log-probabilities under the reference.

    Args:
        reference: the model before training, whole on each rank.
    """

    def __init__(self, reference: torch.nn.Module) -> None:
        self._reference = reference

    @torch.no_grad()
    def batch(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of these sequences."""
        others = torch.cat([tokens[:, :PROMPT], tokens.roll(1, dims=0)[:, PROMPT:]], dim=1)
        pairs = torch.cat([tokens, others])
        with torch.autocast("cpu", torch.bfloat16):
            return pairs, self._of_continuations(self._reference, pairs)

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of the pairs."""
        pairs, reference = batch
        preferred, other = (self._of_continuations(model, pairs) - reference).chunk(2)
        return -torch.nn.functional.logsigmoid(BETA * (preferred - other)).mean()

    def _of_continuations(self, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return _log_probs(model, tokens)[:, PROMPT - 1 :].sum(dim=1)


def pretrained(model: str) -> torch.nn.Module:
    """Load a pretrained model in fp32, by its folder in the clone or its name."""
    return AutoModelForCausalLM.from_pretrained(place_of(model), dtype=torch.float32)


def _log_probs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first: [batch, length - 1]."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    targets = tokens[:, 1:]
    return -torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )


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
