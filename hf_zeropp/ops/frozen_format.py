"""The storage format of frozen weights: codes and scales in two tensors, and the operators that make and read them.

A weight [..., columns] (a matrix, or 3-D for fused experts) becomes, row by row,

    codes   uint8 [..., ceil(columns * bits / 8)]     INT8, or two INT4 codes in a byte, the low nibble first
    scales  uint8 [..., 2 * ceil(columns / block)]    16 bits for each block of consecutive columns

Codes and scales are uint8 because ``model.to(dtype)`` and its like cast floats, and because gloo and NCCL move no int16.

A block has ``FrozenFormat.block`` columns, by default 128. Where the shorter last block of a row would put its scales over 16
bits for 128 columns and a 64th more, the row has wider blocks: 576 columns are three of 160 and one of 96. So an even number of
columns from 128 on takes at most 4.127 bits per weight, or 8.127.

Rows stay rows: FSDP2 shards both tensors along dim 0, and the part that a rank holds is the packed form of its rows. A block
never straddles rows.

In 8 bits codes and scales are those of the wire (``blocks.py``): an element decodes to code * scale. In 4 bits a code stands for
one of 16 integers of 8 bits, its level, and a block has two scales, for runs of 16 columns in turn: an element decodes to
level * scale. ``frozen_reference.py`` says why, and how both are chosen. Products are fp32, rounded to the dtype asked for.
A block with a NaN or an Inf decodes to NaNs, and so does one in 4 bits with a magnitude that its scales cannot reach (from 4.1
million on, or 12.3 million in the runs of the second scale). A block of magnitudes near zero (under 1e-12 in 4 bits, 2^-100 in 8)
decodes to zeros.

The compiled kernels (ops/cpu/frozen_*.cpp) and the PyTorch code agree bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from hf_zeropp.ops import frozen_reference
from hf_zeropp.ops.checks import check_dtype
from hf_zeropp.ops.format import BLOCK_MULTIPLE, FLOAT_DTYPES, MAX_BLOCK, MIN_BLOCK
from hf_zeropp.ops.frozen_reference import MAX_INPUTS
from hf_zeropp.ops.kernels import compiled_kernels
from hf_zeropp.ops.operator import Bytes, Filled, Floats, Result, check_size
from hf_zeropp.ops.register import operator

FROZEN_BITS = (8, 4)
DEFAULT_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class FrozenFormat:
    """How densely a frozen weight is packed.

    Args:
        bits: bits of a code: 8 or 4.
        block: the fewest columns that share 16 bits of scales, which are one scale in 8 bits and two in 4: a multiple of 32 from
            32 to 4096. See ``block_of``.

    Raises:
        ValueError: any other value.
    """

    bits: int
    block: int = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in FROZEN_BITS:  # a checkpoint's config may hold 8.0 or "8"
            raise ValueError(
                f"Frozen weights are packed in 8 or 4 bits, got bits={self.bits!r}. None leaves them as they are."
            )
        is_block = type(self.block) is int and self.block in range(MIN_BLOCK, MAX_BLOCK + 1, BLOCK_MULTIPLE)
        if not is_block:
            raise ValueError(
                f"The block of frozen weights must be a multiple of {BLOCK_MULTIPLE} from {MIN_BLOCK} to "
                f"{MAX_BLOCK}, got {self.block!r}."
            )

    def block_of(self, columns: int) -> int:
        """Return the columns of a block in a row of ``columns`` elements. The last block may have fewer.

        It is the narrowest multiple of 32, at least ``block``, with which the row's scales take at most 65/64 of 16 bits for each
        ``block`` columns. A row too short for that has one block. If more than 4096 columns were needed, ``block`` stays.
        """
        most_blocks = max(columns * 65 // (64 * self.block), 1)
        width = -(-columns // (most_blocks * BLOCK_MULTIPLE)) * BLOCK_MULTIPLE
        return self.block if width > MAX_BLOCK else max(width, self.block)

    def code_columns(self, columns: int) -> int:
        """Return the bytes of the codes of a row of ``columns`` elements."""
        return _code_columns(columns, self.bits)

    def scale_columns(self, columns: int) -> int:
        """Return the bytes of the scales of a row of ``columns`` elements."""
        return _scale_columns(columns, self.block_of(columns))

    def nbytes(self, shape: torch.Size | tuple[int, ...]) -> int:
        """Return the bytes of codes and scales of a weight of this shape."""
        rows = torch.Size(shape[:-1]).numel()
        return rows * (self.code_columns(shape[-1]) + self.scale_columns(shape[-1]))


def _code_columns(columns: int, bits: int) -> int:
    return -(-columns * bits // 8)


def _scale_columns(columns: int, block: int) -> int:
    return 2 * -(-columns // block)


@functools.cache  # generation asks for the same few in every layer of every token
def _check_format(bits: int, block: int) -> None:
    """Raise ``ValueError`` for what a format does not allow: kernels would write past the end of their buffers."""
    FrozenFormat(bits, block)


# Operators take the width of the blocks (``block_of``), and the functions around them a format.


@operator(frozen_reference.pack, counts=("rows", "columns"), codes="uint8_t*", scales="uint8_t*")
def _frozen_pack(weight: Floats, bits: int, block: int) -> Result:
    _check_format(bits, block)
    *leading, columns = weight.shape
    filled = (
        Filled((*leading, _code_columns(columns, bits)), torch.uint8),
        Filled((*leading, _scale_columns(columns, block)), torch.uint8),
    )
    # C sees a matrix of rows: fused experts [experts, rows, columns] differ from it in their shape alone.
    return Result(weight.device, (weight.numel() // max(columns, 1), columns), filled)


def pack(weight: Tensor, format: FrozenFormat) -> tuple[Tensor, Tensor]:
    """Encode a weight.

    Args:
        weight: [..., columns] in fp32, bf16 or fp16.
        format: bits and block.

    Returns:
        Codes and scales.

    Raises:
        TypeError: a weight of another dtype.
    """
    return _frozen_pack(weight.contiguous(), format.bits, format.block_of(weight.shape[-1]))


@operator(frozen_reference.unpack, counts=("rows",), out="void*")
def _frozen_unpack(codes: Bytes, scales: Bytes, columns: int, bits: int, block: int, dtype: torch.dtype) -> Result:
    check_dtype(dtype)
    rows = _check_rows(codes, scales, columns, bits, block)
    return Result(codes.device, (rows,), (Filled((*codes.shape[:-1], columns), dtype),))


def _check_rows(codes: Tensor, scales: Tensor, columns: int, bits: int, block: int) -> int:
    """Return the rows of a packed weight.

    Raises ``ValueError`` unless codes and scales have the shapes of a weight [..., columns]. With others, which a damaged
    checkpoint may hold, kernels would read past their end.
    """
    _check_format(bits, block)
    leading = codes.shape[:-1]
    widths = _code_columns(columns, bits), _scale_columns(columns, block)
    for name, tensor, width in (("codes", codes, widths[0]), ("scales", scales, widths[1])):
        if tensor.shape != (*leading, width):
            raise ValueError(
                f"expected {name} of shape {(*leading, width)} for {columns} columns in {bits} bits and blocks of "
                f"{block}, got {tuple(tensor.shape)}"
            )
    return math.prod(leading)


def unpack(
    codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Decode a weight, or some rows of one.

    Args:
        codes: uint8 [..., format.code_columns(columns)].
        scales: uint8 [..., format.scale_columns(columns)].
        columns: elements of a row.
        format: bits and block.
        dtype: fp32, bf16 or fp16.
        out: contiguous, of the shape and dtype of the result. None for a new tensor.

    Returns:
        [..., columns] in ``dtype``, or ``out``.

    Raises:
        TypeError: another ``dtype``, or tensors of other dtypes.
        ValueError: tensors of other sizes.
    """
    arguments = (codes.contiguous(), scales.contiguous(), columns, format.bits, format.block_of(columns), dtype)
    return _frozen_unpack(*arguments, out=out)


