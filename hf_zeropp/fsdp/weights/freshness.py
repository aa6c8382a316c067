"""One rank's view of whether the gathered copy of a unit still equals its weights.

See [Note: when a secondary shard is stale] and [Note: when a delta is enough] below.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from hf_zeropp import devices
from hf_zeropp.fsdp.comm_objects import record_event
from hf_zeropp.fsdp.units import Unit, local_tensor_of

# [Note: when a secondary shard is stale]
# A secondary shard is a copy of the weights. It serves until they change. A rank sees a change of its own shard by two signs, on
# every device:
#
# 1. *the stamp*: identity and version counters of the unit's parameters, which move in operations on the parameters;
# 2. *marks*: a torch optimizer that holds a parameter of the unit stepped, ``load_state_dict`` ran, or the user's code called
#    ``handle.invalidate()``. An optimizer's mark is set before its step as well: a step that raised half-way shows by it.
#
# No rank acts on its own answer. Before every forward pass the ranks exchange their answers for all units, and each unit
# is gathered anew if it changed on *any* rank (weight_decisions.py). A change made on one rank alone is then a gather more, not
# a hang.
#
# [Note: writes that move no counter]
# Some writes show by neither sign: through ``.data``, NumPy or pointers, by ``torch._foreach_*`` on DTensors, by
# ``torch.distributed.checkpoint.load`` in place. ``handle.invalidate()`` is for them. Where it was forgotten, a *fingerprint* of
# the shard tells: the sum of its bits. It is taken when the weights are sent, and again in each pass in which neither sign shows.
# A rank whose sum has changed says so (``Change.UNSEEN``), and all ranks raise. On a CPU the sum is known before the pass. On an
# accelerator the host does not wait for it, so a later pass raises, as a rule the next one, and one has computed with old copies.
# Sums of integers are exact in any order, and take no longer than the memory does (20 M weights in 7 ms on one core, and 22 ms by
# ``torch.hash_tensor``). A write that only moves 8-byte words to other places keeps the sum, and is not found.

# [Note: when a delta is enough]
# With ``qwz_mode="delta"`` a stale secondary shard is brought up to date by the difference between the weights and the copy.
# Differences are coarse where weights moved far, so they are sent only after changes by optimizers
# (``Change.STEPPED``). After any other change (``Change.EDITED``) whole weights cross: a resync. They also cross behind a
# checkpoint (``WeightGather.resync``), because a resumed run starts from the masters that it holds.
#
# Changed words (``qwz_mode="exact"``) bring a secondary shard up to date after any change. Whole weights cross only
# where the caller says that copies are not to be relied on (``Change.INVALID``).


MAX_LATE = 2
"""Passes that an accelerator may lag behind the host before the host waits for an answer about the weights."""


class Change(enum.IntEnum):
    """A change of a unit's weights since they were gathered. The larger one counts where ranks differ."""

    NONE = 0
    STEPPED = 1
    EDITED = 2
    UNSEEN = 3  # by counters and marks: [Note: writes that move no counter]
    INVALID = 4


