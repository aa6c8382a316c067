"""The sum of the bits of a unit's shards, which tells of writes that move no counter. See the note below."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hf_zeropp import devices
from hf_zeropp.fsdp.comm_objects import record_event
from hf_zeropp.fsdp.units import Unit

# [Note: writes that move no counter]
# Some writes show by neither sign: through ``.data``, NumPy or pointers, by ``torch._foreach_*`` on DTensors, by
# ``torch.distributed.checkpoint.load`` in place. ``handle.invalidate()`` is for them. Where it was forgotten, a *fingerprint* of
# the shard tells: the sum of its bits. It is taken when the weights are sent, and again in each pass in which neither sign shows.
# A rank whose sum has changed says so (``Change.UNSEEN``), and all ranks raise. On a CPU the sum is known before the pass. On an
# accelerator the host does not wait for it, so a later pass raises, as a rule the next one, and one has computed with old copies.
# Sums of integers are exact in any order, and take no longer than the memory does (20 M weights in 7 ms on one core, and 22 ms by
# ``torch.hash_tensor``). A write that only moves 8-byte words to other places keeps the sum, and is not found.

MAX_LATE = 2
"""Passes that an accelerator may lag behind the host before the host waits for an answer about the weights."""


class Fingerprint:
    """The sum of the bits of this rank's shards of one unit, as they were when a copy was made of them.

    Args:
        unit: the unit.
        max_late: the number of comparisons that may be under way on an accelerator before the host waits for the oldest.
    """

    def __init__(self, unit: Unit, max_late: int = MAX_LATE) -> None:
        self._unit = unit
        self._max_late = max_late
        self._places: list[tuple[int, int]] = []
        self._words: list[torch.Tensor] = []  # views of the shards, on a CPU
        self._taken: torch.Tensor | None = None
        self._written: torch.Event | None = None
        self._has_found = False
        self._under_way: deque[tuple[torch.Tensor, torch.Event | None]] = deque()

    def take(self) -> None:
        """Note the weights as they are now. Comparisons that are under way go on."""
        self._taken = self._sum()
        # Hops that are started ahead run on a stream of their own, and so does this.
        self._written = None if self._taken is None else record_event(self._taken.device)

    def forget(self) -> None:
        """Forget what was noted and found: no copy is made of these weights, or it is given up."""
        self._taken, self._has_found = None, False
        self._under_way.clear()

    def compare(self) -> None:
        """Compare the weights with those that were noted. On an accelerator the answer comes later."""
        if self._taken is None:
            return
        if self._written is not None:
            torch.accelerator.current_stream().wait_event(self._written)
        other = self._sum() != self._taken
        assert isinstance(other, torch.Tensor)
        answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=other.device.type != "cpu")
        answer.copy_(other, non_blocking=True)
        self._under_way.append((answer, record_event(other.device)))

    def has_found(self) -> bool:
        """Return whether a comparison has found other weights, as far as answers have come."""
        while self._under_way:
            answer, is_there = self._under_way[0]
            if is_there is not None and not is_there.query():
                if len(self._under_way) <= self._max_late:
                    break
                is_there.synchronize()  # the host is that many passes ahead
            self._has_found = self._has_found or bool(answer)
            self._under_way.popleft()
        return self._has_found

    def _sum(self) -> torch.Tensor | None:
        shards = self._unit.shard_memory()
        if shards is None or not shards:
            return None
        if devices.has_streams(shards[0].device):  # one launch for each parameter would take longer than joining them
            dtypes = {shard.dtype for shard in shards}
            return sum_of_bits([self._unit.flat_shard(dtypes.pop() if len(dtypes) == 1 else torch.float32)])
        # Views are kept while the shards stay where they are: making them takes longer than reading a small parameter. A view
        # holds its memory, so no other tensor can come to lie at its address.
        places = [(shard.data_ptr(), shard.nbytes) for shard in shards]
        if places != self._places:
            self._places, self._words = places, _words_of(shards)
        return _sum_of_words(self._words)


def sum_of_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the bits of contiguous tensors [...], as 0-d int64 that wraps around. The host does not wait.

    It is that of the memory's 64-bit words. So tensors of equal bits have equal sums if they begin alike within a word.
    """
    return _sum_of_words(_words_of(tensors))


def _words_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the tensors as int64 words, and of bytes that fill no word as uint8."""
    words = []
    for tensor in tensors:
        data = tensor.detach().view(-1).view(torch.uint8)
        # A view as words begins where a word of the memory does.
        start = min(-data.storage_offset() % 8, data.numel())
        end = data.numel() - (data.numel() - start) % 8
        whole = data[start:end]
        words += [data[:start], whole.view(torch.int64) if whole.numel() else whole, data[end:]]
    return [view for view in words if view.numel()] or words[:1]


def _sum_of_words(words: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([view.sum() for view in words]).sum()
