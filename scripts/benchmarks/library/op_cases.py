"""The operators of ``hf_zeropp.ops`` with buffers of a given size, on a device, and the PyTorch code that defines them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from hf_zeropp import ops, quantize_frozen
from hf_zeropp.config import DELTA_BITS, GRADIENT_BITS, WEIGHT_BITS
from hf_zeropp.ops import changes_format, changes_reference, frozen_format, reference
from hf_zeropp.ops.format import Segment, WireLayout
from hf_zeropp.ops.frozen_format import FrozenFormat

Action = Callable[[], object]
Maker = Callable[[], Action]

BLOCKS = {bits: 256 if bits == 8 else 128 for bits in sorted({*WEIGHT_BITS, *GRADIENT_BITS, *DELTA_BITS}, reverse=True)}
"""Elements that share a scale, by the bits of a code."""

NUM_SOURCES = 4
FEW_TOKENS = 4
FEW_INPUTS = (1, 8, 32)
"""Rows of activations in a product with a frozen weight."""
DENSITIES = {0.005: 0.12, 0.01: 0.12, 0.05: 0.17, 0.1: 0.2, 0.28: 0.23}
"""Shares of words that change, and of those the share that moves by more than one unit."""


class Case(NamedTuple):
    """An operator at one size.

    Attributes:
        name: in the table.
        size: bytes of the values, for the table.
        nbytes: bytes that a call reads and writes.
        make: returns a call on buffers of its own, which exist already, as in training.
        eager: returns a call of the PyTorch code that defines the operator; None where that is not timed.
        can_compile: whether the same code is timed after ``torch.compile``.
    """

    name: str
    size: int
    nbytes: int
    make: Maker
    eager: Maker | None = None
    can_compile: bool = False


def wire_cases(bits: int, numel: int, device: str) -> Iterator[Case]:
    """Yield every operator on wires, for one width of codes and slices of ``numel`` elements."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from codec_cases(bits, dtype, numel, device)
    yield from sum_cases(bits, numel, device)
    yield from delta_cases(bits, numel, device)


def codec_cases(bits: int, dtype: torch.dtype, numel: int, device: str) -> Iterator[Case]:
    """Yield encoding and decoding of a slice."""
    layout = WireLayout([Segment(numel, bits)], BLOCKS[bits])
    size, label = numel * dtype.itemsize, f"INT{bits} {str(dtype).removeprefix('torch.')}"

    def values() -> torch.Tensor:
        return torch.randn(numel, device=device).to(dtype)

    def quantize() -> Action:
        wire = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        return partial(ops.quantize, values(), layout, out=wire)

    def dequantize() -> Action:
        out = torch.empty(numel, dtype=dtype, device=device)
        return partial(ops.dequantize, ops.quantize(values(), layout), layout, dtype=dtype, out=out)

    def eager_quantize() -> Action:  # a lambda, since ``torch.compile`` takes functions
        one = values()
        return lambda: reference.quantize(one, layout)

    def eager_dequantize() -> Action:
        wire = ops.quantize(values(), layout)
        return lambda: reference.dequantize(wire, layout, dtype)

    yield Case(f"quantize {label}", size, size + layout.nbytes, quantize, eager_quantize, can_compile=True)
    yield Case(f"dequantize {label}", size, size + layout.nbytes, dequantize, eager_dequantize, can_compile=True)