class Freshness:
    """One rank's view of one unit.

    Args:
        unit: the unit.
        checks_steps: whether a write between an optimizer's step and the next gather must be told from the step. Only deltas
            need it.
        max_late: as of ``Fingerprint``.
    """

    def __init__(self, unit: Unit, *, checks_steps: bool = False, max_late: int = MAX_LATE) -> None:
        self._unit = unit
        self._fingerprint = Fingerprint(unit, max_late)
        self._checks_steps = checks_steps
        self._stamp: WeightStamp | None = None
        # Nothing was gathered yet, so the first gather must send whole weights.
        self._marked = Change.INVALID
        self._is_in_closure_step = False
        self._under_step = Change.NONE

    def taken(self, *, is_kept: bool) -> None:
        """Note that the unit's weights, as they are now, were gathered or are being sent.

        Args:
            is_kept: whether a copy is kept of them. Where none is, each gather takes the weights as they are, as in stock FSDP2.
        """
        if self._marked == Change.INVALID or not is_kept:
            self._fingerprint.forget()
        self._marked = Change.NONE
        if not self._is_in_closure_step:
            self._under_step = Change.NONE
        self._stamp = WeightStamp.of(self._unit.params)
        if is_kept:
            self._fingerprint.take()

    def mark(self, change: Change) -> None:
        """Note a change that the caller reports."""
        self._marked = max(self._marked, change)

    def before_step(self, *, has_closure: bool) -> None:
        """Note that an optimizer which holds a parameter of the unit begins a step. Changes up to now were not its own."""
        # Without deltas whole weights cross after an edit as after a step, so there is nothing to tell apart.
        if self._checks_steps and self._stamp is not None and not self._is_in_closure_step:
            # An edit must be noted now: after the step it could not be told from the step's own writes, and a delta would be
            # sent for it.
            if not self._stamp.matches(self._unit.params):
                self.mark(Change.EDITED)
        # Without a closure no forward pass runs inside of the step. One that runs before ``after_step`` then shows that the
        # step raised, and what it wrote until then counts as an edit.
        self._is_in_closure_step = has_closure
        # A step that raises half-way runs nothing behind it. The mark must stand by then.
        self._under_step = Change.STEPPED if has_closure else Change.EDITED

    def after_step(self) -> None:
        """Note that the step ended. It does not come after a step that raised: the mark of ``before_step`` tells of that one."""
        self._is_in_closure_step = False
        self._under_step = Change.NONE
        self.mark(Change.STEPPED)
        # Without deltas the mark is answer enough: every change means whole weights, so there is nothing to compare
        # later. With deltas, the stamp after the step shows whether anything else wrote between the step and the
        # next gather.
        if self._checks_steps:
            self._stamp = WeightStamp.of(self._unit.params)

    def change(self) -> Change:
        """Return what happened to the weights since ``taken``.

        On an accelerator this may start a comparison, and returns what earlier ones have found.
        """
        marked = max(self._marked, self._under_step)
        if marked == Change.INVALID:
            return marked
        # It counts also behind a step: a pass has computed with old copies.
        if self._fingerprint.has_found():
            return Change.UNSEEN
        if marked == Change.EDITED:
            return marked
        if marked == Change.STEPPED and not self._checks_steps:
            return Change.STEPPED
        assert self._stamp is not None
        if not self._stamp.matches(self._unit.params):
            # Optimizers with a closure (LBFGS) run forward passes between updates of one step. Weights that changed
            # there were changed by the optimizer.
            return max(marked, Change.STEPPED if self._is_in_closure_step else Change.EDITED)
        if marked == Change.NONE:  # reading the shards is the cost of this method, so it comes last
            self._fingerprint.compare()
        return Change.UNSEEN if self._fingerprint.has_found() else marked


@dataclasses.dataclass(frozen=True, eq=False)
class WeightStamp:
    """Identity and version counters of a unit's sharded parameters, and of their local tensors, at one moment.

    Both are kept: a DTensor's own counter moves with optimizers and with operations on the parameter, its local
    tensor's with writes through ``to_local()``. Conversions (``model.half()``) keep the parameter object and swap the
    local tensor inside. Writes through ``.data``, raw pointers, ``torch._foreach_*`` or collectives move nothing.
    """

    # An id may be taken again by the successor of a freed tensor, so there are references. Those to parameters are strong:
    # a weak one makes ``model.to()`` fail (``torch.utils.swap_tensors`` refuses tensors with weak references). Those to local
    # tensors are weak, or ``model.cpu()`` would leave the old shards in the memory of the GPU.
    params: tuple[DTensor, ...]
    local_tensors: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, params: Sequence[DTensor]) -> WeightStamp:
        """Take the stamp of ``params`` as they are now."""
        local_tensors = [local_tensor_of(param) for param in params]
        versions = tuple((param._version, local._version) for param, local in zip(params, local_tensors, strict=True))
        return cls(tuple(params), tuple(map(weakref.ref, local_tensors)), versions)

    def matches(self, params: Sequence[DTensor]) -> bool:
        """Return whether ``params`` are the same tensors at the same versions."""
        same_params = all(ours is theirs for ours, theirs in zip(self.params, params, strict=True))
        local_tensors = zip(self.local_tensors, map(local_tensor_of, params), strict=True)
        same_tensors = same_params and all(ours() is theirs for ours, theirs in local_tensors)
        return same_tensors and self.versions == WeightStamp.of(params).versions


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
