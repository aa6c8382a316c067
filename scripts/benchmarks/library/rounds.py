"""Timed steps of several variants in turns: what a rank reports, and how the reports of all ranks become one figure.

Variants measured one after the other would differ by whatever else the machine did meanwhile: on a shared machine that is
more than most differences between them. Each round therefore times a few steps of every variant, and medians are compared.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from library.cluster import Ranks
from library.network import link_bytes

if TYPE_CHECKING:
    from hf_zeropp import ZeroPPHandle


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


def timed(run: Callable[[list[float]], float], handle: ZeroPPHandle | None) -> Measurement:
    """Measure steps on this rank. All ranks call it together.

    Args:
        run: makes the steps, appends the moment at which each ended to its argument, and returns a loss.
        handle: of the model, whose traffic begins anew; None without this package.

    Returns:
        The moments, and the bytes of all steps on the node's link and by the package's own account.
    """
    import torch.distributed as dist

    dist.barrier()
    if handle:
        handle.traffic.reset()
    # All ranks of a node share its link's counters, so none may send between another's reading and the steps. Both
    # readings follow a barrier, and the second barrier keeps the first step behind the slowest rank's reading.
    # A barrier itself sends a few hundred bytes.
    before = link_bytes()
    dist.barrier()
    ends = [time.monotonic()]
    loss = run(ends)
    dist.barrier()
    link = {way: count - before[way] for way, count in link_bytes().items()}
    return Measurement(ends, link, handle.traffic.cross_node_bytes if handle else None, loss)


def timed_steps(step: Callable[[], float], steps: int, handle: ZeroPPHandle | None) -> Measurement:
    """Measure so many calls of ``step``, which returns a loss. See ``timed``."""

    def train(ends: list[float]) -> float:
        loss = float("nan")
        for _ in range(steps):
            loss = step()
            ends.append(time.monotonic())
        return loss

    return timed(train, handle)


def measure_in_turns(
    runs: dict[str, Ranks], *arguments: Any, steps: int, seconds: float, rounds: int
) -> Iterator[tuple[str, list[Round]]]:
    """Time steps of variants in turns, behind one step of each that shows for how many steps there is time.

    Each variant is given with its rounds when its last one has ended, so that a study that is stopped has what it measured.

    Args:
        runs: ranks by the variant's name. Their method ``measure`` takes the number of steps, and ``arguments``.
        arguments: as above.
        steps: timed of each variant, at most.
        seconds: that they may take together; at least 3 steps are made.
        rounds: in which the variants take turns.
    """
    left = {}
    for name, ranks in runs.items():
        (first,) = step_seconds(ranks.call("measure", 1, *arguments))
        left[name] = max(3, min(steps, int(seconds / first)))
    found: dict[str, list[Round]] = {name: [] for name in runs}
    for rounds_left in range(rounds, 0, -1):
        for name, ranks in runs.items():
            if count := -(-left[name] // rounds_left):
                found[name].append(ranks.call("measure", count, *arguments))
                left[name] -= count
            if rounds_left == 1:
                yield name, found[name]


def cell_of(rounds: list[Round], ranks_per_node: int) -> dict[str, Any]:
    """Return step times, and bytes per step of the busiest node, by its interface and by the package's accounting."""
    seconds = [second for ranks in rounds for second in step_seconds(ranks)]
    counted = largest_counted_bytes(rounds, ranks_per_node)
    return {
        "step_s": statistics.median(seconds),
        "steps_s": [round(second, 5) for second in seconds],
        "link_bytes": busiest_link_bytes(rounds, ranks_per_node) / len(seconds),
        "counted_bytes": counted / len(seconds) if counted else None,
    }


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
