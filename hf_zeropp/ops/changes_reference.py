"""The operators of changed words in plain PyTorch: the oracle of the tests, and the fallback without compiled kernels.

``encode_changes`` and ``apply_changes`` take the arguments of the operators of their names (``changes_format.py``, which also
describes the bytes), in that order. Compiled kernels do the same bit for bit, also with wires that are damaged.

All blocks of a piece are computed at once. A bit of the wire is an element of a boolean tensor here, so most lines below say
where the bits of all changes of all blocks lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_WORDS = 8192
"""Words of a block; the last one of a slice may have fewer."""
COUNT_BITS = 14
"""Bits of a table entry that count changes. The bytes of escapes are counted above them."""
ESCAPE_BITS = 15
WHOLE = 1 << 31
"""The table entry of a block that is stored whole."""
ENTRY_BYTES = 4
"""Bytes of a table entry. Payloads are multiples of it."""
BAD_SIZE = 1
"""In ``failed``: the sizes in the table do not add up to the size of the slice. Higher by b + 1: block b is damaged."""

_PIECE = 128  # blocks that are computed at once: their temporaries take some 200 MB


def num_blocks(slice_bytes: int) -> int:
    """Return how many blocks a slice has."""
    return -(-slice_bytes // (2 * BLOCK_WORDS))


def align(nbytes: Tensor | int) -> Tensor | int:
    """Round up to a multiple of ``ENTRY_BYTES``."""
    return (nbytes + (ENTRY_BYTES - 1)) // ENTRY_BYTES * ENTRY_BYTES


def capacity(slice_bytes: int) -> int:
    """Return the most bytes that the wire of a slice of ``slice_bytes`` bytes takes."""
    return num_blocks(slice_bytes) * ENTRY_BYTES + int(align(slice_bytes))


class Sections(NamedTuple):
    """Offsets of the sections of payloads, in bytes from the start of each: int64 tensors with an element for each block.

    Args:
        is_bitmap: positions are a bitmap.
        width: low bits of a position that are stored as they are.
        escapes: of the first plane of classes. The bits of high parts, or the bitmap, come before it.
        details: of the second plane of classes.
        lows: of the low bits of positions.
        low_bytes: of the low bytes of escapes.
    """

    is_bitmap: Tensor
    width: Tensor
    escapes: Tensor
    details: Tensor
    lows: Tensor
    low_bytes: Tensor

    def nbytes(self, count: Tensor, escape_bytes: Tensor) -> Tensor:
        """Return the bytes of payloads with ``count`` changes, padding included."""
        return torch.where(count > 0, align(self.low_bytes + escape_bytes), 0)


def sections(count: Tensor, words: Tensor) -> Sections:
    """Return the sections of payloads with ``count`` changes, in blocks of ``words`` words."""
    width = torch.frexp((words // count.clamp(min=1)).clamp(min=1).double()).exponent.long() - 1  # floor(log2)
    high_bits = count + ((words - 1) >> width)
    is_bitmap = high_bits + count * width >= words
    width = torch.where(is_bitmap, 0, width)
    escapes = (torch.where(is_bitmap, words, high_bits) + 7) // 8
    plane = (count + 7) // 8
    lows = escapes + 2 * plane
    return Sections(is_bitmap, width, escapes, escapes + plane, lows, lows + (count * width + 7) // 8)


def words_of_blocks(count: int, slice_bytes: int, device: torch.device) -> Tensor:
    """Return the words of each of the ``count`` blocks of a slice."""
    begins = torch.arange(count, device=device) * BLOCK_WORDS
    return (slice_bytes // 2 - begins).clamp(max=BLOCK_WORDS)


def ordered(words: Tensor) -> Tensor:
    """Map words to integers that are ordered as the floats with these bits are. One unit in the last place becomes 1."""
    return torch.where(words >= 0x8000, 0xFFFF - words, words + 0x8000)


def unordered(integers: Tensor) -> Tensor:
    """Map back: the inverse of ``ordered``."""
    return torch.where(integers >= 0x8000, integers - 0x8000, 0xFFFF - integers)


def _as_words(data: Tensor) -> Tensor:
    # Bytes may begin at an odd address, where no view of words is possible.
    pairs = data.reshape(-1, 2).long()
    return pairs[:, 0] + 256 * pairs[:, 1]


def _as_bytes(words: Tensor) -> Tensor:
    return torch.stack([words % 256, words // 256], dim=1).to(torch.uint8).flatten()


def _exclusive(values: Tensor) -> Tensor:
    """Return the sum of all values before each."""
    return values.cumsum(0) - values


def _ranks(selected: Tensor, block: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return how many of the ``selected`` changes of its block come before each change, and how many each block has."""
    counts = torch.zeros(blocks, dtype=torch.int64, device=selected.device).index_add_(0, block, selected.long())
    return _exclusive(selected.long()) - _exclusive(counts)[block], counts


