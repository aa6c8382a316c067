"""The schedule says when the cross hops of gathers start and end.

FSDP2 asks for a unit's weights when it computes with them. A cross hop that started only then would be waited for in full. All
due copies are known when a forward pass begins, so cross hops start earlier where they can overlap with computing:

- on gloo, moved by threads of its own, all of them start when the pass begins, and each is landed when its unit is needed;
- on accelerators they run on a stream of their own, beside the node hops, one unit ahead. FSDP2 gathers on one stream; with both
  hops of each unit on it, the network would idle while bytes move within the node and are decoded, and the next unit would wait
  for both:

      network   cross hop k+1    |  cross hop k+2    |
      node           node hop k  |      node hop k+1 |

Where nothing overlaps, each of them starts and ends when the pass begins. In all cases they come in the order of the modules, on
every rank, whatever units a rank uses.

The order in which the host starts collectives matters as well as streams do. NCCL starts kernels of all communicators of a device
in the order of the calls (comm/nccl.py), so a cross hop that is called early holds up every node hop that is called behind it
until the network is free for it. Therefore a cross hop is called one unit ahead and not more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from hf_zeropp import devices
from hf_zeropp.comm.two_hops import ChangedWords, TwoHopGather, exchange_sizes
from hf_zeropp.fsdp.weights.gather import WeightGather

AHEAD = 1
"""Units that a cross hop on a stream of its own starts ahead of its own unit."""


class GatherSchedule:
    """The cross hops of one model's gathers.

    Where a model computes in another order than that of its modules, its cross hops come earlier than they need to.

    Args:
        device_type: of the units.
        overlaps: whether cross hops run while the model computes.
    """

    def __init__(self, device_type: str, *, overlaps: bool) -> None:
        self._device_type = device_type
        self._overlaps = overlaps
        self._has_stream = overlaps and devices.has_streams(device_type)
        self._due: Sequence[WeightGather] = ()
        self._num_started = 0
        self._stream: torch.Stream | None = None

    def begin(self, due: Sequence[WeightGather], *, starts_now: bool) -> None:
        """Replace the list of due gathers by those of the forward pass that begins. Ranks have agreed on them.

        Args:
            due: the gathers, in module order.
            starts_now: whether all cross hops start now, because none may start later. Without a stream they always do.
        """
        with self._queue():
            _encode(due)
        self._due, self._num_started = due, 0
        if starts_now or not self._has_stream:
            self.finish()

    def reach(self, gather: WeightGather) -> None:
        """Start cross hops up to that of ``gather``, whose weights are needed now, and those that come ahead."""
        if gather in self._due:
            self._start(self._due.index(gather) + 1 + AHEAD)

    def finish(self) -> None:
        """Start those that are left: of units that the pass did not use."""
        # Other ranks may have used them. The cross hops that ran must be the same on all ranks.
        self._start(len(self._due))

    def wait_before_writes(self) -> None:
        """Let the current stream wait until all weights that cross are read: an optimizer is about to write to them."""
        # Gathers wait for the cross hops of units that a pass uses. Nothing else waits for those of the others.
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    @contextlib.contextmanager
    def _queue(self) -> Iterator[None]:
        """Queue what runs inside in the stream of cross hops, behind the current stream; in the current one if there is none."""
        if not self._has_stream:
            yield
            return
        # The current stream comes behind the optimizer, and behind the node hops that read the secondary shards last.
        before = torch.accelerator.current_stream()
        if self._stream is None:
            self._stream = devices.new_stream(self._device_type)
        self._stream.wait_stream(before)
        with devices.on_stream(self._stream, self._device_type):
            yield

    def _start(self, count: int) -> None:
        if self._num_started >= min(count, len(self._due)):
            return
        starting, self._due = self._due, ()  # a hop that fails is the last of its pass
        with self._queue():
            for gather in starting[self._num_started : count]:
                self._num_started += 1
                gather.start()
                # On gloo the host would wait. With a stream it does not: what landing does is queued there.
                if self._has_stream or not self._overlaps:
                    gather.land()
        self._due = starting


def _encode(due: Sequence[WeightGather]) -> None:
    """Encode the changed words that cross hops will send, and exchange their sizes once per mesh: that waits for the network."""
    # Experts may lie on another mesh than the rest. The order of the meshes comes from all gathers that are due, on which ranks
    # have agreed: with two orders ranks could wait in a ring.
    prepared: dict[TwoHopGather, list[ChangedWords]] = {}
    for gather in due:
        words, of_mesh = gather.encode(), prepared.setdefault(gather.hops, [])
        if words is not None:
            of_mesh.append(words)
    for of_mesh in prepared.values():
        exchange_sizes(of_mesh)
