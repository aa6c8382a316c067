"""A small Llama that one process trains on the source text of Python's standard library, for studies without a cluster.

Compute is in bf16 and masters are in fp32, as on ranks. A study trains a checkpoint first, and goes on from it once for
everything that it compares, with the same batches.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from library.text import write_tokens
from library.training_run import build_model, windows
from library.variants import ModelShape


def add_flags(parser: argparse.ArgumentParser, hidden_size: int, layers: int, pretraining: int) -> None:
    """Add the flags of the model and of its checkpoint, with their defaults."""
    parser.add_argument("--hidden-size", type=int, default=hidden_size)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--pretraining", type=int, default=pretraining, help="steps before the checkpoint")


class Text:
    """Random windows of the training text."""

    def __init__(self, vocab_size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._tokens = np.load(write_tokens(Path(folder), vocab_size).code.train)
        self._random = np.random.default_rng(0)

    def fork(self) -> Text:
        """Return the same text, whose batches are those that come next here."""
        return copy.deepcopy(self)

    def batch(self, batch_size: int = 8, length: int = 128) -> torch.Tensor:
        """Return tokens [batch_size, length]."""
        return windows(self._tokens, self._random, batch_size, length)


class Pretrained:
    """A model that was trained from scratch.

    Args:
        args: the command line, with the flags of ``add_flags``.
        vocab_size: of the tokenizer.
        head_size: features of an attention head.
        num_held_out: batches on which losses are compared.
        decays: whether the learning rate falls as a cosine to a tenth.

    Attributes:
        model: which ``restore`` sets back to the checkpoint.
        text: the training text. Forks of it have the batches that follow the checkpoint.
        loss: of the last batch before the checkpoint.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        vocab_size: int,
        *,
        head_size: int = 64,
        num_held_out: int = 0,
        decays: bool = False,
    ) -> None:
        heads = args.hidden_size // head_size
        self.model = build_model(
            ModelShape(args.hidden_size, args.hidden_size * 11 // 4, args.layers, heads, vocab_size)
        )
        self.text = Text(vocab_size)
        self._held_out = [self.text.batch() for _ in range(num_held_out)]
        optimizer = adamw(self.model, 1e-3)
        lowest = 1e-4 if decays else 1e-3
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.pretraining, eta_min=lowest)
        self.loss = float("nan")
        for _ in track(range(args.pretraining), "pretraining", console=Console(stderr=True)):
            self.loss = train_step(self.model, optimizer, self.text)
            schedule.step()
        self._checkpoint = {name: value.clone() for name, value in self.model.state_dict().items()}

    def restore(self, nudge: float = 0.0) -> torch.nn.Module:
        """Set the model back to the checkpoint, with weights larger by a share ``nudge`` of them, and return it."""
        weights = {
            name: value * (1 + nudge) if value.is_floating_point() else value
            for name, value in self._checkpoint.items()
        }
        self.model.load_state_dict(weights)
        return self.model

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss on batches that the model has not seen."""
        return statistics.mean(self.model(input_ids=batch, labels=batch).loss.item() for batch in self._held_out)


def adamw(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return the optimizer of these studies."""
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)


def backward(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Compute gradients with bf16 compute, and return the loss."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: Text) -> float:
    """Train one step, and return the loss."""
    loss = backward(model, text.batch())
    update(model, optimizer)
    return loss


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step with the gradients that the model has, clipped."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
