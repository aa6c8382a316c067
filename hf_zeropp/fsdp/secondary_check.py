"""``ZEROPP_CHECK=1``: do the nodes hold the same copy of the weights? Compared after every update, for whoever debugs.

A secondary shard that differs between nodes trains without an error, and badly: with deltas a difference, once there, stays.
Each rank's checksum goes to all ranks, so that all of them stop where two differ. It costs a host synchronization per unit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import NoReturn

import torch
import torch.distributed as dist

from hf_zeropp.config import ENV_CHECK

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, its bits at random: a word's place counts


def wants_check(environ: Mapping[str, str] | None = None) -> bool:
    """Raises: ValueError: the variable is neither 0 nor 1."""
    value = (os.environ if environ is None else environ).get(ENV_CHECK, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{ENV_CHECK} must be 0 or 1, got {value!r}.")
    return value == "1"


class SecondaryCheck:
    """Compares what ranks hold and what they are about to send. Collective over the world.

    Args:
        hpz_size: ranks that share one copy; the secondary shards of ranks that far apart must be equal.
    """

    def __init__(self, hpz_size: int) -> None:
        self._hpz_size = hpz_size

    def same_copies(self, unit: str, secondary: torch.Tensor) -> None:
        """Raises: RuntimeError: on every rank, where the copies of ``unit`` differ."""
        sums = _of_all_ranks(checksum(secondary))
        for rank, value in enumerate(sums):
            first = rank % self._hpz_size
            if value != sums[first]:
                _stop(
                    f"{ENV_CHECK}: the secondary shards of unit {unit} differ: rank {first} holds {sums[first]:#x}, "
                    f"rank {rank} {value:#x} (seen on rank {dist.get_rank()}). Weights were changed on one of them alone, or "
                    "bytes were damaged on the way: call handle.invalidate() on all ranks, and look for the cause."
                )


def _of_all_ranks(own: torch.Tensor) -> list[int]:
    values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(values, own)
    return torch.stack(values).tolist()


def _stop(message: str) -> NoReturn:
    """Raise on this rank, as on all others, when all have received what they compare: a rank that ends cuts connections."""
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    raise RuntimeError(message)


def checksum(wire: torch.Tensor) -> torch.Tensor:
    """A 64-bit number, 0-d int64, that any changed, swapped or missing byte of uint8 [n] changes (nearly always)."""
    padded = torch.nn.functional.pad(wire, (0, -wire.numel() % 8)).view(torch.int64)
    places = torch.arange(1, padded.numel() + 1, device=wire.device) * _FACTOR
    mixed = (padded ^ places) * _FACTOR
    return (mixed ^ (mixed >> 29)).sum()
