"""The wire of changed words: lossless, and small where most 16-bit weights keep their bits in a step.

An optimizer moves most bf16 weights by less than half a unit in the last place, and their bits stay as they are. Ranks that hold
the words of the step before, the *base*, need only the words that changed. The format knows nothing of elements: a *word* is two
bytes, whatever they mean, so NaN payloads, signed zeros and denormals arrive as they left. fp32 data is two words an element.

A slice is cut into blocks of 8192 words, the last one shorter. Its wire is a table of one little-endian u32 for each block, and
behind it the payloads of the blocks, in their order, each padded with zeros to a multiple of 4 bytes:

    | entry 0 | entry 1 | .. | payload 0 | payload 1 | ..

    bits of an entry    0-13  n, the changed words of the block
                       14-28  e, the bytes of its escapes
                          31  the block is stored whole, all other bits are 0, and the payload is its words

The table gives the bytes of every payload, so a prefix sum finds every block, and blocks are encoded and decoded in parallel. A
block without changes has no payload. A block is stored whole where that takes no more bytes, so a slice never takes more than its
words and 4 bytes a block (``capacity``). Any other payload has these sections, each of whole bytes:

    | high parts, or a bitmap | escapes | details | low bits | low bytes | high bytes | zeros |

Bits lie from the lowest of a byte to its highest. With B the words of the block, and i the number of a change in the block:

- *Positions* of changes are an Elias-Fano code. Each keeps l = floor(log2(B / n)) low bits, as they are, in the section of low
  bits. The high parts are in unary: bit ``(position >> l) + i`` of n + ((B - 1) >> l) is one. Where a bitmap of B bits is not
  larger than both together, it stands in place of the high parts, and l is 0. Both sides derive this from n and B.
- *Steps* are differences of ordered words, modulo 2^16, as int16. The order is that of floats: ``ordered(w)`` is ``~w`` for a
  negative w and ``w | 0x8000`` for others, so a weight that moves by one unit in the last place has the step 1 or -1.
- The bits i of *escapes* and *details* say what step i is:

      escape 0, detail 0   1
      escape 0, detail 1   -1
      escape 1, detail 0   its low byte, with that byte's sign
      escape 1, detail 1   its low byte and its high byte

  Low bytes of all escapes follow each other, and behind them the high bytes of those that have one. Classes are two planes of
  bits, and the bytes are apart, because counting ones then finds the bytes of any change without those before it.

[Note: damaged wires] A wire may be cut or changed on its way. Decoders never read or write beyond their tensors, and all of them
find the same damage. A slice is left alone if its offset and size are not inside the wire, an entry is not one that an encoder
writes, or the sizes of all payloads do not add up to the slice's size. A block is left alone if its positions do not rise or
leave the block, their number is not n, or its classes do not take e bytes. The operator reports the first damage of each slice.
Other damage cannot be told from data. Bits between sections are ignored.

[Note: bytes behind a slice's wire] The wires of K slices are rows of ``capacity`` bytes, of which a slice fills the first
``sizes[k]``. The bytes behind them are arbitrary: clearing them would cost as much as writing the slices.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from hf_zeropp import devices
from hf_zeropp.ops import changes_reference
from hf_zeropp.ops.changes_reference import BAD_SIZE, capacity, num_blocks
from hf_zeropp.ops.operator import Bytes, Filled, Int64s, Result, UpdatedBytes, check_size
from hf_zeropp.ops.register import operator


# The sizes come first among the results: an operator runs if its first result has elements, and slices may be empty.
@operator(
    changes_reference.encode_changes, counts=("slice_bytes",), sizes="int64_t*", wire="uint8_t*", starts="int64_t*"
)
def _encode_changes(input: Bytes, base: Bytes, num_slices: int) -> Result:
    slice_bytes = _slice_bytes("input", input, num_slices)
    check_size("base", base, input.numel())
    return _encoded(slice_bytes, num_slices, input.device)


def _encoded(slice_bytes: int, num_slices: int, device: torch.device) -> Result:
    filled = (
        Filled((num_slices,), torch.int64),
        Filled((num_slices, capacity(slice_bytes)), torch.uint8),
        Filled((num_slices, num_blocks(slice_bytes)), torch.int64),
    )
    return Result(device, (slice_bytes,), filled)


def _slice_bytes(name: str, data: Tensor, num_slices: int) -> int:
    if num_slices < 1 or data.numel() % (2 * num_slices):
        raise ValueError(
            f"expected num_slices >= 1 that cuts {name} into slices of whole 16-bit words, got {num_slices} for "
            f"{data.numel()} bytes"
        )
    return data.numel() // num_slices


def encode_changes(
    input: Tensor, base: Tensor, num_slices: int = 1, *, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Encode how the words of K slices differ from those of ``base``.

    Args:
        input: K slices of equal size, contiguous, of any dtype of 16 bits or more.
        base: as many bytes: the words that the receivers hold.
        num_slices: K.
        out: int64 [K], uint8 [K * capacity] and int64 [K * blocks] to fill, from ``changes_buffers``. None for new tensors.

    Returns:
        The sizes of the slices' wires, int64 [K], and their wires, uint8 [K, capacity], of which row k has ``sizes[k]`` bytes and
        then arbitrary ones. They lie where ``input`` does: on a GPU, reading the sizes waits for it.

    Raises:
        ValueError: tensors of different bytes, on different devices or with strides, or slices of half a word.
    """
    made = _encode_changes(_bytes_of("input", input), _bytes_of("base", base), num_slices, out=out)
    sizes, wire = made[:2]
    return sizes, wire.view(num_slices, -1)


