"""What does it do to gradients, and to the loss, that the backend sums them within a node, in the dtype of FSDP2's reductions?

    python scripts/benchmarks/measure_native_sums.py

One process trains a small Llama on the source text of Python's standard library, with bf16 compute and fp32 masters. It stands
for all ranks: each has a batch of its own, and their gradients are summed as two nodes of N ranks do it. A native sum rounds to
the reduce dtype after each rank, as a ring does; the sums of wires are in fp32.

First the mean gradients of one step are compared with those in fp64. Then training goes on from the checkpoint once for each way,
with the same batches. Nothing is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from library.pages import Grid, show
from library.small_training import Pretrained, Text, adamw, add_flags, backward, update
from library.study import parse

from hf_zeropp import ops
from hf_zeropp.ops.format import GRAD_BLOCK, Segment, WireLayout

NODES = 2
BATCH, LENGTH = 2, 64
NUM_HELD_OUT = 16
NUDGE = 1e-7

Gradients = dict[str, torch.Tensor]
Mean = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""It takes the gradients of one parameter from all ranks in fp32, and returns their mean."""


def through(bits: int | None, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what arrives of ``values`` [numel] in fp32: in codes, or in ``dtype``."""
    if bits is None:
        return values.to(dtype).float()
    layout = WireLayout([Segment(values.numel(), bits)], GRAD_BLOCK)
    return ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32)


def in_ring(values: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a sum that is rounded after each addition."""
    total = values[0].to(dtype)
    for value in values[1:]:
        total = total + value.to(dtype)
    return total.float()


def stock(dtype: torch.dtype) -> Mean:
    """Return FSDP2's reduction: one ring over all ranks."""
    return lambda ranks: in_ring(ranks, dtype) / len(ranks)


def two_hops(dtype: torch.dtype, node_bits: int | None, cross_bits: int | None, *, native: bool) -> Mean:
    """Return this package's reduction."""

    def mean(ranks: Sequence[torch.Tensor]) -> torch.Tensor:
        size = len(ranks) // NODES
        total = torch.zeros_like(ranks[0])
        for node in range(NODES):
            own = ranks[node * size : (node + 1) * size]
            sums = in_ring(own, dtype) if native else sum(through(node_bits, one.to(dtype), dtype) for one in own)
            total += through(cross_bits, torch.as_tensor(sums), dtype)
        return total / len(ranks)

    return mean


def ways() -> dict[str, Mean]:
    """Return all ways by name."""
    found: dict[str, Mean] = {}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        found[f"{name}: stock FSDP2"] = stock(dtype)
        for cross_bits in (None, 4):
            across = "in INT4 across nodes" if cross_bits else "unquantized across nodes"
            found[f"{name}: native within a node, {across}"] = two_hops(dtype, None, cross_bits, native=True)
            found[f"{name}: unquantized wires within a node, fp32 sums, {across}"] = two_hops(
                dtype, None, cross_bits, native=False
            )
            found[f"{name}: INT8 wires within a node, fp32 sums, {across}"] = two_hops(
                dtype, 8, cross_bits, native=False
            )
    return found


def gradients_of_ranks(model: torch.nn.Module, text: Text, num_ranks: int) -> list[Gradients]:
    """Return the gradients of one batch for each rank."""
    found = []
    for _ in range(num_ranks):
        backward(model, text.batch(BATCH, LENGTH))
        found.append({name: param.grad.flatten() for name, param in model.named_parameters() if param.ndim > 1})
        model.zero_grad()
    return found


def relative_error(mean: Mean, ranks: Sequence[Gradients]) -> float:
    """Return the norm of the error of all matrices together over the norm of the mean gradient."""
    off = square = 0.0
    for name in ranks[0]:
        values = [one[name] for one in ranks]
        exact = torch.stack(values).double().mean(0)
        off += float((mean(values).double() - exact).square().sum())
        square += float(exact.square().sum())
    return (off / square) ** 0.5


def error_grid(pretrained: Pretrained, sizes: Sequence[int], repeats: int) -> Grid:
    """Return the table of errors by the number of ranks of a node."""
    model, text = pretrained.restore(), pretrained.text.fork()
    errors: dict[str, list[float]] = {name: [] for name in ways()}
    for size in sizes:
        samples = [gradients_of_ranks(model, text, NODES * size) for _ in range(repeats)]
        for name, mean in ways().items():
            errors[name].append(statistics.mean(relative_error(mean, ranks) for ranks in samples))
    title = f"Relative error of the mean gradient of {NODES} nodes of N ranks"
    grid = Grid(title, ("reduction", *(f"N = {size}" for size in sizes)))
    grid.rows += [[name, *(f"{error:.1e}" for error in row)] for name, row in errors.items()]
    return grid


def train(pretrained: Pretrained, mean: Mean, size: int, steps: int, rate: float, nudge: float) -> list[float]:
    """Return the held-out loss at four points of a run from the checkpoint."""
    model, text, losses = pretrained.restore(nudge), pretrained.text.fork(), []
    optimizer = adamw(model, rate)
    for index in range(steps):
        ranks = []
        for _ in range(NODES * size):
            backward(model, text.batch(BATCH, LENGTH))
            ranks.append({name: param.grad.flatten() for name, param in model.named_parameters()})
            model.zero_grad()
        for name, param in model.named_parameters():
            param.grad = mean([one[name] for one in ranks]).view_as(param)
        update(model, optimizer)
        if (index + 1) % (steps // 4) == 0:
            losses.append(pretrained.held_out_loss())
    return losses


def loss_grid(pretrained: Pretrained, size: int, steps: int, rate: float) -> Grid:
    """Train in the ways of bf16, and return the table."""
    points = [f"step {steps // 4 * quarter}" for quarter in (1, 2, 3, 4)]
    grid = Grid(
        f"Held-out loss, {NODES} nodes of {size} ranks, reductions in bf16", ("reduction", *points, "beside stock")
    )
    runs = {name: train(pretrained, mean, size, steps, rate, 0.0) for name, mean in ways().items() if "bf16" in name}
    yardstick = next(iter(runs.values()))[-1]
    runs["bf16: stock FSDP2, weights other by 1e-7"] = train(
        pretrained, stock(torch.bfloat16), size, steps, rate, NUDGE
    )
    for name, losses in runs.items():
        grid.rows.append([name, *(f"{loss:.4f}" for loss in losses), f"{losses[-1] - yardstick:+.4f}"])
    return grid


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser, hidden_size=128, layers=2, pretraining=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="ranks of a node")
    parser.add_argument("--repeats", type=int, default=4, help="steps whose gradients are compared")
    parser.add_argument("--train-size", type=int, default=4, help="ranks of a node in the trained runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-3)
    return parse(parser, {"pretraining": 10, "sizes": [2], "repeats": 1, "train_size": 2, "steps": 4}, argv)


def main() -> None:
    """Measure, and print the tables for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pretrained = Pretrained(args, vocab_size=2048, num_held_out=NUM_HELD_OUT)
    show([error_grid(pretrained, args.sizes, args.repeats)], markdown=True)
    show([loss_grid(pretrained, args.train_size, args.steps, args.rate)], markdown=True)


if __name__ == "__main__":
    main()
