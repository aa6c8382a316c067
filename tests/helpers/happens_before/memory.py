"""Memory: who owns a block of it, who used it when, and which two uses race.

Two accesses of the same bytes race if at least one of them writes and neither happens before the other. An access is compared
with earlier ones of the same block, and with all accesses of blocks whose memory it may have got. The caching allocator gives the
memory of a freed block to the pool of the stream on which the block was born. The next allocation on that stream may get it at
once, whatever other streams still do with it, and allocations on other streams never do. ``record_stream`` says of a stream
that the block must not be given away before that stream has come to where it was when the block was freed.

Which freed block a new one gets depends on sizes and on what the allocator splits and merges. So every new block counts as the
successor of all blocks of its pool that were freed before.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from typing import NamedTuple

import torch

from happens_before.clocks import Stream, Timeline


class Place(NamedTuple):
    """An operation's name, the line that called it, and the step of FSDP2 (with its unit) within which it ran."""

    operator: str
    line: str
    step: str

    def __str__(self) -> str:
        return f"{self.operator} at {self.line}" + (f" in {self.step}" if self.step else "")


class Access(NamedTuple):
    """A read or a write of the bytes ``[start, end)`` of a block."""

    stream: Stream
    tick: int
    start: int
    end: int
    writes: bool
    place: Place

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.stream}: {self.place}"

    def happened_before(self, stream: Stream) -> bool:
        """Whether the next operation on ``stream`` comes after this access."""
        return stream.clock.get(self.stream, 0) >= self.tick

    def overlaps(self, other: Access) -> bool:
        return self.start < other.end and other.start < self.end

    def covers(self, other: Access) -> bool:
        return self.start <= other.start and other.end <= self.end


class Race(NamedTuple):
    """Two accesses that nothing orders.

    Attributes:
        first: the one that the host started first.
        second: the other.
        is_reuse: whether the first belongs to a block that was freed, and whose memory the second may have got.
    """

    first: Access
    second: Access
    is_reuse: bool

    def __str__(self) -> str:
        what = "freed memory, used again too early" if self.is_reuse else "the same memory"
        return f"race on {what}:\n    {self.first}\n    {self.second}"


@dataclasses.dataclass(eq=False)
class Block:
    """Memory from its allocation to its end.

    Attributes:
        birth: the stream that was current when it was allocated.
        heirlooms: the last access on each stream of the blocks whose memory it may have got.
        accesses: those that a later one may still race with.
        recorded: streams that ``record_stream`` named.
    """

    birth: Stream
    heirlooms: dict[Stream, Access] = dataclasses.field(default_factory=dict)
    accesses: dict[tuple[Stream, bool, int, int], Access] = dataclasses.field(default_factory=dict)
    recorded: set[Stream] = dataclasses.field(default_factory=set)


class Memory:
    """All blocks of one device.

    Attributes:
        races: each pair of places once.
        num_accesses: how many accesses were compared with those before them.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.races: list[Race] = []
        self.num_accesses = 0
        self._timeline = timeline
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], Block | None]] = {}
        self._pools: defaultdict[Stream, dict[Stream, Access]] = defaultdict(dict)
        self._reported: set[tuple[Place, Place]] = set()

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._blocks

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Note that the memory of a storage was allocated just now, on the current stream."""
        birth = self._timeline.current
        self._keep(storage, Block(birth, dict(self._pools[birth])))

    def exempt(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage is in the host's memory, which no stream touches."""
        self._keep(storage, None)

    def free(self, key: int) -> None:
        """Give a block to its pool. ``key`` is the address of the storage."""
        _, block = self._blocks.pop(key)
        if block is None:
            return
        pool = self._pools[block.birth]
        for access in block.accesses.values():
            if access.stream in block.recorded:
                continue  # the allocator waits until that stream has come here
            if access.stream not in pool or pool[access.stream].tick < access.tick:
                pool[access.stream] = access

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Note that the allocator must wait for ``stream`` before it gives the tensor's memory to another tensor."""
        if (block := self._block_of(tensor.untyped_storage())) is not None:
            block.recorded.add(stream)

    def access(self, tensor: torch.Tensor, stream: Stream, tick: int, place: Place, *, writes: bool) -> None:
        """Compare a read or a write of the tensor with all before it."""
        start, end = _extent(tensor)
        block = self._block_of(tensor.untyped_storage())
        if start == end or block is None:
            return
        self.num_accesses += 1
        access = Access(stream, tick, start, end, writes, place)
        for earlier in block.heirlooms.values():
            if not earlier.happened_before(stream):
                self._report(Race(earlier, access, is_reuse=True))
        superseded = []
        for key, earlier in block.accesses.items():
            if earlier.stream is not stream and (writes or earlier.writes) and earlier.overlaps(access):
                if not earlier.happened_before(stream):
                    self._report(Race(earlier, access, is_reuse=False))
            # This write comes after the earlier access. A later access that comes after this write therefore comes after both,
            # and one that does not is reported as a race with this write. So the earlier access need not be kept.
            if writes and access.covers(earlier):
                superseded.append(key)
        for key in superseded:
            del block.accesses[key]
        block.accesses[stream, writes, start, end] = access

    def _block_of(self, storage: torch.UntypedStorage) -> Block | None:
        if not self.knows(storage):
            # It was made before the checker began, or inside of an operator. Nothing is known of its past.
            self._keep(storage, Block(self._timeline.default))
        return self._blocks[storage._cdata][1]

    def _keep(self, storage: torch.UntypedStorage, block: Block | None) -> None:
        # A storage's Python object lives as long as the storage, so the callback tells when its memory is freed.
        key = storage._cdata
        self._blocks[key] = weakref.ref(storage, lambda _: self.free(key)), block

    def _report(self, race: Race) -> None:
        places = race.first.place, race.second.place
        if places not in self._reported:
            self._reported.add(places)
            self.races.append(race)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage and the one behind its last. Gaps between its elements count."""
    start = tensor.storage_offset() * tensor.itemsize
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize
