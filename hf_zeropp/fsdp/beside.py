"""Cross hops on accelerators, on streams beside those of the node hops.

FSDP2 gathers on one stream and reduces on another, and each of its comm objects runs two hops. One behind the other, they would
leave the network idle while bytes move within the node and are decoded, and let the next unit wait for both. So the cross hops
have streams of their own:

    gathers          network   cross hop k+1    |  cross hop k+2    |
                     node           node hop k  |      node hop k+1 |
    reductions       node      node hop k-1     |  node hop k-2     |
                     network        cross hop k |      cross hop k-1

The order in which the host starts collectives matters as well as streams do. NCCL starts kernels of all communicators of a device
in the order of the calls (comm/nccl.py), so a cross hop that is called early holds up every node hop that is called behind it
until the network is free for it. Therefore a cross hop is called one unit ahead and not more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from hf_zeropp import devices


class Crossing(Protocol):
    """A gather whose cross hop is due."""

    def start_ahead(self) -> None:
        """Start the cross hop on the current stream."""


class GathersAhead:
    """The cross hops of one model's gathers that are due: called in one order, on a stream of their own.

    The order is that of the modules, on every rank, whatever units a rank uses. Where a model computes in another order, its
    cross hops come earlier than they need to.

    Args:
        device_type: of the units.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._due: list[Crossing] = []
        self._num_started = 0
        self._stream: torch.Stream | None = None

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue what runs inside in the stream of cross hops, behind the current stream."""
        # The current stream comes behind the optimizer, and behind the node hops that read the secondary shards last.
        before = torch.accelerator.current_stream()
        if self._stream is None:
            self._stream = devices.new_stream(self._device_type)
        self._stream.wait_stream(before)
        with devices.on_stream(self._stream, self._device_type):
            yield

    def expect(self, due: Sequence[Crossing]) -> None:
        """Take the gathers whose cross hops a forward pass will need, in place of all before."""
        self._due, self._num_started = list(due), 0

    def reach(self, gather: Crossing) -> None:
        """Start cross hops up to that of ``gather``, whose weights are needed now, and the one behind it."""
        if gather in self._due:
            self._start(self._due.index(gather) + 2)

    def finish(self) -> None:
        """Start those that are left: of units that the pass did not use."""
        # Other ranks may have used them. The cross hops that ran must be the same on all ranks.
        self._start(len(self._due))

    def wait_before_writes(self) -> None:
        """Let the current stream wait until all weights that cross are read: an optimizer is about to write to them."""
        # Gathers wait for the cross hops of units that a pass uses. Nothing else waits for those of the others.
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    def _start(self, count: int) -> None:
        if self._num_started < min(count, len(self._due)):
            with self.queue():
                for gather in self._due[self._num_started : count]:
                    self._num_started += 1
                    gather.start_ahead()


class HopsBeside:
    """It holds what the gathers of one model share where cross hops run on a stream beside that of node hops.

    Attributes:
        gathers: the cross hops of gathers.
    """

    def __init__(self, device_type: str) -> None:
        self.gathers = GathersAhead(device_type)
