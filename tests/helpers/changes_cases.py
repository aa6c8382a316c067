"""Random and awkward cases for ``encode_changes`` and ``apply_changes``, and the calls that compare two kinds of kernels.

They have a file of their own because their results have no fixed size: of a row of the wire only the first bytes are defined, so
``op_checks.py`` cannot compare them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import random
from typing import Any

import torch
from op_checks import Guarded, Kernels, placed

from hf_zeropp.ops import changes_format, changes_reference
from hf_zeropp.ops.changes_reference import BLOCK_WORDS
from hf_zeropp.ops.register import OPERATORS

# Zeros, ones, denormals, infinities and NaNs with payloads, of both signs, in bf16 and in fp16.
SPECIALS = (0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF)
SPECIALS += (0x7C00, 0xFC01)
SIZES = (0, 1, 2, 3, 31, 32, 33, 100, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 2 * BLOCK_WORDS + 7)
DENSITIES = (0.0, 0.0005, 0.005, 0.05, 0.1, 0.28, 0.5, 0.9, 1.0)


@dataclasses.dataclass
class ChangesCase:
    """K slices of words before and after a step.

    Args:
        new: uint8 [K * slice bytes].
        old: as many.
        num_slices: K.
        offset: bytes that tensors lie behind an aligned address.
        text: says how the case was made.
    """

    new: torch.Tensor
    old: torch.Tensor
    num_slices: int
    offset: int
    text: str

    def __str__(self) -> str:
        return self.text


def make_changes_case(seed: int, max_words: int = 20_000) -> ChangesCase:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_slices = choose.choice((1, 1, 2, 3))
    words = min(choose.choice((*SIZES, choose.randrange(max_words), choose.randrange(max_words))), max_words)
    numel = num_slices * words
    old = make_old(numel, choose, generator)
    density, units = choose.choice(DENSITIES), choose.choice((0.0, 0.5, 0.85, 1.0))
    bound = choose.choice((2, 9, 129, 200, 0x8000))
    far = torch.randint(-bound, bound + 1, (numel,), generator=generator)
    unit = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
    step = torch.where(torch.rand(numel, generator=generator) < units, unit, far)
    moved = changes_reference.unordered((changes_reference.ordered(old) + step) % 0x10000)
    new = torch.where(torch.rand(numel, generator=generator) < density, moved, old)
    if choose.random() < 0.2:
        new = make_old(numel, choose, generator)  # all words change, to anything
    if choose.random() < 0.2:  # one part of the slices is left alone
        new[numel // 3 :] = old[numel // 3 :]
    text = f"seed {seed}: {num_slices} slices of {words} words, density {density}, units {units}, far {bound}"
    return ChangesCase(as_bytes(new), as_bytes(old), num_slices, choose.choice((0, 0, 1, 2)), text)


def make_old(numel: int, choose: random.Random, generator: torch.Generator) -> torch.Tensor:
    """int64 [numel], words that are bits, weights in bf16, or specials."""
    kind = choose.choice(("bits", "weights", "specials"))
    if kind == "bits":
        return torch.randint(0, 0x10000, (numel,), generator=generator)
    if kind == "weights":
        weights = (torch.randn(numel, generator=generator) * 0.02).bfloat16()
        return weights.view(torch.int16).long() & 0xFFFF
    return torch.tensor(SPECIALS)[torch.randint(0, len(SPECIALS), (numel,), generator=generator)]


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int32).view(torch.uint8).view(-1, 4)[:, :2].flatten()


# ---- Calls.


def encode(kernels: Kernels, case: ChangesCase, device: str = "cpu") -> list[torch.Tensor]:
    """The wire of each slice, on the CPU. Nothing beside the results is written."""
    arguments = [placed(case.new.to(device), case.offset), placed(case.old.to(device), case.offset), case.num_slices]
    sizes, wire, _ = run(kernels, "encode_changes", arguments, (0, case.offset, 0), device)
    rows = wire.view(case.num_slices, -1)
    return [row[:size].cpu() for row, size in zip(rows, sizes.tolist(), strict=True)]


def apply(
    kernels: Kernels, wire: torch.Tensor, offsets: list[int], sizes: list[int], case: ChangesCase, device: str = "cpu"
) -> tuple[list[int], torch.Tensor]:
    """Return the failure code of each slice and the updated bytes, on the CPU. The memory around them must stay as it was."""
    base = Guarded(case.old.numel(), torch.uint8, case.offset, device)
    base.tensor.copy_(case.old)
    spans = [torch.tensor(values, dtype=torch.int64, device=device) for values in (offsets, sizes)]
    failed, _ = run(kernels, "apply_changes", [wire, *spans, base.tensor], (0, 0), device)
    assert base.is_intact()
    return failed.tolist(), base.tensor.cpu()


def run(kernels: Kernels, name: str, arguments: list[Any], offsets: tuple[int, ...], device: str) -> list[torch.Tensor]:
    operator = OPERATORS[name]
    result = operator.check(arguments)
    outs = [
        Guarded(torch.Size(filled.shape).numel(), filled.dtype, offset, device)
        for filled, offset in zip(result.filled, offsets, strict=True)
    ]
    kernels.run(operator, arguments, result.counts, [out.tensor for out in outs])
    assert all(out.is_intact() for out in outs), f"memory beyond the results of {name} by {kernels.name}"
    return [out.tensor for out in outs]


def joined(wires: list[torch.Tensor], offset: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Wires one behind the other, ``offset`` bytes behind an aligned address, and where each begins and its size."""
    sizes = [wire.numel() for wire in wires]
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    return placed(torch.cat(wires), offset), offsets, sizes


