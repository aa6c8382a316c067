"""Measures each phase of an RLHF example: its seconds, and the megabytes that this node received from other nodes."""

import time
from collections.abc import Callable
from contextlib import contextmanager

from hf_zeropp import ZeroPPHandle


class Phases:
    """Counts seconds and bytes towards the innermost phase that runs.

    Args:
        handle: returns the model's handle, or None where ZeRO++ has not begun yet.
    """

    def __init__(self, handle: Callable[[], ZeroPPHandle | None]) -> None:
        self.handle = handle
        self.totals: dict[str | None, list[float]] = {}  # None: outside of all phases
        self._switch_to(None)

    @contextmanager
    def __call__(self, name: str):
        """Count what runs inside, or in a function that this decorates, towards the phase ``name``."""
        outer = self._name
        self._switch_to(name)
        yield
        self._switch_to(outer)

    def _switch_to(self, name: str | None) -> None:
        handle = self.handle()
        now = time.perf_counter(), handle.traffic.cross_node_bytes / 1e6 if handle else 0.0
        if self.totals:
            total = self.totals[self._name]
            total[:] = [was + end - start for was, end, start in zip(total, now, self._since, strict=True)]
        self.totals.setdefault(name, [0.0, 0.0])
        self._name, self._since = name, now

    def print(self) -> None:
        """Print all phases."""
        for name, (seconds, megabytes) in self.totals.items():
            if name is not None:
                print(f"{name}: {seconds:.1f} s, {megabytes:.2f} MB into this node")
