"""``ZEROPP_CHECK=1``: a debugging aid that compares the nodes' copies of the weights with the masters.

Training on secondary shards that differ from the masters raises no error and gives bad results; with deltas, a difference between
nodes stays once it is there. Two things are compared, for each unit:

- *after every update*, all copies of a rank's slice with what the masters of that rank give, bit for bit. Copies that equal each
  other may all be old. The rank encodes its masters once more for it, read from the parameters and not from FSDP2's views of
  them. A delta is applied to the rank's own slice once more;
- *whenever ranks agree*, the masters of replicas (HSDP) with each other.

Every rank sends checksums to all ranks that hold copies of the unit. If two differ, all ranks that train the same part of the
model stop, also those of other replicas, and those that hold other experts. With tensor parallelism the ranks that train another
part stop in their next collective with these. The comparisons cost host synchronizations and two exchanges per unit, four where
experts have a mesh of their own, and seven with replicas, so they are off by default.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from hf_zeropp import ops
from hf_zeropp.comm.exchange import words_of
from hf_zeropp.comm.two_hops import Carrier, Delta, Secondary, TwoHopGather
from hf_zeropp.config import ENV_CHECK
from hf_zeropp.dtensors import local_tensor_of
from hf_zeropp.fsdp.units import Unit

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
    """Compares the copies of one unit. All ranks over which it is sharded must call it alike, and so must their replicas.

    Args:
        unit: the unit.
        hops: its gather in two hops. The secondary shards of ranks as far apart as its node hop has ranks must be equal.
        tell: takes the unit's name and what this rank found wrong, and returns what all ranks of the model found; None where the
            unit is sharded over all of them.
    """

    def __init__(self, unit: Unit, hops: TwoHopGather, tell: Callable[[str, str], Sequence[str]] | None = None) -> None:
        self._unit = unit
        self._hops = hops
        self._tell = tell
        self._dtype = torch.float32
        self._expected: torch.Tensor | None = None

    def encoded(self, carrier: Carrier) -> None:
        """Note what the masters give, which ``carrier`` has encoded just now."""
        self._dtype = carrier.layouts.kept.raw_dtype
        self._expected = expected_slice(carrier, masters_of(self._unit, carrier.reads or self._dtype))

    def landed(self, secondary: Secondary) -> None:
        """Compare all copies of the unit, which were brought up to date, with the masters.

        Raises:
            WrongCopies: on every rank, if a rank holds other bytes than the masters of their rank give.
        """
        assert self._expected is not None
        wires = (*secondary.own.view(self._hops.cross_hop.size, -1), self._expected)
        faults = list(self._faults(_all_of(torch.stack([checksum(wire) for wire in wires]), self._unit.shard_group)))
        self._stop_if_any(
            faults,
            f"{ENV_CHECK}: the secondary shards of unit {self._unit.name} differ from the masters: {'; '.join(faults[:4])} (seen "
            f"on rank {dist.get_rank()}). Weights were changed on one of them alone, encoded too early or too late, or "
            "damaged on the way: call handle.invalidate() on all ranks, and look for the cause.",
        )

    def agreed(self) -> None:
        """Compare the masters of all replicas.

        Raises:
            WrongCopies: on every rank, if they differ on any.
        """
        if (replicas := self._unit.replica_group) is not None:
            masters = checksum(masters_of(self._unit, self._dtype).view(torch.uint8))
            differs = any(total != masters.item() for [total] in _all_of(masters.view(1), replicas))
            # A rank that differs is seen by one rank of each replica, which tells its own replica. So all ranks raise.
            flags = _all_of(torch.tensor([int(differs)], device=self._unit.device.type), self._unit.shard_group)
            ranks = dist.get_process_group_ranks(self._unit.shard_group)
            places = [rank for rank, [is_set] in zip(ranks, flags, strict=True) if is_set]
            self._stop_if_any(
                places,
                f"{ENV_CHECK}: replicas hold different weights of unit {self._unit.name}, in the shards of {words_of(places)} "
                f"and of the ranks with the same shards (seen on rank {dist.get_rank()}). Weights were changed or loaded on "
                "one of them alone.",
            )

    def _faults(self, sums: Sequence[Sequence[int]]) -> Iterator[str]:
        """Say which ranks hold wrong copies of whose slices. ``sums`` are, for each rank, of its copies and of its masters."""
        ranks, hpz_size = dist.get_process_group_ranks(self._unit.shard_group), self._hops.node_hop.size
        for owner, (*_, expected) in enumerate(sums):
            # Rank x of every group of ``hpz_size`` ranks holds the slices of all ranks x, in the order of these groups.
            node, place = divmod(owner, hpz_size)
            holders = range(place, len(sums), hpz_size)
            wrong = [ranks[holder] for holder in holders if sums[holder][node] != expected]
            if len(wrong) == len(holders):
                yield f"rank {ranks[owner]} sent other weights than its masters hold, to {words_of(wrong)}"
            elif wrong:
                yield f"of rank {ranks[owner]}'s weights, {words_of(wrong)} {'hold' if wrong[1:] else 'holds'} others"

    def _stop_if_any(self, places: Sequence[object], fault: str) -> None:
        """Raise on all ranks of the model if there are any ``places`` with the ``fault``, or another rank has found one."""
        # A rank that raised alone would leave ranks of other meshes waiting in the next collective that they share. Each raises
        # its own words where it has any.
        fault = fault if places else ""
        found = [fault] if self._tell is None else [fault, *self._tell(self._unit.name, fault)]
        if not any(found):
            return
        # A rank that ends before all have received what they compare would cut connections.
        with contextlib.suppress(RuntimeError):
            dist.barrier(group=self._unit.shard_group)
        raise WrongCopies(next(filter(None, found)))


def expected_slice(carrier: Carrier, masters: torch.Tensor) -> torch.Tensor:
    """Return the bytes that this rank's slice has once ``masters`` [S] have crossed, in fp32 for a delta. It sends nothing."""
    layouts = carrier.layouts
    if not isinstance(carrier, Delta):
        return ops.quantize(masters, layouts.kept)
    assert layouts.delta is not None
    own_slice = carrier.hops.own_slice(carrier.secondary)
    wire = ops.quantize_difference(masters, own_slice, layouts.kept, layouts.delta)
    return ops.dequantize_update(wire, layouts.delta, own_slice, layouts.kept)


def masters_of(unit: Unit, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``unit.flat_shard`` returns, read from the parameters themselves."""
    sizes = [shard.padded_numel for shard in unit.param_shards]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=unit.device)
    for place, param in zip(flat.split(sizes), unit.params, strict=True):
        local = local_tensor_of(param).detach().reshape(-1)
        place[: local.numel()].copy_(local)
    return flat


def _all_of(own: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    values = [torch.empty_like(own) for _ in range(group.size())]
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
