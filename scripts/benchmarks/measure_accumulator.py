"""How exact are the gradient sums of micro-steps that are kept in 16 bits?

    python scripts/benchmarks/measure_accumulator.py

One process trains a small Llama on the source text of Python's standard library, with bf16 compute and fp32 masters, as one rank
of a node sees it: each micro-step's gradient is encoded in INT8 and decoded, as the node hop does, and added up in float32,
the yardstick, and in bfloat16, rounded to nearest.

The same gradients are added up in both ways, after 8, 64 and 512 micro-steps, and compared. Beside them stands the error of INT4
for the exact sums, as the cross hop sends them. Nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import NamedTuple

import torch
from library.pages import Grid
from library.small_training import Pretrained, Text, add_flags, backward
from library.study import parse

from hf_zeropp import ops
from hf_zeropp.ops.format import Segment, WireLayout

BLOCK, NODE_BITS, CROSS_BITS = 128, 8, 4
BATCH, LENGTH = 4, 64
"""Tokens of a micro-step: few, so that there are many of them."""

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


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser, hidden_size=128, layers=2, pretraining=200)
    parser.add_argument(
        "--sums", type=int, nargs="*", default=[8, 64, 512], help="micro-steps of sums that are compared"
    )
    parser.add_argument("--repeats", type=int, default=4, help="sums that are compared")
    return parse(parser, {"pretraining": 10, "sums": [8], "repeats": 1}, argv)


def main() -> None:
    """Train, measure, and print the tables in Markdown."""
    args = parse_args(sys.argv[1:])
    pretrained = Pretrained(args, vocab_size=2048, head_size=32)
    for micro_steps in args.sums:
        grid = error_grid(pretrained.model, pretrained.text.fork(), micro_steps, args.repeats)
        print(grid.markdown() + "\n", flush=True)
    print(f"{sum(param.numel() for param in pretrained.model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
