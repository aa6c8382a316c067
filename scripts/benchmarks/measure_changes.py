"""How many 16-bit weights change in a step of fine-tuning, and how many bytes do they take on the wire?

    python scripts/benchmarks/measure_changes.py

One process trains a small Llama on the source text of Python's standard library, with fp32 masters and AdamW, as ranks do under
``qwz_mode="exact"``. From this checkpoint it goes on at several learning rates, each with a new optimizer. After every step the
bf16 values of the masters are compared with those of the step before, and encoded as a cross hop would send them. Nothing is
timed. Shares of M are times (Y-1)/Y for Y nodes, as everywhere.

A second table is about servers elsewhere: at the rates of RLHF every step becomes a version of an ``UpdateSender``, and an
``UpdateReceiver`` takes each of them. The run ends with an error where its weights are not bit-equal behind the last one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from library.pages import Grid, show
from library.study import add_model_flags, parse, shape_of
from library.text import write_tokens
from library.training_run import build_model, windows

from hf_zeropp import ops
from hf_zeropp.rollouts.versions import UpdateReceiver, UpdateSender
from hf_zeropp.rollouts.versions.log import checksum

WARM_UP = 10
"""Steps that are not counted: AdamW's first ones are larger."""

BYTES_OF_A_PATCH = 6
"""Of a changed word in vLLM's own sparse updates: a position of 4 bytes, a value of 2."""
GRADIENTS = 0.25 + 2 / 128 / 2
"""Bytes of INT4 gradients across nodes, of M: codes, and a scale of 2 bytes for each block of 128."""


class Change(NamedTuple):
    """One step: share of words that changed, share of these that moved by one, and bytes on the wire of them all."""

    share: float
    by_one: float
    bytes_per_change: float
    of_model: float


class Update(NamedTuple):
    """One version: words that changed, and bytes of the file of their changes."""

    num_changed: int
    num_bytes: int


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="*", type=float, default=[1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3], help="of AdamW")
    parser.add_argument("--update-rates", nargs="*", type=float, default=[1e-6, 3e-6, 1e-5], help="for servers")
    parser.add_argument("--updates", type=int, default=200, help="versions at each; the first ten are not counted")
    add_model_flags(parser, hidden_size=256, layers=4, vocab_size=4096)
    parser.add_argument("--pretraining", type=int, default=400, help="steps before the checkpoint")
    parser.add_argument("--steps", type=int, default=30, help="at each rate; the first ten are not counted")
    quick = {"pretraining": 10, "rates": [1e-5], "steps": 12, "update_rates": [1e-5], "updates": 12}
    return parse(parser, quick | {"hidden_size": 128, "layers": 2}, argv)