def check_case(one: Kernels, expected: Kernels, case: ChangesCase, device: str = "cpu") -> None:
    """Both kinds of kernels make the same wires of a case, and those wires make the new words of the old."""
    wires = encode(expected, case)
    for ours, theirs in zip(encode(one, case, device), wires, strict=True):
        assert torch.equal(ours, theirs), f"encode_changes by {one.name}: {case}"
        assert theirs.numel() <= changes_format.capacity(case.new.numel() // case.num_slices)
    wire, offsets, sizes = joined(wires, case.offset)
    failed, words = apply(one, wire.to(device), offsets, sizes, case, device)
    assert not any(failed) and torch.equal(words, case.new), f"apply_changes by {one.name}: {case}, failed {failed}"


def check_damage(one: Kernels, expected: Kernels, case: ChangesCase, seed: int, device: str = "cpu") -> bool:
    """Both do the same with a damaged wire, and read nothing behind it. Returns whether they noticed."""
    choose = random.Random(seed)
    wire, offsets, sizes = joined(encode(expected, case), 0)
    slice = choose.randrange(case.num_slices)
    if choose.random() < 0.6 and sizes[slice]:
        for _ in range(choose.choice((1, 1, 3, 30))):
            # Tables and first sections matter most, and are short.
            reach = choose.choice((sizes[slice], min(sizes[slice], 64)))
            wire[offsets[slice] + choose.randrange(reach)] ^= 1 << choose.randrange(8)
    elif choose.random() < 0.5:
        wire = wire[: choose.randrange(wire.numel() + 1)]
    else:
        changed = (0, 1, sizes[slice] - 1, sizes[slice] + 4, -4, 1 << 40)
        choose.choice((sizes, offsets))[slice] = choose.choice(changed)
    theirs = apply(expected, wire, offsets, sizes, case)
    here = before_forbidden_page(wire) if device == "cpu" else wire.to(device)
    ours = apply(one, here, offsets, sizes, case, device)
    what = f"damage {seed} of {case}: {one.name} says {ours[0]}, expected {theirs[0]}"
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1]), what
    return any(ours[0])


def before_forbidden_page(data: torch.Tensor) -> torch.Tensor:
    """A copy of bytes that ends where a page begins that may not be read: reading on ends the process."""
    page = mmap.PAGESIZE
    nbytes = -(-max(data.numel(), 1) // page) * page
    memory = mmap.mmap(-1, nbytes + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(address + nbytes, page, 0) == 0, "mprotect failed"
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[nbytes - data.numel() : nbytes]
    tensor.copy_(data)
    return tensor
