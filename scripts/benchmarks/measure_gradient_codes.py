"""Can gradients cross nodes in fewer bytes than INT4 takes: by narrower codes, by entropy coding, or by leaving out zeros?

    python scripts/benchmarks/measure_gradient_codes.py

One process trains a small Llama on the source text of Python's standard library, with bf16 compute and fp32 masters, and goes on
from this checkpoint once for every form of gradients. Two nodes are emulated: each has a batch of its own, encodes its gradients
for the cross hop with the package's operators, and the decoded gradients are averaged in fp32. All forms see the same batches.

A form's bytes on the wire are those of the format. Its bytes *coded* are what an ideal entropy coder with a table for each
parameter and step would make of the same codes, computed from how often each value occurs; scales count as they are. Nothing is
timed, and no coder is implemented. Shares of M are times (Y-1)/Y for Y nodes, as everywhere.
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
from library.small_training import Pretrained, Text, adamw, add_flags, backward, update

from hf_zeropp import ops
from hf_zeropp.ops.blocks import to_blocks, unpack_codes
from hf_zeropp.ops.format import Segment, WireLayout

NUM_NODES = 2
NUM_HELD_OUT = 16
"""Batches on which the loss is compared."""
COLUMNS = ("gradients", "on the wire, of M", "coded, of M", "error", "loss", "beside unquantized")


@dataclasses.dataclass(frozen=True)
class Form:
    """How gradients cross nodes.

    Attributes:
        bits: of a code; None for gradients that are not quantized. They count as bf16, in which they could be reduced.
        block: elements that share one scale.
    """

    bits: int | None
    block: int = 128

    @property
    def name(self) -> str:
        """The name of the form in the table."""
        if self.bits is None:
            return "unquantized"
        return f"{self.bits} bits, blocks of {self.block}"


FORMS = (Form(None), Form(4), Form(3), Form(2, 64))


class Sizes(NamedTuple):
    """Bits of one parameter's gradient: as the format sends it, and as an ideal coder would."""

    wire: float
    coded: float
    zero_blocks: float


def send(form: Form, gradient: torch.Tensor) -> tuple[torch.Tensor, Sizes]:
    """Return what the other nodes decode, in the gradient's shape, and the bits it took."""
    flat = gradient.flatten().float()
    if form.bits is None or gradient.ndim == 1:  # as the package does: vectors travel unquantized
        return gradient, Sizes(16 * flat.numel(), 16 * flat.numel(), 0.0)
    layout = WireLayout([Segment(flat.numel(), form.bits)], form.block)
    wire = ops.quantize(flat, layout)
    decoded = ops.dequantize(wire, layout, dtype=torch.float32)
    return decoded.view_as(gradient), sizes_of(wire, layout, gradient)


def sizes_of(wire: torch.Tensor, layout: WireLayout, values: torch.Tensor) -> Sizes:
    """Return the bits of a wire of one segment, and of an ideal coding of it, and the share of zero blocks in ``values``."""
    (part,) = layout.parts
    codes = unpack_codes(wire[None, part.codes : part.end], part.bits)[0, : part.numel]
    num_blocks = -(-part.numel // layout.block)
    scales = wire[part.scales : part.scales + 2 * num_blocks].view(torch.int16)
    is_zero = (to_blocks(values.view(1, -1), layout.block) == 0).all(-1)
    # Nearly every scale is a value of its own, so a table of them would be as large as they are.
    coded = entropy_bits(codes) + 16 * scales.count_nonzero().item()
    return Sizes(8 * wire.numel(), coded, is_zero.float().mean().item())


def entropy_bits(symbols: torch.Tensor) -> float:
    """Return the bits of all symbols together at the entropy of their frequencies, without a table."""
    counts = symbols.unique(return_counts=True)[1].double()
    return float((counts * (counts.sum() / counts).log2()).sum())


class Step(NamedTuple):
    """One step: bits an element on the wire and coded, the relative error of the mean, and zero blocks of the embedding."""

    wire: float
    coded: float
    error: float
    zero_blocks: float


def reduce_step(model: torch.nn.Module, form: Form, text: Text) -> Step:
    """Compute the gradients of one batch a node, and leave in ``.grad`` what the nodes agree on."""
    of_nodes = [dict(gradients(model, text)) for _ in range(NUM_NODES)]
    wire = coded = off = exact_square = 0.0
    zero_blocks = []
    for name, param in model.named_parameters():
        sent = [send(form, own[name]) for own in of_nodes]
        exact = torch.stack([own[name] for own in of_nodes]).mean(0)
        param.grad = torch.stack([decoded for decoded, _ in sent]).mean(0)
        off += float((param.grad - exact).double().square().sum())
        exact_square += float(exact.double().square().sum())
        wire += statistics.mean(sizes.wire for _, sizes in sent)
        coded += statistics.mean(sizes.coded for _, sizes in sent)
        if "embed" in name:
            zero_blocks += [sizes.zero_blocks for _, sizes in sent]
    numel = sum(param.numel() for param in model.parameters())
    return Step(wire / numel, coded / numel, (off / exact_square) ** 0.5, statistics.mean(zero_blocks))


def gradients(model: torch.nn.Module, text: Text) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients of one batch by name."""
    backward(model, text.batch())
    for name, param in model.named_parameters():
        assert param.grad is not None
        yield name, param.grad
        param.grad = None


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser, hidden_size=256, layers=4, pretraining=300)
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate behind the checkpoint")
    parser.add_argument("--steps", type=int, default=100, help="for each form")
    parser.add_argument("--forms", type=int, nargs="+", default=list(range(len(FORMS))), help="of FORMS, by index")
    return parser.parse_args(argv)


def main() -> None:
    """Train, measure, and print the table in Markdown."""
    args = parse_args(sys.argv[1:])
    pretrained = Pretrained(args, vocab_size=4096, num_held_out=NUM_HELD_OUT)
    grid = Grid(f"After {args.steps} steps from a checkpoint", COLUMNS)
    exact = float("nan")
    for form in [FORMS[index] for index in args.forms]:
        model, text = pretrained.restore(), pretrained.text.fork()
        optimizer, found = adamw(model, args.rate), []
        for _ in range(args.steps):
            found.append(reduce_step(model, form, text))
            update(model, optimizer)
        mean = Step(*map(statistics.mean, zip(*found, strict=True)))
        loss = pretrained.held_out_loss()
        exact = loss if form.bits is None else exact
        figures = [f"{mean.wire / 16:.3f}", f"{mean.coded / 16:.3f}", f"{mean.error:.3f}", f"{loss:.4f}"]
        grid.rows.append([form.name, *figures, f"{loss - exact:+.4f}"])
    print(grid.markdown())
    print(f"\nBlocks of the embedding that are zero in every element: {mean.zero_blocks:.0%}.")


if __name__ == "__main__":
    main()
