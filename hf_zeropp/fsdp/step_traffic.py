"""Bytes that others send in a step: expert and tensor parallelism, clipping, trackers, and optimizers, as Muon does.

From the end of the first step to the end of the third, collectives are watched (collective_watch.py), but for those that this
package counts itself. Evaluation and generation are left out. Later steps are taken to receive what the smaller of the two did.

What comes inside of an optimizer's own second and third step is the optimizer's. It is counted by itself, in each of its steps,
and named where it is much. Nothing is exchanged for all this: each rank counts what it receives.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict

import torch
import torch.distributed as dist

from hf_zeropp.fsdp.collective_watch import CollectiveWatch
from hf_zeropp.fsdp.gradients.backward_passes import current_backward
from hf_zeropp.muon import Muon
from hf_zeropp.traffic import OPTIMIZER, Bytes, Traffic, total

logger = logging.getLogger(__name__)

WATCHED_STEPS = 2


class StepTraffic(CollectiveWatch):
    """Counts what others send in the steps of one model.

    Args:
        traffic: of the model. The bytes are added to its ``others``, and to its counts those of optimizers.
    """

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic.ranks_per_node)
        self._traffic = traffic
        self._is_in_pass = False
        self._stepping: torch.optim.Optimizer | None = None
        self._in_step = Bytes()
        self._between_steps: dict[str, Bytes] = defaultdict(Bytes)
        # Bytes received in each watched step; the first entry is empty. An optimizer may be gone before the model.
        self._of_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Bytes]] = weakref.WeakKeyDictionary()
        self._of_others: list[dict[str, Bytes]] = []
        self._thread = threading.get_ident()

    def count(self, kind: str, received: Bytes) -> None:
        """Add a collective of this thread, or of a backward pass, whose threads are others on accelerators."""
        is_in_backward = current_backward() != -1
        if not is_in_backward and threading.get_ident() != self._thread:
            return
        if self._stepping is not None:
            self._in_step.add(received)
        elif self._is_watched:
            place = "in" if self._is_in_pass or is_in_backward else "between"
            self._between_steps[f"{kind}, {place} passes"].add(received)

    def enter_pass(self, *, trains: bool) -> None:
        """Note that a forward pass begins. One without gradients is not counted, nor what follows up to one with gradients."""
        self._stepping = None  # a step that runs passes, in a closure, or that raised, which no hook tells of
        self._is_in_pass = trains
        self._turn(trains and self._is_watched)

    def leave_pass(self) -> None:
        """A forward pass has ended."""
        self._is_in_pass = False

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the step that begins, if it is one of the first. The model's own collectives must lie behind."""
        if self._stepping is None:  # a step inside of another one is a part of it
            self._stepping, self._in_step, self._thread = optimizer, Bytes(), threading.get_ident()
            self._turn(self._is_watched or len(self._of_optimizers.get(optimizer, ())) in range(1, WATCHED_STEPS + 1))

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that is done, as the first one with these gradients or as another."""
        if self._stepping is optimizer:
            self._stepping = None
            self._count_optimizer(optimizer)
        if self._traffic.end_optimizer_step():
            self._count_others()
        self._turn(self._is_watched)

    @property
    def _is_watched(self) -> bool:
        return 0 < len(self._of_others) <= WATCHED_STEPS

    def _turn(self, is_on: bool) -> None:
        self.turn_on() if is_on else self.turn_off()

    def _count_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        steps = self._of_optimizers.setdefault(optimizer, [])
        if len(steps) <= WATCHED_STEPS:
            steps.append(self._in_step if steps else Bytes())
            if len(steps) == 1 + WATCHED_STEPS:
                _warn_if_much(optimizer, steps[-1], self._traffic)
        if steps[-1].calls:
            # The first step counts as the second, unless the counters were reset behind it.
            repeats = 1 + (len(steps) == 2 and self._traffic.steps > 0)
            self._traffic.record(OPTIMIZER, steps[-1].times(repeats))

    def _count_others(self) -> None:
        steps = self._of_others
        if len(steps) <= WATCHED_STEPS:
            steps.append(dict(self._between_steps))
            self._between_steps.clear()
            received = steps[-1]
        else:
            received = min(steps[1:], key=lambda counts: _size(total(counts.values())))
        repeats = 1 + (len(steps) == 2 and self._traffic.steps > 1)  # as above
        for name, count in received.items():
            self._traffic.record_other(name, count.times(repeats))


def _size(count: Bytes) -> int:
    return count.intra_node + count.cross_node


def _warn_if_much(optimizer: torch.optim.Optimizer, received: Bytes, traffic: Traffic) -> None:
    others = (count.cross_node for name, count in traffic.counts.items() if name != OPTIMIZER)
    of_model = sum(others) / (traffic.steps + 1)
    # The bytes of this package's Muon are those that Muon needs.
    if received.cross_node > of_model and not isinstance(optimizer, Muon) and dist.get_rank() == 0:
        logger.warning(
            "%s of %s sends %.1f MB to a node from other nodes in each step, by collectives of its own; the model sends %.1f MB. "
            "An optimizer that updates element by element (AdamW) sends nothing. For Muon use hf_zeropp.Muon, which computes "
            "what torch.optim.Muon does and sends at most half of the model.",
            type(optimizer).__name__,
            type(optimizer).__module__.partition(".")[0],
            received.cross_node * traffic.ranks_per_node / 1e6,
            of_model * traffic.ranks_per_node / 1e6,
        )
