"""What does it cost to keep the gradient sums of micro-steps in 16 bits: in error, and in training loss?

    python scripts/benchmarks/measure_accumulator.py

One process trains a small Llama on the source text of Python's standard library, with bf16 compute and fp32 masters, as one rank
of a node sees it: each micro-step's gradient is encoded in INT8 and decoded, as the node hop does, and added up in four ways.

- float32, the yardstick;
- bfloat16, rounded to nearest;
- bfloat16, rounded at random by the package's operator (``qgz_accumulator="bfloat16"``);
- bfloat16, compensated (Kahan): what was rounded away is kept in a second bf16 number, 32 bits in all.

First the same gradients are added up in all ways, after 8, 64 and 512 micro-steps, and compared. Then training goes on from the
checkpoint once for each way that saves memory, with the same batches, and with INT4 for the sums, as the cross hop sends them. A
run in float32 whose weights were moved by one part in ten million shows how far runs part by themselves. Nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from library.pages import Grid
from library.training_run import build_model
from library.variants import ModelShape
from measure_changes import Text, step
from rich.console import Console
from rich.progress import Progress

from hf_zeropp import ops
from hf_zeropp.ops.format import Segment, WireLayout

BLOCK, NODE_BITS, CROSS_BITS = 128, 8, 4
BATCH, LENGTH = 4, 64
"""Tokens of a micro-step: few, so that 64 of them make a step that is trained with."""
NUM_HELD_OUT = 16
NUDGE = 1e-7

Gradients = dict[str, torch.Tensor]


class Accumulator:
    """Sums in float32; subclasses keep them otherwise."""

    name, bits = "float32", 32

    def __init__(self) -> None:
        self._sums: Gradients = {}

    def add(self, gradients: Gradients) -> None:
        """Add the gradients of one micro-step."""
        for name, gradient in gradients.items():
            self._sums[name] = self._kept(name, gradient.float() + self._fp32(name, gradient))

    def last(self, gradients: Gradients) -> Gradients:
        """Return the sums with the gradients of the last micro-step, which are not rounded any more. Forget them."""
        sums = {name: gradient.float() + self._fp32(name, gradient) for name, gradient in gradients.items()}
        self._sums = {}
        return sums

    def _fp32(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self._sums[name].float() if name in self._sums else torch.zeros_like(like, dtype=torch.float32)

    def _kept(self, name: str, total: torch.Tensor) -> torch.Tensor:
        return total


class Nearest(Accumulator):
    """Sums in bf16, as the package rounds them."""

    name, bits = "bfloat16 (the setting)", 16

    def _kept(self, name: str, total: torch.Tensor) -> torch.Tensor:
        return total.bfloat16()


class Compensated(Accumulator):
    """Sums in bf16, with what rounding left out beside them, in bf16 as well."""

    name, bits = "bfloat16, compensated", 32

    def __init__(self) -> None:
        super().__init__()
        self._left_out: Gradients = {}

    def last(self, gradients: Gradients) -> Gradients:
        """As above."""
        sums = super().last(gradients)
        self._left_out = {}
        return sums

    def _fp32(self, name: str, like: torch.Tensor) -> torch.Tensor:
        left_out = self._left_out.get(name)
        return super()._fp32(name, like) + (0.0 if left_out is None else left_out.float())

    def _kept(self, name: str, total: torch.Tensor) -> torch.Tensor:
        rounded = total.bfloat16()
        self._left_out[name] = (total - rounded.float()).bfloat16()
        return rounded


WAYS: tuple[type[Accumulator], ...] = (Accumulator, Nearest, Compensated)


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
    tokens = text.batch(BATCH, LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
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


def errors(model: torch.nn.Module, text: Text, micro_steps: int, repeats: int) -> Iterator[tuple[str, int, Error]]:
    """Yield the way, its bits and its error, and the same of INT4 for the exact sums."""
    found: dict[tuple[str, int], list[Error]] = {}
    for _ in range(repeats):
        ways = [way() for way in WAYS]
        for _ in range(micro_steps - 1):
            gradients = micro_step(model, text)
            for way in ways:
                way.add(gradients)
        gradients = micro_step(model, text)
        exact, *others = [way.last(gradients) for way in ways]
        for way, sums in zip(ways[1:], others, strict=True):
            found.setdefault((way.name, way.bits), []).append(Error.of(sums, exact))
        found.setdefault(("for comparison: INT4 across nodes", 4), []).append(
            Error.of(through(CROSS_BITS, exact), exact)
        )
    for (name, bits), of_way in found.items():
        yield name, bits, Error(*map(statistics.mean, zip(*of_way, strict=True)))


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    """Return the mean loss."""
    return statistics.mean(model(input_ids=batch, labels=batch).loss.item() for batch in batches)


@dataclasses.dataclass
class Job:
    """What all training runs share."""

    model: torch.nn.Module
    checkpoint: Gradients
    batches: Text
    held_out: list[torch.Tensor]
    rate: float

    def train(self, way: Accumulator, micro_steps: int, steps: int, nudge: float = 0.0) -> list[float]:
        """Return the held-out loss at four points of a run from the checkpoint."""
        self.model.load_state_dict(
            {
                name: value * (1 + nudge) if value.is_floating_point() else value
                for name, value in self.checkpoint.items()
            }
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, weight_decay=0.01)
        text, losses = self.batches.fork(), []
        for index in range(steps):
            for _ in range(micro_steps - 1):
                way.add(micro_step(self.model, text))
            sums = through(CROSS_BITS, way.last(micro_step(self.model, text)))
            for name, param in self.model.named_parameters():
                param.grad = sums[name] / micro_steps
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (index + 1) % (steps // 4) == 0:
                losses.append(held_out_loss(self.model, self.held_out))
        return losses


def loss_grid(job: Job, micro_steps: int, steps: int, progress: Progress) -> Grid:
    """Train in all ways, and return the table."""
    points = [steps // 4 * quarter for quarter in (1, 2, 3, 4)]
    grid = Grid(
        f"held-out loss, {micro_steps} micro-steps to a step",
        ("sums", *(f"step {point}" for point in points), "at the end"),
    )
    runs: list[tuple[str, Accumulator, float]] = [
        (way.name, way(), 0.0) for way in WAYS if way.bits == 16 or way is Accumulator
    ]
    runs.insert(1, ("float32, other by 1e-7 at the start", Accumulator(), NUDGE))
    exact: list[float] = []
    for name, way, nudge in progress.track(runs, description=f"{micro_steps} micro-steps"):
        losses = job.train(way, micro_steps, steps, nudge)
        exact = exact or losses
        grid.rows.append([name, *(f"{loss:.4f}" for loss in losses), f"{losses[-1] - exact[-1]:+.4f}"])
    return grid


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate behind the checkpoint")
    parser.add_argument("--pretraining", type=int, default=200, help="steps before the checkpoint")
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
    torch.manual_seed(0)
    shape = ModelShape(args.hidden_size, args.hidden_size * 11 // 4, args.layers, args.hidden_size // 32, 2048)
    model = build_model(shape)
    text = Text(vocab_size=shape.vocab_size)
    held_out = [text.batch() for _ in range(NUM_HELD_OUT)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    with Progress(console=Console(stderr=True)) as progress:
        for _ in progress.track(range(args.pretraining), description="pretraining"):
            step(model, optimizer, text)
        checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
        job = Job(model, checkpoint, text.fork(), held_out, args.rate)
        columns = ("sums", "bits", "relative error", "along the gradient")
        for micro_steps in args.sums:
            grid = Grid(f"error of the sums of {micro_steps} micro-steps", columns)
            for name, bits, error in errors(model, job.batches.fork(), micro_steps, args.repeats):
                grid.rows.append([name, str(bits), f"{error.relative:.2e}", f"{error.along:+.1e}"])
            print(grid.markdown() + "\n", flush=True)
        for micro_steps, steps in zip(args.micro_steps, args.steps, strict=True):
            print(loss_grid(job, micro_steps, steps, progress).markdown() + "\n", flush=True)
    print(f"{sum(param.numel() for param in model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