def sum_cases(bits: int, numel: int, device: str) -> Iterator[Case]:
    """Yield the steps of a reduction that decode: sum four ranks' wires, add the sum to another, or encode it."""
    layout, n = WireLayout([Segment(numel, bits)], BLOCKS[bits]), NUM_SOURCES
    size, read = 4 * numel, NUM_SOURCES * layout.nbytes

    def wires() -> torch.Tensor:
        return ops.quantize(torch.randn(numel, device=device), layout).repeat(n)

    def dequantize_sum(accumulates: bool) -> Maker:
        def make() -> Action:
            total = torch.zeros(1, numel, device=device)
            earlier = {"initial": total, "scale": 0.5} if accumulates else {}
            return partial(ops.dequantize_sum, wires(), layout, num_sources=n, out=total, **earlier)

        return make

    def eager_sum() -> Action:
        return partial(reference.dequantize_sum, wires(), layout, n)

    def dequantize_sum_quantize() -> Action:
        wire = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        return partial(ops.dequantize_sum_quantize, wires(), layout, layout, num_sources=n, out=wire)

    def eager_sum_quantize() -> Action:
        return partial(reference.dequantize_sum_quantize, wires(), layout, layout, n)

    name = f"dequantize_sum INT{bits}, {n} sources"
    yield Case(name, size, read + size, dequantize_sum(accumulates=False), eager_sum)
    yield Case(f"{name}, accumulated", size, read + 2 * size, dequantize_sum(accumulates=True), eager_sum)
    name = f"dequantize_sum_quantize INT{bits}, {n} sources"
    yield Case(name, size, read + layout.nbytes, dequantize_sum_quantize, eager_sum_quantize)


def delta_cases(bits: int, numel: int, device: str) -> Iterator[Case]:
    """Yield the two ends of a delta: encode the change of fp32 masters, and add it to a bf16 copy of the weights."""
    layout = WireLayout([Segment(numel, bits)], BLOCKS[bits])
    base_layout = WireLayout([Segment(numel, None)], BLOCKS[bits])

    def values_and_base() -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(numel, device=device)
        return values, ops.quantize(values + 0.01 * torch.randn(numel, device=device), base_layout)

    def wire_and_base() -> tuple[torch.Tensor, torch.Tensor]:
        values, base = values_and_base()
        return ops.quantize_difference(values, base, base_layout, layout), base

    def quantize_difference() -> Action:
        wire = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        return partial(ops.quantize_difference, *values_and_base(), base_layout, layout, out=wire)

    def eager_difference() -> Action:
        return partial(reference.quantize_difference, *values_and_base(), base_layout, layout)

    def dequantize_update() -> Action:
        wire, base = wire_and_base()
        return partial(ops.dequantize_update, wire, layout, base, base_layout, out=base)

    def eager_update() -> Action:
        wire, base = wire_and_base()
        return partial(reference.dequantize_update, wire, layout, base, base_layout)

    size, copy = 4 * numel, base_layout.nbytes
    name = f"quantize_difference INT{bits}, base bf16"
    yield Case(name, size, size + copy + layout.nbytes, quantize_difference, eager_difference)
    name = f"dequantize_update INT{bits}, base bf16 in place"
    yield Case(name, size, 2 * copy + layout.nbytes, dequantize_update, eager_update)


def change_cases(density: float, numel: int, device: str) -> Iterator[Case]:
    """Yield the two ends of the wire of changed words. The bytes are those of the two shards that a memcpy would move."""
    old = torch.randn(numel, device=device).mul_(0.02).bfloat16()
    far = torch.where(torch.rand(numel) < DENSITIES[density], torch.randint(2, 12, (numel,)), 1)
    step = far * (torch.randint(0, 2, (numel,)) * 2 - 1) * (torch.rand(numel) < density)
    new = (old.view(torch.int16) + step.to(torch.int16).to(device)).view(torch.bfloat16)
    buffers = changes_format.changes_buffers(old.nbytes, 1, old.device)
    sizes, wire = ops.encode_changes(new, old, out=buffers)
    offsets, base = torch.zeros_like(sizes), old.clone()
    old_bytes, new_bytes, base_bytes = (words.view(torch.uint8) for words in (old, new, base))
    label = f"{density:.1%} of words, {int(sizes[0]) / int((step != 0).sum()):.2f} B each"

    # ``base`` moves on with every call of ``apply``. That takes as long as the first time, since steps are added modulo 2^16.
    encode = partial(ops.encode_changes, new, old, out=buffers)
    eager_encode = partial(changes_reference.encode_changes, new_bytes, old_bytes, 1)
    apply = partial(ops.apply_changes, wire, sizes, base, offsets)
    eager_apply = partial(changes_reference.apply_changes, wire.view(-1), offsets, sizes, base_bytes)
    yield Case(f"encode_changes, {label}", old.nbytes, 2 * old.nbytes, lambda: encode, lambda: eager_encode)
    yield Case(f"apply_changes, {label}", old.nbytes, 2 * old.nbytes, lambda: apply, lambda: eager_apply)


