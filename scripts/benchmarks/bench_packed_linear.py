"""Time a packed linear layer beside ``nn.Linear`` in bf16: forward and backward, with prompts and single tokens.

    python scripts/benchmarks/bench_packed_linear.py --threads 1

The backward pass is that of a frozen layer: it computes the gradient of the input. Packed and plain layers take turns
within one loop, so that other programs slow both alike, and medians are compared. The loop goes through several copies of
each weight, so that none is found in the cache.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from library.pages import Grid, show
from torch import nn

from hf_zeropp import ops, quantize_frozen

DECODE, PROMPT = (1, 4), (128, 512, 2048)  # tokens in a call: of generation, and of prompts or training
PACKED = {"INT8": 8, "INT4": 4}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--features", type=int, nargs=2, default=(4096, 4096), metavar=("IN", "OUT"))
    parser.add_argument("--copies", type=int, default=4, help="weights the loop goes through")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args(argv)


def make_layers(args: argparse.Namespace, bits: int | None) -> list[nn.Linear]:
    """Return copies of a frozen layer, packed in ``bits`` bits, or in bf16 for None."""
    torch.manual_seed(0)
    layers = [nn.Linear(*args.features, bias=False, dtype=torch.bfloat16) for _ in range(args.copies)]
    frozen = [layer.requires_grad_(False) for layer in layers]
    return frozen if bits is None else [quantize_frozen(layer, bits) for layer in frozen]


def forward(layer: nn.Linear, x: torch.Tensor) -> Callable[[], object]:
    """Return a call of the layer."""

    def run() -> None:
        with torch.no_grad():
            layer(x)

    return run


def backward(layer: nn.Linear, x: torch.Tensor) -> Callable[[], object]:
    """Return a call that computes the gradient of the layer's input."""
    x = x.clone().requires_grad_()
    output = layer(x)
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, x, gradient, retain_graph=True)


def alternate(actions: dict[str, list[Callable[[], object]]], repeats: int) -> dict[str, float]:
    """Call all kinds of layers in turns.

    Args:
        actions: by the kind of layer, a call for each copy of the weight.
        repeats: calls per kind that count; one before them does not.

    Returns:
        Median milliseconds by the kind of layer.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, copies in actions.items():
            start = time.perf_counter()
            copies[repeat % len(copies)]()
            if repeat:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(args: argparse.Namespace) -> Grid:
    """Time all sizes and passes, and return the table."""
    layers = {kind: make_layers(args, bits) for kind, bits in {"bf16": None, **PACKED}.items()}
    title = f"{args.features[0]} x {args.features[1]}, {args.threads} threads, kernels {ops.kernel_info().cpu}, ms"
    grid = Grid(title, ["tokens", "pass", "nn.Linear bf16", "INT8", "INT4", "INT8 / bf16", "INT4 / bf16"])
    for tokens in (*DECODE, *PROMPT):
        for name, build in {"forward": forward, "backward": backward}.items():
            if name == "backward" and tokens in DECODE:
                continue
            x = torch.randn(tokens, args.features[0], dtype=torch.bfloat16)
            actions = {kind: [build(layer, x) for layer in copies] for kind, copies in layers.items()}
            ms = alternate(actions, args.repeats)
            ratios = [f"{ms[kind] / ms['bf16']:.2f}" for kind in PACKED]
            grid.rows.append([str(tokens), name, *(f"{value:.2f}" for value in ms.values()), *ratios])
    return grid


def main() -> None:
    """Time the layers, and print the table for the terminal and for a page."""
    args = parse_args(sys.argv[1:])
    torch.set_num_threads(args.threads)
    show([measure(args)], f"PyTorch {torch.__version__}, {platform.machine()}", markdown=True)


if __name__ == "__main__":
    main()
