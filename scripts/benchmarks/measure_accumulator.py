"""What does it cost to keep the gradient sums of micro-steps in 16 bits: in error, and in training loss?

    python scripts/benchmarks/measure_accumulator.py

One process trains a small Llama on the source text of Python's standard library, with bf16 compute and fp32 masters, as one rank
of a node sees it: each micro-step's gradient is encoded in INT8 and decoded, as the node hop does, and added up in float32,
the yardstick, and in bfloat16, rounded to nearest.

First the same gradients are added up in both ways, after 8, 64 and 512 micro-steps, and compared. Then training goes on from the
checkpoint once for each way, with the same batches, and with INT4 for the sums, as the cross hop sends them. A run
in float32 whose weights were moved by one part in ten million shows how far runs part by themselves. Nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import NamedTuple

import torch
from library.pages import Grid
from library.small_training import Pretrained, Text, adamw, add_flags, backward, update

from hf_zeropp import ops
from hf_zeropp.ops.format import Segment, WireLayout

BLOCK, NODE_BITS, CROSS_BITS = 128, 8, 4
BATCH, LENGTH = 4, 64
"""Tokens of a micro-step: few, so that 64 of them make a step that is trained with."""
NUM_HELD_OUT = 16
NUDGE = 1e-7

Gradients = dict[str, torch.Tensor]


class Accumulator:
    """Sums of gradients, kept in a dtype between micro-steps.

    Args:
        dtype: of the sums.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: Gradients = {}

    def add(self, gradients: Gradients) -> None:
        """Add the gradients of one micro-step."""
        self._sums = {name: total.to(self._dtype) for name, total in self._totals(gradients).items()}

    def last(self, gradients: Gradients) -> Gradients:
        """Return the sums with the gradients of the last micro-step, which are not rounded any more. Forget them."""
        totals, self._sums = self._totals(gradients), {}
        return totals

    def _totals(self, gradients: Gradients) -> Gradients:
        return {name: gradient.float() + self._sums.get(name, 0.0) for name, gradient in gradients.items()}


def through(bits: int, gradients: Gradients) -> Gradients:
    """Encode and decode matrices in ``bits``; vectors travel as they are."""
    result = {}
    for name, gradient in gradients.items():
        result[name] = gradient
        if gradient.ndim > 1:
            layout = WireLayout([Segment(gradient.numel(), bits)], BLOCK)
            wire = ops.quantize(gradient.flatten(), layout)
            result[name] = ops.dequantize(wire, layout, dtype=torch.float32).view_as(gradient)
    return result


def micro_step(model: torch.nn.Module, text: Text) -> Gradients:
    """Return the gradients of one batch, as they arrive from the node hop."""
    backward(model, text.batch(BATCH, LENGTH))
    gradients = {name: param.grad.bfloat16() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return through(NODE_BITS, gradients)


class Error(NamedTuple):
    """How sums differ from those in float32."""

    relative: float
    """Norm of the difference over the norm."""
    along: float
    """The difference along the gradient itself: below 0, it is too short."""

    @classmethod
    def of(cls, ours: Gradients, exact: Gradients) -> Error:
        """Compare two sums, all parameters together."""
        pairs = [(ours[name].double().flatten(), exact[name].double().flatten()) for name in exact]
        square = sum(float(right @ right) for _, right in pairs)
        off = sum(float((left - right).square().sum()) for left, right in pairs)
        return cls((off / square) ** 0.5, sum(float(left @ right) for left, right in pairs) / square - 1)


def error_grid(model: torch.nn.Module, text: Text, micro_steps: int, repeats: int) -> Grid:
    """Add up the same gradients in both ways, and return the table of errors, and of those of INT4 for the exact sums."""
    found: dict[str, list[Error]] = {"bfloat16, to nearest": [], "for comparison: INT4 across nodes": []}
    for _ in range(repeats):
        exact_sums, rounded_sums = Accumulator(torch.float32), Accumulator(torch.bfloat16)
        for _ in range(micro_steps - 1):
            gradients = micro_step(model, text)
            exact_sums.add(gradients)
            rounded_sums.add(gradients)
        gradients = micro_step(model, text)
        exact = exact_sums.last(gradients)
        for errors, ours in zip(
            found.values(), (rounded_sums.last(gradients), through(CROSS_BITS, exact)), strict=True
        ):
            errors.append(Error.of(ours, exact))
    grid = Grid(f"error of the sums of {micro_steps} micro-steps", ("sums", "relative error", "along the gradient"))
    for name, errors in found.items():
        mean = Error(*map(statistics.mean, zip(*errors, strict=True)))
        grid.rows.append([name, f"{mean.relative:.2e}", f"{mean.along:+.1e}"])
    return grid


def train(
    pretrained: Pretrained, sums: Accumulator, rate: float, micro_steps: int, steps: int, nudge: float
) -> list[float]:
    """Return the held-out loss at four points of a run from the checkpoint."""
    model, text, losses = pretrained.restore(nudge), pretrained.text.fork(), []
    optimizer = adamw(model, rate)
    for index in range(steps):
        for _ in range(micro_steps - 1):
            sums.add(micro_step(model, text))
        totals = through(CROSS_BITS, sums.last(micro_step(model, text)))
        for name, param in model.named_parameters():
            param.grad = totals[name] / micro_steps
        update(model, optimizer)
        if (index + 1) % (steps // 4) == 0:
            losses.append(pretrained.held_out_loss())
    return losses


def loss_grid(pretrained: Pretrained, rate: float, micro_steps: int, steps: int) -> Grid:
    """Train in both ways, and return the table."""
    points = [steps // 4 * quarter for quarter in (1, 2, 3, 4)]
    columns = ("sums", *(f"step {point}" for point in points), "at the end")
    grid = Grid(f"held-out loss, {micro_steps} micro-steps to a step", columns)
    runs = (
        ("float32", torch.float32, 0.0),
        ("float32, other by 1e-7 at the start", torch.float32, NUDGE),
        ("bfloat16, to nearest", torch.bfloat16, 0.0),
    )
    exact: list[float] = []
    for name, dtype, nudge in runs:
        losses = train(pretrained, Accumulator(dtype), rate, micro_steps, steps, nudge)
        exact = exact or losses
        grid.rows.append([name, *(f"{loss:.4f}" for loss in losses), f"{losses[-1] - exact[-1]:+.4f}"])
    return grid


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser, hidden_size=128, layers=2, pretraining=200)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate behind the checkpoint")
    parser.add_argument(
        "--sums", type=int, nargs="*", default=[8, 64, 512], help="micro-steps of sums that are compared"
    )
    parser.add_argument(
        "--micro-steps", type=int, nargs="*", default=[8, 64], help="micro-steps to a step that is trained"
    )
    parser.add_argument("--steps", type=int, nargs="*", default=[60, 16], help="for each way, by micro-steps")
    parser.add_argument("--repeats", type=int, default=4, help="sums that are compared")
    return parser.parse_args(argv)


def main() -> None:
    """Train, measure, and print the tables in Markdown."""
    args = parse_args(sys.argv[1:])
    pretrained = Pretrained(args, vocab_size=2048, num_held_out=NUM_HELD_OUT, head_size=32)
    for micro_steps in args.sums:
        grid = error_grid(pretrained.model, pretrained.text.fork(), micro_steps, args.repeats)
        print(grid.markdown() + "\n", flush=True)
    for micro_steps, steps in zip(args.micro_steps, args.steps, strict=True):
        print(loss_grid(pretrained, args.rate, micro_steps, steps).markdown() + "\n", flush=True)
    print(f"{sum(param.numel() for param in pretrained.model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