def frozen_cases(bits: int, rows: int, columns: int, device: str) -> Iterator[Case]:
    """Yield decoding of a frozen weight, and its product with a few rows of activations."""
    format, dense = FrozenFormat(bits), rows * columns * 2
    packed = format.nbytes((rows, columns))

    def weight() -> tuple[torch.Tensor, torch.Tensor]:
        return frozen_format.pack(torch.randn(rows, columns, device=device, dtype=torch.bfloat16), format)

    def unpack() -> Action:
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return partial(frozen_format.unpack, *weight(), columns, format, torch.bfloat16, out)

    def matmul(num_inputs: int) -> Maker:
        def make() -> Action:
            x = torch.randn(num_inputs, columns, device=device, dtype=torch.bfloat16)
            return partial(frozen_format.matmul, x, *weight(), columns, format)

        return make

    yield Case(f"frozen unpack INT{bits} {rows} x {columns}", packed, packed + dense, unpack)
    for num_inputs in FEW_INPUTS:
        name = f"frozen matmul INT{bits} {rows} x {columns}, {num_inputs} rows of x"
        yield Case(name, packed, packed, matmul(num_inputs))


def dense_case(rows: int, columns: int, num_inputs: int, device: str) -> Case:
    """Return the product of a dense weight in bf16 with a few rows of activations."""

    def make() -> Action:
        weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        x = torch.randn(num_inputs, columns, device=device, dtype=torch.bfloat16)
        return partial(nn.functional.linear, x, weight)

    nbytes = 2 * rows * columns
    return Case(f"dense matmul bf16 {rows} x {columns}, {num_inputs} rows of x", nbytes, nbytes, make)


def linear_cases(bits: int, tokens: int, features: int, device: str) -> Iterator[Case]:
    """Yield a packed linear layer beside ``nn.Linear`` in bf16, forward and, where prompts are trained on, backward.

    The backward pass is that of a frozen layer: it computes the gradient of the input. A call takes the next of several copies
    of the layer, so that no weight is found in a cache.
    """
    packed, dense = FrozenFormat(bits).nbytes((features, features)), 2 * features**2

    def layers(packs: bool) -> list[nn.Module]:
        made = [nn.Linear(features, features, bias=False, dtype=torch.bfloat16, device=device) for _ in range(4)]
        frozen = [layer.requires_grad_(False) for layer in made]
        return [quantize_frozen(layer, bits) for layer in frozen] if packs else frozen

    def forward(packs: bool) -> Action:
        x, ring = torch.randn(tokens, features, dtype=torch.bfloat16, device=device), itertools.cycle(layers(packs))
        return torch.no_grad()(lambda: next(ring)(x))

    def backward(packs: bool) -> Action:
        x = torch.randn(tokens, features, dtype=torch.bfloat16, device=device, requires_grad=True)
        outputs = [layer(x) for layer in layers(packs)]
        ring, gradient = itertools.cycle(outputs), torch.ones_like(outputs[0])
        return lambda: torch.autograd.grad(next(ring), x, gradient, retain_graph=True)

    passes = {"forward": forward} | ({"backward": backward} if tokens > FEW_TOKENS else {})
    for name, make in passes.items():
        label = f"linear INT{bits} {features} x {features}, {tokens} tokens, {name}, beside bf16"
        yield Case(label, dense, packed, partial(make, True), partial(make, False))