@operator(frozen_reference.matmul, counts=("num_inputs", "rows"), out="void*")
def _frozen_matmul(
    x: Floats, codes: Bytes, scales: Bytes, bias: Floats | None, columns: int, bits: int, block: int
) -> Result:
    num_inputs = x.shape[0]
    if num_inputs > MAX_INPUTS:
        raise ValueError(f"expected at most {MAX_INPUTS} rows of x, got {num_inputs}: decode the weight and multiply")
    rows = _check_rows(codes, scales, columns, bits, block)
    check_size("x", x, num_inputs * columns)
    if bias is not None:
        check_size("bias", bias, rows)
    return Result(x.device, (num_inputs, rows), (Filled((num_inputs, rows), x.dtype),))


def matmul(
    x: Tensor, codes: Tensor, scales: Tensor, columns: int, format: FrozenFormat, bias: Tensor | None = None
) -> Tensor:
    """Multiply a few rows by a transposed weight, without decoding it, and add the bias. Sums are fp32 and rounded once.

    Reads codes instead of a dense weight: a quarter of the bytes of bf16 at 4 bits, and nothing is written but the result.
    CUDA kernels add in another order than those of the CPU, within the bound that ops/cuda/frozen_matmul.cu states.

    Args:
        x: [M, columns] in fp32, bf16 or fp16, with M up to ``MAX_INPUTS``.
        codes: uint8 [rows, format.code_columns(columns)].
        scales: uint8 [rows, format.scale_columns(columns)].
        columns: elements of a row.
        format: bits and block.
        bias: [rows] in fp32, bf16 or fp16, or None.

    Returns:
        [M, rows] in the dtype of ``x``.

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: more rows of ``x``, or tensors of other sizes.
    """
    bias = bias if bias is None else bias.contiguous()
    tensors = (x.contiguous(), codes.contiguous(), scales.contiguous(), bias)
    return _frozen_matmul(*tensors, columns, format.bits, format.block_of(columns))


_FAST_INPUTS = {"avx512": 8, "avx2": 2, "baseline": 1, "cuda": MAX_INPUTS}
"""Rows of x up to which ``matmul`` takes less time than decoding and a dense product, by kernels.

For CPUs: measured in scripts/results/packed_linear.md. For GPUs: how many the kernel computes while it reads a weight once."""


def has_fast_matmul(x: Tensor) -> bool:
    """Return whether ``matmul`` takes x [M, columns], runs compiled, and is faster than decoding and a dense product."""
    kernels = compiled_kernels(x.device.type)
    return kernels is not None and x.shape[0] <= _FAST_INPUTS[kernels.name] and x.dtype in FLOAT_DTYPES
