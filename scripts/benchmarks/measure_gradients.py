"""How much of Adam's progress is lost if gradients are rounded to few bits? Compares sets of levels on a trained model.

    bash scripts/real_model.sh
    python scripts/benchmarks/measure_gradients.py

SmolLM2-135M is trained on docstrings of PyTorch with exact gradients, on 4 ranks in 2 nodes that are simulated one after another.
At each step the same gradients are also reduced as the package does it, in each of several forms of codes, and each form has
moments of Adam of its own. A form's share of progress is the sum of (its updates * the gradient on validation text), over that
of exact gradients: how far the loss falls, to first order. No run is trained with rounded gradients, so nothing of it is noise.

Some blocks of the model are followed, and every 16th run of 16 rows of its embedding.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from library.real_model import FOLDER
from library.text import write_tokens_of
from library.text_run import pretrained
from library.training_run import windows
from torch import Tensor
from tqdm import tqdm

from hf_zeropp import ops
from hf_zeropp.ops.format import Segment, WireLayout

Rounding = Callable[[Tensor], Tensor]
RANKS, NODES, LENGTH = 4, 2, 128
BETAS, EPS = (0.9, 0.999), 1e-8
BLOCKS = (1, 15, 28)
EMBEDDING_RUN = 16
VALIDATION = 64


def own_codes(values: Tensor, bits: int, block: int = 128) -> Tensor:
    """Encode and decode by the package's kernels."""
    layout = WireLayout([Segment(values.numel(), bits)], block)
    return ops.dequantize(ops.quantize(values, layout), layout, dtype=torch.float32).view(-1)


def other_levels(values: Tensor, levels: Tensor, block: int = 128) -> Tensor:
    """Round to the nearest of ``levels``, from 0 to 1 and of either sign, times the largest magnitude of each block."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)
    amax = blocks.abs().amax(1, keepdim=True)
    nearest = torch.bucketize(blocks.abs() / amax.clamp_min(1e-38), (levels[1:] + levels[:-1]) / 2)
    return (levels[nearest] * blocks.sign() * amax).view(-1)[: values.numel()]


class Form(NamedTuple):
    """How gradients are rounded in the two hops of a reduction; None rounds nothing."""

    cross: Rounding | None
    node: Rounding | None = partial(own_codes, bits=8)

    def reduce(self, gradients: list[Tensor]) -> Tensor:
        """Return the sum over ranks, in rank order, rounded as in two hops."""
        sent = [self.node(one) for one in gradients] if self.node else gradients
        nodes = [sum(part) for part in zip(*[iter(sent)] * (RANKS // NODES), strict=True)]
        return sum(self.cross(one) for one in nodes) if self.cross else sum(nodes)


def forms() -> dict[str, Form]:
    """Return the forms by their names in the table, exact gradients first."""
    even = torch.linspace(0, 1, 8)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6
    powers = torch.tensor([0, *(2.0**-k for k in range(6, -1, -1))])
    root = partial(own_codes, bits=4)
    return {
        "exact": Form(None, None),
        "8 bits": Form(partial(own_codes, bits=8)),
        "**4 bits, roots: the package's**": Form(root),
        "the same, 16 bits within nodes": Form(root, None),
        "the same in both hops, as `paper`": Form(root, root),
        "4 bits, roots, block 64": Form(partial(own_codes, bits=4, block=64)),
        "4 bits, evenly spaced": Form(partial(other_levels, levels=even)),
        "4 bits, evenly spaced, block 32": Form(partial(other_levels, levels=even, block=32)),
        "5 bits, evenly spaced": Form(partial(other_levels, levels=torch.linspace(0, 1, 16))),
        "4 bits, E2M1 (as MXFP4 and NVFP4)": Form(partial(other_levels, levels=e2m1)),
        "4 bits, E2M1, block 32": Form(partial(other_levels, levels=e2m1, block=32)),
        "4 bits, nearest square": Form(partial(other_levels, levels=even**2)),
        "4 bits, powers of two": Form(partial(other_levels, levels=powers)),
        "3 bits, roots": Form(partial(own_codes, bits=3)),
        "3 bits, evenly spaced": Form(partial(other_levels, levels=torch.linspace(0, 1, 4))),
    }


class Followed:
    """The moments of Adam under one form, and the progress that its updates make."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.progress: dict[str, float] = {}
        self.error = self.size = 0.0
        self.zeros = self.count = 0

    def step(self, step: int, name: str, gradients: list[Tensor], exact: Tensor, validation: Tensor) -> None:
        """Take one parameter's gradients of all ranks."""
        reduced = self.form.reduce(gradients)
        self.error += (reduced - exact).square().sum().item()
        self.size += exact.square().sum().item()
        self.zeros += ((reduced == 0) & (exact != 0)).sum().item()
        self.count += (exact != 0).sum().item()
        first, second = self._moments.setdefault(name, (torch.zeros_like(exact), torch.zeros_like(exact)))
        first.lerp_(reduced, 1 - BETAS[0])
        second.lerp_(reduced.square(), 1 - BETAS[1])
        update = first / (1 - BETAS[0] ** step) / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS)
        kind = "embedding" if "embed" in name else name.split(".")[-2].removesuffix("_proj")
        self.progress[kind] = self.progress.get(kind, 0.0) + (update * validation).sum().item()


