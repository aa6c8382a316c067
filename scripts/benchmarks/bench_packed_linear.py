"""Time a packed linear layer against ``nn.Linear`` in bf16: forward and backward, prompt and decode sizes.

    python scripts/bench_packed_linear.py --threads 1

Backward is that of a frozen layer: the gradient of the input. Both layers alternate within one loop, over several copies of
the weight so that none is found in the cache, and medians are compared.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from pages import Grid
from rich.console import Console
from torch import nn

from hf_zeropp import ops, quantize_frozen

DECODE, PROMPT = (1, 4), (128, 512, 2048)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--features", type=int, nargs=2, default=(4096, 4096), metavar=("IN", "OUT"))
    parser.add_argument("--copies", type=int, default=4, help="weights the loop goes through")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def make_layers(args: argparse.Namespace, bits: int | None) -> list[nn.Linear]:
    torch.manual_seed(0)
    layers = [nn.Linear(*args.features, bias=False, dtype=torch.bfloat16) for _ in range(args.copies)]
    return [
        layer.requires_grad_(False) if bits is None else quantize_frozen(layer.requires_grad_(False), bits)
        for layer in layers
    ]


def forward(layer: nn.Linear, x: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            layer(x)

    return run


def backward(layer: nn.Linear, x: torch.Tensor) -> Callable[[], object]:
    x = x.clone().requires_grad_()
    output = layer(x)
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, x, gradient, retain_graph=True)


def alternate(actions: dict[str, list[Callable[[], object]]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each kind of layer."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for repeat in range(repeats + 1):
        for name, copies in actions.items():
            start = time.perf_counter()
            copies[repeat % len(copies)]()
            if repeat:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    layers = {"bf16": make_layers(args, None), "INT8": make_layers(args, 8), "INT4": make_layers(args, 4)}
    title = f"{args.features[0]} x {args.features[1]}, {args.threads} threads, kernels {ops.kernel_info().cpu}, ms"
    grid = Grid(title, ["tokens", "pass", "nn.Linear bf16", "INT8", "INT4", "INT8 / bf16", "INT4 / bf16"])
    for tokens in (*DECODE, *PROMPT):
        for name, build in {"forward": forward, "backward": backward}.items():
            if name == "backward" and tokens in DECODE:
                continue
            x = torch.randn(tokens, args.features[0], dtype=torch.bfloat16)
            actions = {kind: [build(layer, x) for layer in copies] for kind, copies in layers.items()}
            ms = alternate(actions, args.repeats)
            ratios = [f"{ms[kind] / ms['bf16']:.2f}" for kind in ("INT8", "INT4")]
            grid.rows.append([str(tokens), name, *(f"{value:.2f}" for value in ms.values()), *ratios])
    console = Console(width=120)
    console.print(grid.rich())
    console.print(f"PyTorch {torch.__version__}, {platform.machine()}")
    print(grid.markdown())


if __name__ == "__main__":
    main()
