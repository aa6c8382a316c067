"""``ZEROPP_CHECK=1``: a debugging aid that compares the nodes' copies of the weights with the masters.

Training on secondary shards that differ from the masters raises no error and gives bad results; with deltas, a difference between
nodes stays once it is there. Three things are compared, for each unit:

- *after every update*, all copies of a rank's slice with what the masters of that rank give, bit for bit. Copies that equal each
  other may all be old. The rank encodes its masters once more for it, read from the parameters and not from FSDP2's views of
  them. A delta is applied to the rank's own slice once more;
- *when ranks agree that a copy is fresh*, the masters with those that it was made of;
- *whenever ranks agree*, the masters of replicas (HSDP) with each other.

Every rank sends checksums to all ranks that hold copies of the unit. If two differ, all ranks that train the same part of the
model stop, also those of other replicas, and those that hold other experts. With tensor parallelism the ranks that train another
part stop in their next collective with these. The comparisons cost host synchronizations and two exchanges per unit, four where
experts have a mesh of their own, and seven with replicas, so they are off by default.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from hf_zeropp.comm.exchange import words_of
from hf_zeropp.comm.two_hops import Carrier, Secondary, TwoHopGather
from hf_zeropp.config import ENV_CHECK
from hf_zeropp.fsdp.comm_objects import of_this_package
from hf_zeropp.fsdp.units import Unit

logger = logging.getLogger(__name__)

TellFaults = Callable[[str, str], Sequence[str]]
"""Takes the name of a unit and what this rank found wrong with its copies, or nothing. Returns what all ranks found."""

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, with random bits: swapped words change the sum


class WrongCopies(RuntimeError):
    """Copies of the weights are not what they are taken for."""


def wants_check() -> bool:
    """Return whether ``ZEROPP_CHECK`` asks for the comparison.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(ENV_CHECK, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{ENV_CHECK} must be 0 or 1, got {value!r}.")
    return value == "1"


class SecondaryCheck:
    """Compares the secondary shards of all ranks. Every rank must call it, as a collective.

    Args:
        hpz_size: ranks that share one copy; the secondary shards of ranks that far apart must be equal.
        group: the ranks over which the model is sharded.
        replicas: the ranks that hold the same shard as this one; None without replicas (HSDP).
        tell: tells the other ranks of the model, and hears of theirs; None where ``group`` is all of them.
    """

    def __init__(
        self,
        hpz_size: int,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None = None,
        tell: TellFaults | None = None,
    ) -> None:
        self._hpz_size = hpz_size
        self._group = group
        self._replicas = replicas
        self._tell = tell

    @classmethod
    def of(
        cls,
        hpz_size: int | None,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None = None,
        tell: TellFaults | None = None,
    ) -> SecondaryCheck | None:
        """Return the check that ``ZEROPP_CHECK=1`` asks for; None, with a warning, where there are no copies."""
        if hpz_size is not None:
            return cls(hpz_size, group, replicas, tell)
        if dist.get_rank() == 0:
            logger.warning(
                "%s=1 compares the nodes' copies of the weights; with hpz_size=None there are none.", ENV_CHECK
            )
        return None

    def same_as_masters(self, unit: str, copies: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare the copies of ``unit`` with the masters.

        Args:
            unit: its name.
            copies: this rank's secondary shard, uint8 [Y, B].
            expected: the bytes that the masters of this rank give, uint8 [B].

        Raises:
            WrongCopies: on every rank, if a rank holds other bytes than the masters of their rank give.
        """
        sums = self._of_all_ranks(torch.stack([checksum(wire) for wire in (*copies, expected)]))
        said = ""
        if faults := list(self._faults(sums)):
            said = (
                f"{ENV_CHECK}: the secondary shards of unit {unit} differ from the masters: {'; '.join(faults[:4])} (seen on "
                f"rank {dist.get_rank()}). Weights were changed on one of them alone, encoded too early or too late, or "
                "damaged on the way: call handle.invalidate() on all ranks, and look for the cause."
            )
        self._stop_if_any(unit, said)

    def unchanged(self, unit: str, has_changed: torch.Tensor) -> None:
        """Compare whether the masters of ``unit`` have changed on any rank, though all ranks take its copies for fresh.

        Args:
            unit: its name.
            has_changed: int64 [1]: 1 if they have, on this rank.

        Raises:
            WrongCopies: on every rank, if they have.
        """
        ranks = dist.get_process_group_ranks(self._group)
        changed = [rank for rank, [flag] in zip(ranks, self._of_all_ranks(has_changed), strict=True) if flag]
        said = ""
        if changed:
            said = (
                f"{ENV_CHECK}: the weights of unit {unit} have changed on {words_of(changed)} since they were gathered, and "
                f"were taken for fresh (seen on rank {dist.get_rank()}). Call handle.invalidate() after writes that move no "
                "version counter."
            )
        self._stop_if_any(unit, said)

    def same_in_replicas(self, unit: str, masters: torch.Tensor) -> None:
        """Compare the masters of ``unit`` in all replicas.

        Args:
            unit: its name.
            masters: the checksum of this rank's masters, int64 [].

        Raises:
            WrongCopies: on every rank, if a rank holds others than those that have the same shard.
        """
        if self._replicas is None:
            return
        differs = torch.tensor([any(total != masters.item() for [total] in _all_of(masters.view(1), self._replicas))])
        # A rank that differs is seen by one rank of each replica, which tells its own replica. So all ranks raise.
        places = [place for place, [flag] in enumerate(self._of_all_ranks(differs.long().to(masters.device))) if flag]
        said = ""
        if places:
            ranks = dist.get_process_group_ranks(self._group)
            said = (
                f"{ENV_CHECK}: replicas hold different weights of unit {unit}, in the shards of "
                f"{words_of([ranks[place] for place in places])} and of the ranks with the same shards (seen on rank "
                f"{dist.get_rank()}). Weights were changed or loaded on one of them alone."
            )
        self._stop_if_any(unit, said)

    def _faults(self, sums: Sequence[Sequence[int]]) -> Iterator[str]:
        """Say which ranks hold wrong copies of whose slices. ``sums`` are, for each rank, of its copies and of its masters."""
        ranks = dist.get_process_group_ranks(self._group)
        for owner, (*_, expected) in enumerate(sums):
            # Rank x of every group of ``hpz_size`` ranks holds the slices of all ranks x, in the order of these groups.
            node, place = divmod(owner, self._hpz_size)
            holders = range(place, len(sums), self._hpz_size)
            wrong = [ranks[holder] for holder in holders if sums[holder][node] != expected]
            if len(wrong) == len(holders):
                yield f"rank {ranks[owner]} sent other weights than its masters hold, to {words_of(wrong)}"
            elif wrong:
                yield f"of rank {ranks[owner]}'s weights, {words_of(wrong)} {'hold' if wrong[1:] else 'holds'} others"

    def _of_all_ranks(self, own: torch.Tensor) -> list[list[int]]:
        return _all_of(own, self._group)

    def _stop_if_any(self, unit: str, fault: str) -> None:
        """Raise on all ranks of the model if this rank or another has found a fault."""
        # A rank that raised alone would leave ranks of other meshes waiting in the next collective that they share. Each raises
        # its own words where it has any.
        found = [fault] if self._tell is None else [fault, *self._tell(unit, fault)]
        if not any(found):
            return
        # A rank that ends before all have received what they compare would cut connections.
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=self._group)
        raise WrongCopies(next(filter(None, found)))


class CheckedUnit:
    """The check of one unit.

    Args:
        check: of the model.
        unit: the unit.
        hops: its gather in two hops.
    """

    def __init__(self, check: SecondaryCheck, unit: Unit, hops: TwoHopGather) -> None:
        self._check = check
        self._unit = unit
        self._hops = hops
        self._dtype = torch.float32
        self._expected: torch.Tensor | None = None
        self._taken: torch.Tensor | None = None

    def encoded(self, carrier: Carrier) -> None:
        """Note what the masters give, which ``carrier`` has encoded just now."""
        self._dtype = carrier.layouts.kept.raw_dtype
        self._expected = carrier.expected_slice(self._unit.masters(carrier.reads or self._dtype))
        self._taken = self._sum_of_masters()

    def landed(self, secondary: Secondary) -> None:
        """Compare all copies of the unit, which were brought up to date. Collective."""
        assert self._expected is not None
        self._check.same_as_masters(self._unit.name, secondary.own.view(self._hops.cross_hop.size, -1), self._expected)

    def agreed(self, *, is_fresh: bool) -> None:
        """Compare the masters of all replicas, and with those that were encoded if the copies are fresh. Collective."""
        self._check.same_in_replicas(self._unit.name, self._sum_of_masters())
        has_changed = torch.zeros(1, dtype=torch.int64, device=self._unit.device_type)
        if is_fresh and self._taken is not None:
            has_changed += self._sum_of_masters() != self._taken
        self._check.unchanged(self._unit.name, has_changed)

    def _sum_of_masters(self) -> torch.Tensor:
        return checksum(self._unit.masters(self._dtype).view(torch.uint8))


def _all_of(own: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    values = [torch.empty_like(own) for _ in range(group.size())]
    with of_this_package():
        dist.all_gather(values, own, group=group)
    return torch.stack(values).tolist()


def checksum(wire: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit checksum (0-d int64) of ``wire``, uint8 [n]. Changed, swapped and missing bytes change it."""
    # Eight bytes are mixed at a time, and int64 products wrap around, on every device alike.
    padded = torch.nn.functional.pad(wire, (0, -wire.numel() % 8)).view(torch.int64)
    places = torch.arange(1, padded.numel() + 1, device=wire.device) * _FACTOR
    mixed = (padded ^ places) * _FACTOR
    # A product carries bits upward only, so a change in the top bits would stay there. The shift brings it down.
    return (mixed ^ (mixed >> 29)).sum()