class Text:
    """Random windows of the training text."""

    def __init__(self, vocab_size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._tokens = np.load(write_tokens(Path(folder), vocab_size).code.train)
        self._random = np.random.default_rng(0)

    def batch(self) -> torch.Tensor:
        """Return tokens [8, 128]."""
        return windows(self._tokens, self._random, 8, 128)


def adamw(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return the optimizer of the checkpoint and of all runs from it."""
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: Text) -> float:
    """Train one step with bf16 compute and clipped gradients, and return the loss."""
    tokens = text.batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def pretrain(model: torch.nn.Module, text: Text, steps: int) -> float:
    """Train from scratch at a rate that falls as a cosine to a tenth, and return the last loss."""
    optimizer = adamw(model, 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-4)
    loss = float("nan")
    for _ in range(steps):
        loss = train_step(model, optimizer, text)
        schedule.step()
    return loss


def words_of(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights in bf16, in one tensor."""
    return torch.cat([param.detach().flatten() for param in model.parameters()]).bfloat16()


def change(before: torch.Tensor, after: torch.Tensor) -> Change:
    """Encode how ``after`` differs from ``before``."""
    sizes, _ = ops.encode_changes(after, before)
    # Values of one sign are in the order of their bits.
    moved = (after.view(torch.int16).int() - before.view(torch.int16).int()).abs()
    num_changed = max(int((moved != 0).sum()), 1)
    by_one = int((moved == 1).sum()) / num_changed
    return Change(num_changed / moved.numel(), by_one, int(sizes[0]) / num_changed, int(sizes[0]) / before.nbytes)


def words_by_step(
    model: torch.nn.Module, text: Text, rate: float, num_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Train at ``rate``, and yield all weights in bf16 as they were before and are behind each step."""
    optimizer, before = adamw(model, rate), words_of(model)
    for _ in range(num_steps):
        train_step(model, optimizer, text)
        after = words_of(model)
        yield before, after
        before = after


def changes_at(model: torch.nn.Module, text: Text, rate: float, num_steps: int) -> list[Change]:
    """Train at ``rate`` and return the change of each step that is counted."""
    return [change(*words) for words in words_by_step(model, text, rate, num_steps)][WARM_UP:]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that a server computes with, by name."""
    return {name: param.detach().bfloat16() for name, param in model.named_parameters()}


def updates_at(
    model: torch.nn.Module, text: Text, rate: float, num_steps: int, folder: str
) -> tuple[list[Update], int]:
    """Train at ``rate``, publish and receive each step's weights.

    Returns:
        The updates that are counted, and the bytes of a whole copy.

    Raises:
        RuntimeError: the receiver's weights are not those that were sent last.
    """
    sender, receiver, found = UpdateSender(folder), UpdateReceiver(folder), []
    sender.publish(weights_of(model).items())
    receiver.update()
    whole = sender.log.files[0].num_bytes
    for before, after in words_by_step(model, text, rate, num_steps):
        version = sender.publish(weights_of(model).items())
        receiver.update()
        (changes,) = (file for file in sender.log.files if file.base and file.version == version)
        num_changed = int((after.view(torch.int16) != before.view(torch.int16)).sum())
        found.append(Update(num_changed, changes.num_bytes))
    sent = {name: checksum(weight) for name, weight in weights_of(model).items()}
    if sent != {name: checksum(weight) for name, weight in receiver.weights.items()}:
        raise RuntimeError(f"behind {num_steps} updates at {rate:g} the receiver has other weights than were sent")
    return found[WARM_UP:], whole


def update_row(rate: float, updates: list[Update], whole: int, num_words: int) -> dict[str, str]:
    """Return the row of one learning rate in the table of servers: means over updates."""
    num_changed, num_bytes = (statistics.mean(column) for column in zip(*updates, strict=True))
    return {
        "learning rate": f"{rate:g}",
        "updates": str(len(updates)),
        "words that change": f"{num_changed / num_words:.2%}",
        "bytes an update": f"{num_bytes / 1e3:,.0f} KB",
        "a change": f"{num_bytes / num_changed:.2f}",
        "at 6 bytes a change": f"{num_changed * BYTES_OF_A_PATCH / 1e3:,.0f} KB",
        "whole copy": f"{whole / 1e3:,.0f} KB",
    }


def row_of(rate: float, changes: list[Change]) -> dict[str, str]:
    """Return the table's row of one learning rate: means over steps."""
    mean = Change(*map(statistics.mean, zip(*changes, strict=True)))
    return {
        "learning rate": f"{rate:g}",
        "steps": str(len(changes)),
        "words that change": f"{mean.share:.2%}",
        "by one unit": f"{mean.by_one:.0%}",
        "bytes a change": f"{mean.bytes_per_change:.2f}",
        "weights, of M": f"{mean.of_model:.4f}",
        "whole step, of M": f"{mean.of_model + GRADIENTS:.3f}",
    }


def main() -> None:
    """Train, measure, and print both tables for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    checkpoint, text = build_model(shape_of(args)), Text(args.vocab_size)
    loss = pretrain(checkpoint, text, args.pretraining)
    behind = f"after {args.pretraining} steps of pretraining (loss {loss:.2f})"
    rows = [row_of(rate, changes_at(copy.deepcopy(checkpoint), text, rate, args.steps)) for rate in args.rates]
    servers = []
    for rate in args.update_rates:
        model = copy.deepcopy(checkpoint)
        with tempfile.TemporaryDirectory() as folder:
            updates, whole = updates_at(model, copy.deepcopy(text), rate, args.updates, folder)
        servers.append(update_row(rate, updates, whole, words_of(model).numel()))
    show([Grid.of(f"Changed words {behind}", rows), Grid.of(f"Updates of servers {behind}", servers)], markdown=True)


if __name__ == "__main__":
    main()
