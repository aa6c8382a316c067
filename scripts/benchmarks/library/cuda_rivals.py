"""Other quantizers on a GPU, to be timed beside our operators: PyTorch code, DeepSpeed's kernels, torchao.

Each rival is asked for the nearest operation that it has. None has our format: DeepSpeed keeps fp32 scales of groups,
torchao keeps scales in a tensor of their own, and neither reorders slices. A rival that is not installed or does not
build is left out, and the reason is noted.

Functions here return makers by the rival's name. A maker prepares buffers and returns the action to be timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_zeropp.ops import reference
from hf_zeropp.ops.format import WireLayout

Action = Callable[[], object]
Maker = Callable[[], Action]
Makers = dict[str, Maker]


class Missing(Exception):
    """A rival cannot run here; the message says why. Makers raise it."""


@functools.cache
def deepspeed_kernels() -> Any:
    """Build and load DeepSpeed's quantization kernels.

    Raises:
        Missing: DeepSpeed is not installed, or there is no toolkit that builds them.
    """
    try:
        from deepspeed.ops.op_builder import QuantizerBuilder

        return QuantizerBuilder().load(verbose=False)
    except Exception as error:  # noqa: BLE001 - an absent package, no toolkit, a failed build: all leave it out
        raise Missing(f"DeepSpeed: {type(error).__name__}: {str(error).splitlines()[:1]}") from error


@functools.cache
def torchao_primitives() -> Any:
    """Import torchao's quantization primitives.

    Raises:
        Missing: torchao is not installed, or does not work with this PyTorch.
    """
    try:
        from torchao.quantization import quant_primitives

        return quant_primitives
    except Exception as error:  # noqa: BLE001 - as above
        raise Missing(f"torchao: {type(error).__name__}: {error}") from error


def quantize_rivals(values: torch.Tensor, layout: WireLayout, bits: int) -> Makers:
    """Return makers of quantization.

    Args:
        values: a number of whole blocks.
        layout: our format for them, with one segment.
        bits: of a code.
    """
    groups = values.numel() // layout.block

    def deepspeed() -> Action:
        kernels, half = deepspeed_kernels(), values.half()
        return lambda: kernels.quantize(half, groups, bits, kernels.Symmetric)

    def torchao() -> Action:
        primitives, top = torchao_primitives(), 2 ** (bits - 1) - 1
        shape = (1, layout.block)
        rows = values.view(groups, layout.block)
        kind = primitives.MappingType.SYMMETRIC

        def run() -> torch.Tensor:
            scale, zero = primitives.choose_qparams_affine(rows, kind, shape, torch.int8, -top, top)
            return primitives.quantize_affine(rows, shape, scale, zero, torch.int8, -top, top)

        return torch.compile(run)

    return {
        "eager": lambda: lambda: reference.quantize(values, layout),
        "compile": lambda: _compiled(lambda: reference.quantize(values, layout)),
        "DeepSpeed": deepspeed,
        "torchao": torchao,
    }


def dequantize_rivals(wire: torch.Tensor, layout: WireLayout, bits: int, dtype: torch.dtype) -> Makers:
    """Return makers of dequantization to ``dtype``; DeepSpeed decodes its own codes of as many values, to fp16."""
    groups = layout.numel // layout.block

    def deepspeed() -> Action:
        kernels = deepspeed_kernels()
        values = torch.randn(layout.numel, device=wire.device, dtype=torch.float16)
        codes, scales = kernels.quantize(values, groups, bits, kernels.Symmetric)
        return lambda: kernels.dequantize(codes, scales, groups, bits, kernels.Symmetric)

    return {
        "eager": lambda: lambda: reference.dequantize(wire, layout, dtype),
        "compile": lambda: _compiled(lambda: reference.dequantize(wire, layout, dtype)),
        "DeepSpeed": deepspeed,
    }


def sum_quantize_rivals(wires: torch.Tensor, layout: WireLayout, bits: int, sources: int) -> Makers:
    """Return makers of the step between the hops of a reduction: decode ``sources`` wires, sum, encode."""
    groups = layout.numel // layout.block

    def deepspeed() -> Action:
        kernels = deepspeed_kernels()
        values = torch.randn(sources * layout.numel, device=wires.device, dtype=torch.float16)
        codes, scales = kernels.quantize(values, sources * groups, bits, kernels.Symmetric)
        sizes = (sources * groups, groups, bits, kernels.Symmetric, sources)
        return lambda: kernels.quantized_reduction(codes, scales, *sizes)

    return {
        "eager": lambda: lambda: reference.dequantize_sum_quantize(wires, layout, layout, sources),
        "DeepSpeed": deepspeed,
    }


def _compiled(run: Action) -> Action:
    torch.compiler.reset()  # otherwise the recompile limit makes later cases run uncompiled
    return torch.compile(run)