def changes_buffers(slice_bytes: int, num_slices: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return tensors for ``encode_changes`` to fill, which may be used again: sizes, wire and starts of payloads."""
    return _encoded(slice_bytes, num_slices, device).empty()


@operator(
    changes_reference.apply_changes,
    counts=("wire_bytes", "num_slices", "slice_bytes"),
    failed="int64_t*",
    starts="int64_t*",
)
def _apply_changes(wire: Bytes, offsets: Int64s, sizes: Int64s, base: UpdatedBytes) -> Result:
    num_slices = sizes.numel()
    check_size("offsets", offsets, num_slices)
    slice_bytes = _slice_bytes("base", base, num_slices)
    filled = (
        Filled((num_slices,), torch.int64),
        Filled((num_slices, num_blocks(slice_bytes)), torch.int64),
    )
    return Result(base.device, (wire.numel(), num_slices, slice_bytes), filled)


def apply_changes(wire: Tensor, sizes: Tensor, base: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Bring the words of K slices up to date, where they lie.

    Args:
        wire: uint8, the wires of the slices.
        sizes: int64 [K], the bytes of each.
        base: the K slices that ``encode_changes`` was given as base, contiguous, of any dtype.
        offsets: int64 [K], where each wire begins. None where they are rows of ``capacity`` bytes.

    Returns:
        int64 [K]: 0 for a slice that is up to date, ``BAD_SIZE`` where its table and size do not fit, ``BAD_SIZE`` + 1 + b where
        block b is damaged. On a CPU it is always 0. On a GPU the host does not wait, and the caller looks later
        (``refuse_damaged``).

    Raises:
        ValueError: tensors that do not fit; on a CPU also a ``DamagedWireError``. Blocks that are whole are applied then.
    """
    if offsets is None:
        stride = capacity(base.nbytes // max(sizes.numel(), 1))
        offsets = torch.arange(sizes.numel(), device=sizes.device) * stride
    failed, _ = _apply_changes(wire, offsets, sizes, _bytes_of("base", base))
    if not devices.has_streams(failed.device) and failed.any():
        refuse_damaged(failed)
    return failed


class DamagedWireError(ValueError):
    """Bytes of changed words were cut or changed on their way, or made for other slices."""


def refuse_damaged(failed: Tensor) -> NoReturn:
    """Raise an error that says which slice ``apply_changes`` found damaged. The host waits.

    Args:
        failed: its result, not all 0.

    Raises:
        DamagedWireError: always.
    """
    damaged = int(failed.nonzero()[0])
    code = int(failed[damaged])
    part = "table or size" if code == BAD_SIZE else f"block {code - BAD_SIZE - 1}"
    raise DamagedWireError(
        f"apply_changes: slice {damaged} of {failed.numel()} is damaged in its {part}. The wire was cut or "
        "changed on its way, or made for other slices."
    )


def _bytes_of(name: str, data: Tensor) -> Tensor:
    # A view as bytes needs contiguous memory, and the check that follows could not say so.
    if not data.is_contiguous():
        raise ValueError(f"expected {name} contiguous, got shape {tuple(data.shape)} with strides {data.stride()}")
    return data.view(-1).view(torch.uint8)
