"""Bytes that optimizers receive by collectives of their own, as Muon does: counted in two steps, and named where they are many.

An optimizer's second and third step run under a mode that sees all operators, and collectives among them. Later steps are taken
to send what the third did, and are not looked at. Nothing is exchanged for it: each rank counts what it receives itself.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist

from hf_zeropp.fsdp.collective_watch import CollectiveWatch
from hf_zeropp.muon import Muon
from hf_zeropp.traffic import OPTIMIZER, Bytes, Traffic

logger = logging.getLogger(__name__)

WATCHED_STEPS = 2


class OptimizerTraffic:
    """Counts what the optimizers of one model send.

    Args:
        traffic: of the model. The bytes are added to it.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        # What each watched step received, behind an empty count for the first step. An optimizer may be gone before the model.
        self._received: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Bytes]] = weakref.WeakKeyDictionary()

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Watch the step that begins, if it is one of the first. The model's own collectives must lie behind."""
        if _Watch.active is not None and _Watch.active.optimizer is optimizer:
            _Watch.active.end()  # its last step raised, and no hook told of it
        is_first, is_known = optimizer not in self._received, len(self._received.get(optimizer, ())) > WATCHED_STEPS
        # A closure runs forward passes, whose collectives are the model's. A step inside of another one is a part of it.
        if not (is_first or is_known or has_closure or _Watch.active is not None):
            _Watch(optimizer, self._traffic.ranks_per_node).begin()

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step. Call it before the model is told of it."""
        received = self._received.setdefault(optimizer, [])
        watch = _Watch.active
        if watch is not None and watch.optimizer is optimizer:
            watch.end()
            received.append(watch.received)
            if len(received) == 1 + WATCHED_STEPS:
                _warn_if_much(optimizer, watch.received, self._traffic)
        elif not received:
            received.append(Bytes())
        if received[-1].calls:
            # The first step counts as the second, unless the counters were reset behind it.
            repeats = 1 + (len(received) == 2 and self._traffic.steps > 0)
            self._traffic.record(OPTIMIZER, received[-1].times(repeats))


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


class _Watch(CollectiveWatch):
    """Counts what this rank receives in the collectives of one step.

    Args:
        optimizer: that steps.
        ranks_per_node: of the cluster.
    """

    active: _Watch | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, ranks_per_node: int) -> None:
        super().__init__(ranks_per_node)
        self.optimizer = optimizer
        self.received = Bytes()

    def count(self, kind: str, group: dist.ProcessGroup, received: Bytes) -> None:
        """Add a collective, whatever its kind."""
        self.received.add(received)

    def begin(self) -> None:
        """Count from here on, until ``end``. A step's beginning and end are told by hooks, so no block can stand around it."""
        _Watch.active = self
        self.__enter__()

    def end(self) -> None:
        """Count no more."""
        _Watch.active = None
        self.__exit__(None, None, None)

    def __enter__(self) -> _Watch:
        _Watch.active = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _Watch.active = None
        super().__exit__(*exception)
