"""Python objects that ranks tell each other before collectives depend on them, and the words of errors that name ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def exchange(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return the values of all ranks of a group, in its order. Collective.

    Args:
        value: this rank's, which is pickled.
        group: None for the world.
    """
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def ranks_by(values: Iterable[tuple[int, _T]]) -> dict[_T, list[int]]:
    """Return the ranks that hold each value.

    Args:
        values: ranks, and what they hold.
    """
    ranks: dict[_T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def words_of(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks [0, 1]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
