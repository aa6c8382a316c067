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
import statistics
import sys
import tempfile
from typing import NamedTuple

import torch
from library.pages import Grid
from library.small_training import Pretrained, Text, adamw, add_flags, train_step
from library.study import parse

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
    add_flags(parser, hidden_size=256, layers=4, pretraining=400)
    parser.add_argument("--steps", type=int, default=30, help="at each rate; the first ten are not counted")
    quick = {"pretraining": 10, "rates": [1e-5], "steps": 12, "update_rates": [1e-5], "updates": 12}
    return parse(parser, quick | {"hidden_size": 128, "layers": 2}, argv)


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
    """Train, measure, and print both tables in Markdown."""
    args = parse_args(sys.argv[1:])
    pretrained = Pretrained(args, vocab_size=4096, decays=True)
    text = pretrained.text
    behind = f"after {args.pretraining} steps of pretraining (loss {pretrained.loss:.2f})"
    grid, servers = Grid(f"Changed words {behind}", COLUMNS), Grid(f"Updates of servers {behind}", UPDATE_COLUMNS)
    for rate in args.rates:
        grid.rows.append(row_of(rate, changes_at(pretrained.restore(), text, rate, args.steps)))
    for rate in args.update_rates:
        model = pretrained.restore()
        with tempfile.TemporaryDirectory() as folder:
            updates, whole = updates_at(model, text.fork(), rate, args.updates, folder)
        servers.rows.append(update_row(rate, updates, whole, words_of(model).numel()))
    print(grid.markdown(), servers.markdown(), sep="\n\n")


if __name__ == "__main__":
    main()