# ---- Encode.


def encode_changes(input: Tensor, base: Tensor, num_slices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of bytes and of their base -> sizes [K], wire [K, capacity] and the starts of payloads [K, blocks]."""
    slice_bytes = input.numel() // num_slices
    blocks = num_blocks(slice_bytes)
    wire = torch.zeros(num_slices, capacity(slice_bytes), dtype=torch.uint8, device=input.device)
    sizes = torch.zeros(num_slices, dtype=torch.int64, device=input.device)
    starts = torch.zeros(num_slices, blocks, dtype=torch.int64, device=input.device)
    for index, (news, olds) in enumerate(zip(input.view(num_slices, -1), base.view(num_slices, -1), strict=True)):
        encoded = _encode_slice(news, olds)
        sizes[index] = encoded.numel()
        wire[index, : encoded.numel()] = encoded
    return sizes, wire, starts


def _encode_slice(news: Tensor, olds: Tensor) -> Tensor:
    piece_bytes = 2 * _PIECE * BLOCK_WORDS
    pieces = [_encode_piece(*both) for both in zip(news.split(piece_bytes), olds.split(piece_bytes), strict=True)]
    if news.numel() == 0:
        return news
    table = torch.cat([entries for entries, _ in pieces])
    shifts = torch.arange(0, 8 * ENTRY_BYTES, 8, device=table.device)
    table_bytes = (table[:, None] >> shifts & 0xFF).to(torch.uint8).flatten()
    return torch.cat([table_bytes, *(payload for _, payload in pieces)])


class _Changes(NamedTuple):
    """Every changed word of a piece: its block, its position there, its number among the changes of the block, and its step."""

    block: Tensor
    position: Tensor
    number: Tensor
    step: Tensor

    @property
    def escape(self) -> Tensor:
        """Whether the step has a low byte."""
        return self.step.abs() != 1

    @property
    def wide(self) -> Tensor:
        """Whether the step has a high byte as well."""
        return (self.step < -128) | (self.step > 127)

    def keep(self, which: Tensor) -> _Changes:
        """Return some of the changes."""
        return _Changes(*(values[which] for values in self))


def _find_changes(new: Tensor, old: Tensor, blocks: int) -> _Changes:
    place = (new != old).nonzero().squeeze(1)
    block = place // BLOCK_WORDS
    index, _ = _ranks(torch.ones_like(block, dtype=torch.bool), block, blocks)
    step = (ordered(new[place]) - ordered(old[place]) + 0x8000) % 0x10000 - 0x8000
    return _Changes(block, place % BLOCK_WORDS, index, step)


def _encode_piece(new_bytes: Tensor, old_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the table entries of some blocks, and their payloads."""
    blocks = num_blocks(new_bytes.numel())
    words = words_of_blocks(blocks, new_bytes.numel(), new_bytes.device)
    changes = _find_changes(_as_words(new_bytes), _as_words(old_bytes), blocks)
    count = changes.block.bincount(minlength=blocks)
    escapes = changes.block[changes.escape].bincount(minlength=blocks)
    escape_bytes = escapes + changes.block[changes.wide].bincount(minlength=blocks)
    at = sections(count, words)
    coded_bytes, whole_bytes = at.nbytes(count, escape_bytes), align(2 * words)
    is_whole = coded_bytes >= whole_bytes
    nbytes = torch.where(is_whole, whole_bytes, coded_bytes)
    start = _exclusive(nbytes)
    coded = changes.keep(~is_whole[changes.block])
    payload = _pack_bits(_bits_of(coded, at, start, int(nbytes.sum())))
    _write_escapes(coded, start + at.low_bytes, escapes, payload)
    for b in is_whole.nonzero().flatten().tolist():
        whole = new_bytes[2 * BLOCK_WORDS * b : 2 * BLOCK_WORDS * (b + 1)]
        payload[int(start[b]) : int(start[b]) + whole.numel()] = whole
    return torch.where(is_whole, WHOLE, count | escape_bytes << COUNT_BITS), payload


def _bits_of(changes: _Changes, at: Sections, start: Tensor, nbytes: int) -> Tensor:
    """Return the bits of payloads of ``nbytes`` bytes, but for the bytes of escapes."""
    bits = torch.zeros(8 * nbytes, dtype=torch.bool, device=start.device)
    block, position, index, step = changes
    first, width = 8 * start[block], at.width[block]
    bits[first + torch.where(at.is_bitmap[block], position, (position >> width) + index)] = True
    bits[first + 8 * at.escapes[block] + index] = changes.escape
    bits[first + 8 * at.details[block] + index] = torch.where(changes.escape, changes.wide, step < 0)
    for bit in range(BLOCK_WORDS.bit_length() - 1):
        has_bit = width > bit
        bits[(first + 8 * at.lows[block] + index * width + bit)[has_bit]] = (position >> bit & 1)[has_bit] == 1
    return bits


def _write_escapes(changes: _Changes, begin: Tensor, escapes: Tensor, payload: Tensor) -> None:
    """Write the low bytes of each block from ``begin`` on, and its high bytes behind its ``escapes`` low bytes."""
    for which, first, shift in ((changes.escape, begin, 0), (changes.wide, begin + escapes, 8)):
        some = changes.keep(which)
        rank, _ = _ranks(torch.ones_like(some.block, dtype=torch.bool), some.block, begin.numel())
        payload[first[some.block] + rank] = (some.step >> shift & 0xFF).to(torch.uint8)


def _pack_bits(bits: Tensor) -> Tensor:
    return (bits.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
        1, dtype=torch.uint8
    )


# ---- Apply.


def apply_changes(wire: Tensor, offsets: Tensor, sizes: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Update slices of bytes by their changes -> what failed [K], and the starts of payloads [K, blocks]."""
    num_slices = sizes.numel()
    slice_bytes = base.numel() // num_slices
    blocks = num_blocks(slice_bytes)
    failed = torch.zeros(num_slices, dtype=torch.int64, device=base.device)
    starts = torch.zeros(num_slices, blocks, dtype=torch.int64, device=base.device)
    spans = zip(offsets.tolist(), sizes.tolist(), base.view(num_slices, -1), strict=True)
    for index, (offset, size, slice) in enumerate(spans):
        is_inside = 0 <= offset <= wire.numel() and 0 <= size <= wire.numel() - offset
        failed[index] = _apply_slice(wire.view(-1)[offset : offset + size], slice) if is_inside else BAD_SIZE
    return failed, starts


def _apply_slice(encoded: Tensor, slice: Tensor) -> int:
    """Return 0, ``BAD_SIZE``, or ``BAD_SIZE`` + 1 + the first block that is damaged."""
    blocks = num_blocks(slice.numel())
    if encoded.numel() < blocks * ENTRY_BYTES:
        return BAD_SIZE
    entries = read_table(encoded, blocks)
    nbytes = payload_bytes(entries, slice.numel())
    if (nbytes < 0).any() or int(nbytes.sum()) != encoded.numel() - blocks * ENTRY_BYTES:
        return BAD_SIZE
    starts = (_exclusive(nbytes) + blocks * ENTRY_BYTES).tolist() + [encoded.numel()]
    failed = 0
    for b in range(0, blocks, _PIECE):
        end = min(b + _PIECE, blocks)
        here = slice[2 * BLOCK_WORDS * b : 2 * BLOCK_WORDS * end]
        damaged = _apply_piece(entries[b:end], nbytes[b:end], encoded[starts[b] : starts[end]], here).nonzero()
        if damaged.numel() and not failed:
            failed = BAD_SIZE + 1 + b + int(damaged[0])
    return failed


def read_table(encoded: Tensor, blocks: int) -> Tensor:
    """Return the table entries at the start of a slice's wire, int64."""
    shifts = torch.arange(0, 8 * ENTRY_BYTES, 8, device=encoded.device)
    return (encoded[: blocks * ENTRY_BYTES].view(blocks, ENTRY_BYTES).long() << shifts).sum(1)


def payload_bytes(entries: Tensor, slice_bytes: int) -> Tensor:
    """Return the bytes of each block's payload; -1 where no block has this table entry."""
    words = words_of_blocks(entries.numel(), slice_bytes, entries.device)
    count, escape_bytes = _counts(entries)
    nbytes = sections(count, words).nbytes(count, escape_bytes)
    is_coded = (entries >> COUNT_BITS + ESCAPE_BITS == 0) & (count <= words) & (escape_bytes <= 2 * count)
    coded = torch.where(is_coded & (nbytes < align(2 * words)), nbytes, -1)
    return torch.where(entries == WHOLE, align(2 * words), coded)


def _counts(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the changes and the bytes of escapes that table entries count; those of whole blocks count none."""
    return entries & (1 << COUNT_BITS) - 1, entries >> COUNT_BITS & (1 << ESCAPE_BITS) - 1


def _apply_piece(entries: Tensor, nbytes: Tensor, payload: Tensor, data: Tensor) -> Tensor:
    """Update some blocks. Returns which of them are damaged; they are left as they are."""
    words = words_of_blocks(entries.numel(), data.numel(), entries.device)
    count, escape_bytes = _counts(entries)
    at, start = sections(count, words), _exclusive(nbytes)
    bits = (payload[:, None] >> torch.arange(8, dtype=torch.uint8, device=entries.device) & 1).flatten() == 1
    block, position, index, damaged = _read_positions(bits, at, start, count, words)
    step, fits = _read_steps(bits, payload, at, start, escape_bytes, block, index)
    damaged |= ~fits
    good = ~damaged[block]
    _change(data, (block * BLOCK_WORDS + position)[good], step[good])
    for b in (entries == WHOLE).nonzero().flatten().tolist():
        here = data[2 * BLOCK_WORDS * b : 2 * BLOCK_WORDS * (b + 1)]
        here.copy_(payload[int(start[b]) : int(start[b]) + here.numel()])
    return damaged


def _read_positions(
    bits: Tensor, at: Sections, start: Tensor, count: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return block, position and number of each change, and which blocks are damaged.

    A block whose ones are not ``count`` has no changes in the result: the other sections would be read by their number.
    """
    blocks, device = count.numel(), count.device
    first_bytes = torch.where(count > 0, at.escapes, 0)
    owner = torch.arange(blocks, device=device).repeat_interleave(8 * first_bytes)
    offset = torch.arange(owner.numel(), device=device) - _exclusive(8 * first_bytes)[owner]
    is_one = bits[8 * start[owner] + offset]
    damaged = owner[is_one].bincount(minlength=blocks) != count
    keep = is_one & ~damaged[owner]
    block, one = owner[keep], offset[keep]
    index, _ = _ranks(torch.ones_like(block, dtype=torch.bool), block, blocks)
    width = at.width[block]
    position = torch.where(at.is_bitmap[block], one, (one - index) << width)
    for bit in range(BLOCK_WORDS.bit_length() - 1):
        has_bit = width > bit
        low = bits[(8 * (start + at.lows)[block] + index * width + bit)[has_bit]]
        position[has_bit] |= low.long() << bit
    falls = (index > 0) & (position <= torch.nn.functional.pad(position[:-1], (1, 0)))
    damaged[block[falls | (position >= words[block])]] = True
    return block, position, index, damaged


def _read_steps(
    bits: Tensor, payload: Tensor, at: Sections, start: Tensor, escape_bytes: Tensor, block: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the step of each change, and in which blocks the classes take ``escape_bytes``. Others have arbitrary steps."""
    escape = bits[8 * (start + at.escapes)[block] + index]
    detail = bits[8 * (start + at.details)[block] + index]
    low_rank, escapes = _ranks(escape, block, start.numel())
    high_rank, wides = _ranks(escape & detail, block, start.numel())
    fits = escapes + wides == escape_bytes
    narrow, wide = fits[block] & escape & ~detail, fits[block] & escape & detail
    step = torch.where(detail, -1, 1)
    low_at = (start + at.low_bytes)[block] + low_rank
    high_at = (start + at.low_bytes + escapes)[block] + high_rank
    step[narrow] = payload[low_at[narrow]].view(torch.int8).long()
    step[wide] = payload[low_at[wide]].long() + 256 * payload[high_at[wide]].long()
    return step, fits


def _change(data: Tensor, place: Tensor, step: Tensor) -> None:
    """Add the steps to the ordered forms of the words at ``place``, modulo 2^16."""
    pairs = data.view(-1, 2)
    words = unordered((ordered(_as_words(pairs[place].flatten())) + step) % 0x10000)
    pairs[place] = _as_bytes(words).view(-1, 2)
