"""One order of launches for the two communicators that a GPU takes part in.

A rank has a communicator for its node and one for its cross group. Gathers, reductions and cross hops run on streams of their
own (fsdp/weights/schedule.py), so these collectives of a rank may run at the same time:

- a node hop of a gather beside a cross hop of another gather;
- a node hop of a gather beside a cross hop of a reduction;
- a cross hop of a gather beside a node hop of a reduction, without secondary shards;
- a node hop of a reduction beside a cross hop of another reduction.

Two collectives of one communicator never run at the same time. More communicators, such as one per stream, would gain nothing in
modelled steps (scripts/results/what_did_not_pay.md), and each of them costs memory of the GPU for its channels' buffers: some
hundred MB are expected with NCCL's defaults. This has not been measured here.

Every rank issues them in the same order. But streams may start them in another one, and NCCL documents that communicators
which wait for each other's kernels can block each other then. From version 2.26 on NCCL makes kernels of all communicators of
a device start in the order of the calls, if it is asked to (``NCCL_LAUNCH_ORDER_IMPLICIT=1``). It reads the variable when the
first communicator is made. ``backend_variables.py`` says where the variable is set, and ``warn_of_any_order`` tells of a process
group that was there before.

[Note: one thread launches]
The order of calls is one thread's. So with the variable two host threads that launch operations of NCCL on one device at the same
time, on any of its communicators, are a fatal error: "host threads racing to launch NCCL on same device", ncclInvalidUsage. (NCCL
watches itself alone, and no other work on the device. Without the variable this holds for threads of one communicator, and of
those that were split from it.) hf_zeropp/README.md says who may come to that, and what to do ("NCCL and gloo").

On ROCm the variable is left alone. RCCL reads it too; ranks are reported to crash by it (ROCm/aorta#512), and to hang with three
communicators in spite of it (ROCm/rccl#2191).
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
FIRST_VERSION = (2, 26)

logger = logging.getLogger(__name__)

_came_late = False
"""Whether a process group existed already when the variable was set."""


def order_launches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Ask NCCL for one order, unless the variable is set already, or NCCL is AMD's."""
    global _came_late
    if VARIABLE in environ or torch.version.hip is not None:
        return
    environ[VARIABLE] = "1"
    # The group may have no communicator yet: PyTorch makes it with the first collective. So it is set all the same.
    _came_late = dist.is_available() and dist.is_initialized()


def warn_of_any_order(device_type: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Log on rank 0 what is missing for one order, if ranks compute on NVIDIA's GPUs."""
    if device_type != "cuda" or torch.version.hip is not None or not dist.is_nccl_available() or dist.get_rank() != 0:
        return
    version = torch.cuda.nccl.version()
    if version[:2] < FIRST_VERSION:
        logger.warning(
            "NCCL %s may start collectives of a node and across nodes in any order, which can block both. Install a torch with "
            "NCCL %s or newer.",
            _dotted(version),
            _dotted(FIRST_VERSION),
        )
    elif environ.get(VARIABLE) != "1" or _came_late:
        late = "was set after the process group was made, and NCCL may have looked for it before"
        found = late if _came_late else f"is {environ.get(VARIABLE, 'not set')}"
        logger.warning(
            "NCCL may start collectives of a node and across nodes in any order, which can block both: %s %s. Set it to 1 in the "
            "shell that starts the ranks, or start them by hf-zeropp launch or with -m hf_zeropp.run in front of the script.",
            VARIABLE,
            found,
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