def followed(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients that are followed, by the parameter's name."""
    for name, param in model.named_parameters():
        if "embed" in name:
            yield name, param.grad.view(-1, EMBEDDING_RUN * param.shape[1])[::EMBEDDING_RUN].flatten().clone()
        elif param.ndim > 1 and any(f"layers.{block}." in name for block in BLOCKS):
            yield name, param.grad.flatten().clone()


def backward(model: torch.nn.Module, tokens: Tensor) -> None:
    """Add the gradients of the mean loss of the next token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()


def measure(args: argparse.Namespace) -> dict[str, Followed]:
    """Train with exact gradients, and follow every form."""
    random, model = np.random.default_rng(0), pretrained(args.model)
    with tempfile.TemporaryDirectory() as folder:
        files = write_tokens_of(Path(folder), args.model).documentation
        train, held_out = np.load(files.train), np.load(files.validation)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, BETAS, EPS, weight_decay=0.0, fused=True)
    for part in windows(held_out, random, VALIDATION, LENGTH).split(RANKS):
        backward(model, part)
    validation = dict(followed(model))
    found = {name: Followed(form) for name, form in forms().items()}
    for step in tqdm(range(1, args.steps + 1), "steps"):
        ranks, whole = [], [torch.zeros_like(param) for param in model.parameters()]
        for _ in range(RANKS):
            optimizer.zero_grad()
            backward(model, windows(train, random, 1, LENGTH))
            ranks.append(dict(followed(model)))
            torch._foreach_add_(whole, [param.grad for param in model.parameters()])
        for name, held in validation.items():
            own = [rank[name] for rank in ranks]
            for one in found.values():
                one.step(step, name, own, sum(own), held)
        for param, total in zip(model.parameters(), whole, strict=True):
            param.grad = total / RANKS
        optimizer.step()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(FOLDER), help="folder of the model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    found = measure(parser.parse_args())
    exact = found["exact"].progress
    print(f"| codes | progress | error | zeros | {' | '.join(exact)} |")
    print(f"| --- | ---: | ---: | ---: | {' | '.join(['---:'] * len(exact))} |")
    for name, one in found.items():
        kinds = " | ".join(f"{one.progress[kind] / exact[kind]:.1%}" for kind in exact)
        share = sum(one.progress.values()) / sum(exact.values())
        zeros = one.zeros / one.count
        print(f"| {name} | {share:.1%} | {(one.error / one.size) ** 0.5:.3f} | {zeros:.1%} | {kinds} |")


if __name__ == "__main__":
    main()
