"""One rank's clock and counters around a number of training steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from hf_zeropp import ZeroPPHandle
from library.measurement import Measurement
from library.network import link_bytes


def timed(run: Callable[[list[float]], float], handle: ZeroPPHandle | None) -> Measurement:
    """Measure steps on this rank. All ranks call it together.

    Args:
        run: makes the steps, appends the moment at which each ended to its argument, and returns a loss.
        handle: of the model, whose traffic begins anew; None without this package.

    Returns:
        The moments, and the bytes of all steps on the node's link and by the package's own account.
    """
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
