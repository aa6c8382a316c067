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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from library.pages import Grid, show
from library.study import add_model_flags, parse, shape_of
from library.text import write_tokens
from library.training_run import build_model, windows
from rich.console import Console
from rich.progress import track

from hf_zeropp import ops
from hf_zeropp.rollouts.versions import UpdateReceiver, UpdateSender
from hf_zeropp.rollouts.versions.log import checksum

WARM_UP = 10
"""Steps that are not counted: AdamW's first ones are larger."""

COLUMNS = (
    "learning rate",
    "steps",
    "words that change",
    "by one unit",
    "bytes a change",
    "weights, of M",
    "whole step, of M",
)
UPDATE_COLUMNS = (
    "learning rate",
    "updates",
    "words that change",
    "bytes an update",
    "a change",
    "at 6 bytes a change",
    "whole copy",
)
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

    def fork(self) -> Text:
        """Return the same text, whose batches are those that come next here."""
        return copy.deepcopy(self)

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
    for _ in track(range(steps), "pretraining", console=Console(stderr=True)):
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


def changes_at(model: torch.nn.Module, text: Text, rate: float, num_steps: int) -> list[Change]:
    """Train at ``rate`` and return the change of each step that is counted."""
    optimizer = adamw(model, rate)
    found, before = [], words_of(model)
    for _ in range(num_steps):
        train_step(model, optimizer, text)
        after = words_of(model)
        found.append(change(before, after))
        before = after
    return found[WARM_UP:]


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
    optimizer = adamw(model, rate)
    sender, receiver, found, before = UpdateSender(folder), UpdateReceiver(folder), [], words_of(model)
    sender.publish(weights_of(model).items())
    receiver.update()
    whole = sender.log.files[0].num_bytes
    for _ in range(num_steps):
        train_step(model, optimizer, text)
        after = words_of(model)
        version = sender.publish(weights_of(model).items())
        receiver.update()
        (changes,) = (file for file in sender.log.files if file.base and file.version == version)
        num_changed = int((after.view(torch.int16) != before.view(torch.int16)).sum())
        found.append(Update(num_changed, changes.num_bytes))
        before = after
    sent = {name: checksum(weight) for name, weight in weights_of(model).items()}
    if sent != {name: checksum(weight) for name, weight in receiver.weights.items()}:
        raise RuntimeError(f"behind {num_steps} updates at {rate:g} the receiver has other weights than were sent")
    return found[WARM_UP:], whole


def update_row(rate: float, updates: list[Update], whole: int, num_words: int) -> list[str]:
    """Return the row of one learning rate in the table of servers: means over updates."""
    num_changed, num_bytes = (statistics.mean(column) for column in zip(*updates, strict=True))
    return [
        f"{rate:g}", str(len(updates)), f"{num_changed / num_words:.2%}", f"{num_bytes / 1e3:,.0f} KB",
        f"{num_bytes / num_changed:.2f}", f"{num_changed * BYTES_OF_A_PATCH / 1e3:,.0f} KB", f"{whole / 1e3:,.0f} KB",
    ]  # fmt: skip


def row_of(rate: float, changes: list[Change]) -> list[str]:
    """Return the table's row of one learning rate: means over steps."""
    mean = Change(*map(statistics.mean, zip(*changes, strict=True)))
    return [
        f"{rate:g}", str(len(changes)), f"{mean.share:.2%}", f"{mean.by_one:.0%}", f"{mean.bytes_per_change:.2f}",
        f"{mean.of_model:.4f}", f"{mean.of_model + GRADIENTS:.3f}",
    ]  # fmt: skip


def main() -> None:
    """Train, measure, and print both tables for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    checkpoint, text = build_model(shape_of(args)), Text(args.vocab_size)
    loss = pretrain(checkpoint, text, args.pretraining)
    behind = f"after {args.pretraining} steps of pretraining (loss {loss:.2f})"
    grid, servers = Grid(f"Changed words {behind}", COLUMNS), Grid(f"Updates of servers {behind}", UPDATE_COLUMNS)
    for rate in args.rates:
        grid.rows.append(row_of(rate, changes_at(copy.deepcopy(checkpoint), text, rate, args.steps)))
    for rate in args.update_rates:
        model = copy.deepcopy(checkpoint)
        with tempfile.TemporaryDirectory() as folder:
            updates, whole = updates_at(model, text.fork(), rate, args.updates, folder)
        servers.rows.append(update_row(rate, updates, whole, words_of(model).numel()))
    show([grid, servers], markdown=True)


if __name__ == "__main__":
    main()
