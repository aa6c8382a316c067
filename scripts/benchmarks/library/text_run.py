"""One rank's training run on real text, with one variant and one seed: losses and bytes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.traffic import GATHER_CROSS, GATHER_RESYNC, REDUCE_CROSS
from library.text import TokenFiles, place_of
from library.training_run import build_model, windows, with_lora
from library.variants import LOSS_VARIANTS, NF4, Recipe

WHOLE_SHARD = 1 << 17
"""A block that holds a rank's whole shard of any parameter in the studies of loss, so that each shard has one scale."""
PROMPT = 32
"""Tokens that a preferred continuation and another one share."""
BETA = 0.1
"""DPO's factor (Rafailov et al., arXiv 2305.18290, equation 7), TRL's default."""
VALIDATION_BATCH = 16
BLOCK = 128
"""Gradients of a block in ``look``, as many as share a scale on the network."""
ANSWER = 40
"""Tokens of an answer in ``saved``."""


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
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="bf16", fsdp_plugin=None if variant == NF4 else self.plugin
        )
        set_seed(seed)
        model = in_nf4(recipe.model) if variant == NF4 else self._build_model(seed, checkpoint)
        self._objective = Preference(self._build_model(seed, checkpoint)) if recipe.preferences else NextToken()
        if recipe.adapters is not None:
            model = with_lora(model, recipe.adapters)
        optimizer = torch.optim.AdamW(
            [param for param in model.parameters() if param.requires_grad],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,  # the Trainer's default
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_at)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        # It stays in training mode for evaluations too, which changes nothing, since no model here has dropout. On a CPU
        # bitsandbytes (0.50.2) brings a weight into another form in a pass in evaluation mode, and its layers have no gradients
        # from then on.
        self.model.train()
        # Listed now: behind an evaluation the root's parameters are FSDP2's unsharded ones, whose memory goes in the next step.
        self._trained = [param for param in self.model.parameters() if param.requires_grad]
        self.handle = self.plugin.handle_of(self.model)
        text = getattr(files, recipe.text)
        self.tokens = np.load(text.train, mmap_mode="r")
        self._sequences = _sequences(np.load(text.validation), recipe)
        own = self._sequences[dist.get_rank() :: dist.get_world_size()]
        self.validation = [self._objective.batch(part) for part in own.split(VALIDATION_BATCH)]
        # A generator of the run's own, so that every variant sees the same batches, however it uses PyTorch's.
        self.random = np.random.default_rng([seed, dist.get_rank()])
        self._steps = 0

    def train(self, steps: int) -> None:
        """Train for ``steps`` more steps."""
        for _ in range(steps):
            self._train_step()

    def shares_of_model(self) -> dict[str, float | None]:
        """Return ``weights`` and ``gradients``: what crossed nodes since the first step.

        Both are bytes per step over M (Y-1)/Y; None for FSDP2's own. The first step of a run is the one that sends whole weights.
        """
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

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the validation sequences of all ranks."""
        losses = [self._objective.loss(self.model, batch) for batch in self.validation]
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

    def look(self) -> dict[str, float]:
        """Train one step, and return what it did to the bf16 words of the weights and what its gradients were.

        ``changed`` is the share of words that changed, ``zero_blocks`` the share of blocks of 128 gradients that are all zero.
        """
        before = [_local(param).bfloat16() for param in self._trained]
        self._train_step()
        counts = torch.zeros(4, dtype=torch.int64)  # words that changed, words, blocks that are zero, blocks
        for param, old in zip(self._trained, before, strict=True):
            changed, gradients = _local(param).bfloat16() != old, _local(param.grad).flatten()
            blocks = F.pad(gradients, (0, -len(gradients) % BLOCK)).view(-1, BLOCK)
            counts += torch.tensor([changed.sum(), changed.numel(), (~blocks.any(1)).sum(), len(blocks)])
        dist.all_reduce(counts)
        changed_words, words, zero_blocks, num_blocks = counts.tolist()
        return {"changed": changed_words / words, "zero_blocks": zero_blocks / num_blocks}

    @torch.no_grad()
    def saved(self, prompts: list[str]) -> dict[str, Any]:
        """Return what the weights are worth that a user saves, in bf16 on one process: a loss, and greedy answers to prompts."""
        state = self.accelerator.get_state_dict(self.model)
        found: dict[str, Any] = {}
        if dist.get_rank() == 0:
            threads = torch.get_num_threads()
            torch.set_num_threads(os.cpu_count() or 1)
            model = pretrained(self.recipe.model)
            model.load_state_dict(state)
            model.bfloat16().eval()
            rows = self._sequences.split(VALIDATION_BATCH)
            losses = torch.cat([-_log_probs(model, row) for row in rows])
            found = {"saved": round(losses.mean().item(), 6), "answers": answers(model, self.recipe.model, prompts)}
            torch.set_num_threads(threads)
        dist.barrier()
        return found

    def _build_model(self, seed: int, checkpoint: str | None) -> torch.nn.Module:
        if self.recipe.model is not None:
            return pretrained(self.recipe.model)
        return build_model(self.recipe.shape, seed, checkpoint)

    def _train_step(self) -> None:
        self.optimizer.zero_grad()
        batch = windows(self.tokens, self.random, self.recipe.batch_size, self.recipe.seq_len)
        loss = self._objective.loss(self.model, self._objective.batch(batch))
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self._steps += 1
        if self.handle and self._steps == 1:
            self.handle.traffic.reset()


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
        return -F.logsigmoid(BETA * (preferred - other)).mean()

    def _of_continuations(self, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return _log_probs(model, tokens)[:, PROMPT - 1 :].sum(dim=1)


def pretrained(model: str) -> torch.nn.Module:
    """Load a pretrained model in fp32, by its folder in the clone or its name."""
    return AutoModelForCausalLM.from_pretrained(place_of(model), dtype=torch.float32)


def in_nf4(model: str) -> torch.nn.Module:
    """Load a pretrained model as QLoRA does: its linear layers in bitsandbytes' NF4 with nested scales, the rest in bf16."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(place_of(model), dtype=torch.bfloat16, quantization_config=config)


def answers(model: torch.nn.Module, name: str, prompts: list[str]) -> list[str]:
    """Return what a model that follows instructions answers to each prompt, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(place_of(name))
    texts = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        out = model.generate(ids, do_sample=False, max_new_tokens=ANSWER, pad_token_id=tokenizer.eos_token_id)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _log_probs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first: [batch, length - 1]."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    targets = tokens[:, 1:]
    return -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


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
