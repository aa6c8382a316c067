"""Reports of ranks about timed steps or tokens, and how the reports of all ranks become one figure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Measurement:
    """One rank's report of one measurement.

    Attributes:
        step_ends: when the measurement started and when each step ended, in seconds on the monotonic clock of the
            machine, which all ranks share.
        link: bytes that this rank's node sent (``tx``) and received (``rx``) over its link, over all steps.
        counted: bytes that entered this node from others by the package's own accounting; None where it does not run.
        loss: the loss of the last micro-step.
    """

    step_ends: list[float]
    link: dict[str, int]
    counted: int | None
    loss: float


Round = list[Measurement]
"""The reports of all ranks about the same steps, in rank order."""


def step_seconds(ranks: Round) -> list[float]:
    """Return how long each step took. A step ends when the last rank has ended it."""
    ends = [max(moment) for moment in zip(*(measured.step_ends for measured in ranks), strict=True)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def busiest_link_bytes(rounds: list[Round], ranks_per_node: int) -> int:
    """Return the bytes in the busier direction of the busiest node's link, over all rounds."""
    nodes = _by_node(rounds, ranks_per_node)
    return max(sum(measured.link[way] for measured in node) for node in nodes for way in ("tx", "rx"))


def largest_counted_bytes(rounds: list[Round], ranks_per_node: int) -> int | None:
    """Return the counted bytes of the node with the most, over all rounds; None where nothing counts."""
    nodes = _by_node(rounds, ranks_per_node)
    counts = [[measured.counted for measured in node if measured.counted is not None] for node in nodes]
    return max(map(sum, counts)) if counts[0] else None


def _by_node(rounds: list[Round], ranks_per_node: int) -> list[list[Measurement]]:
    """Return each node's measurements, one per round. The ranks of a node read the same counters: the first stands."""
    return [[ranks[first] for ranks in rounds] for first in range(0, len(rounds[0]), ranks_per_node)]
