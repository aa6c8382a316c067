"""Memory that the ranks of a node map together, so that a peer's bytes are read where they lie.

Gloo moves bytes within a machine through sockets: the kernel copies them twice, gloo once more, and each exchange waits for
the slowest rank. But a secondary shard is written once per weight update and read many times: twice per micro-step, once
per generated token. Ranks of one machine can read each other's; then a gather within the node is a decode and nothing else.

The memory is a ``memfd``: it has no name to collide, is not bounded by /dev/shm, and is gone when the last rank is, however
it died. Peers open it through /proc, which takes one kernel and one PID namespace. Where ranks of the group have not both in
common (hpZ over several machines, one container per rank) or the system has no memfd, `connect` returns None on every rank,
and the bytes take the sockets.

On accelerators NVLink and NCCL do this work; nothing here is used there.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class NodeMemory:
    """Allocates shared buffers for the ranks of one process group, all of them on this machine."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> NodeMemory | None:
        """Shared memory for ``group``, or None where its ranks cannot have any. The same on every rank; collective."""
        if group.size() == 1:
            return None
        places = _exchange(_place(), group)
        memory = cls(group)
        try:
            if None in places or len(set(places)) > 1:
                raise OSError("they do not run under one kernel and in one PID namespace")
            memory.allocate(1)
        except OSError as error:  # raised on every rank
            ranks = dist.get_process_group_ranks(group)
            logger.info("Ranks %s share no memory (%s): secondary copies are gathered through sockets.", ranks, error)
            return None
        return memory

    @torch.inference_mode(False)
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A zeroed uint8 [N, num_bytes] that all N ranks of the group see. Collective.

        Raises:
            OSError: on every rank, when it cannot be made or mapped on one.
        """
        shape = (self.group.size(), num_bytes)
        size = max(math.prod(shape), 1)
        descriptor, mapped, error = None, None, None
        try:
            descriptor = _create(size) if self.group.rank() == 0 else None
        except OSError as exception:
            error = str(exception)
        owner, owned = _exchange((os.getpid(), descriptor), self.group)[0]
        try:
            mapped = _map(owner, owned, size)
        except OSError as exception:
            error = error or str(exception)
        errors = [f"rank {rank}: {text}" for rank, text in enumerate(_exchange(error, self.group)) if text]
        if descriptor is not None:
            os.close(descriptor)  # every rank has mapped it, or has failed to
        if errors:
            raise OSError("; ".join(errors))
        return torch.frombuffer(mapped, dtype=torch.uint8)[: math.prod(shape)].view(shape)


def _place() -> tuple[str, int] | None:
    """Equal for processes that can open each other's files through /proc; None where there is no memfd."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _create(size: int) -> int:
    descriptor = os.memfd_create("zeropp")
    try:
        os.posix_fallocate(descriptor, 0, size)  # an error here, and not a SIGBUS when the pages are touched
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map(owner: int, descriptor: int | None, size: int) -> mmap.mmap:
    if descriptor is None:
        raise OSError("the first rank of the group could not allocate it")
    opened = os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, size)
    finally:
        os.close(opened)


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
