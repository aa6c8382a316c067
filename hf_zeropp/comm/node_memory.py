"""Memory that the ranks of a node share, so that a rank reads the bytes of a peer where they lie.

Gloo moves bytes within a machine through sockets: the kernel copies them twice and gloo once more, and each exchange waits for
the slowest rank. But a secondary shard is written once per weight update and read many times: twice per micro-step, and once
per generated token. If the ranks of a machine can read each other's, a gather within the node is a decode and nothing else.

The memory is a ``memfd``, an anonymous file in memory. It has no name that could collide, /dev/shm does not bound it, and it is
gone when the last rank is, however that died. A rank opens the file of a peer through /proc, for which both must run under one
kernel and in one PID namespace. Where they do not (hpZ over several machines, one container per rank), or where the system has
no memfd, ``can_share`` is False on every rank, and the bytes take the sockets.

Only the user whose job it is can open the file, and its size is sealed: no process can cut it off below a mapping, which would
end the ranks with a SIGBUS.

On accelerators NVLink and NCCL do this work, and nothing here is used.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hf_zeropp.comm.exchange import exchange

logger = logging.getLogger(__name__)

_OWNER_ONLY = 0o600
if sys.platform == "linux":  # no other system has memfds
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def can_share(group: dist.ProcessGroup) -> bool:
    """Return whether the ranks of ``group`` can share memory, the same on all of them. Collective."""
    if group.size() == 1:
        return False
    places = exchange(_place(), group)
    try:
        # All ranks see the same places, so this is raised on all of them or on none, and ``allocate``, which is
        # collective, is called by all or by none.
        if None in places or len(set(places)) > 1:
            raise OSError("they do not run under one kernel and in one PID namespace")
        allocate(group, 1)  # places that look alike are no proof: a sandbox may forbid memfd or /proc
    except OSError as error:  # raised on every rank, so all of them return False
        ranks = dist.get_process_group_ranks(group)
        logger.info("Ranks %s share no memory (%s): secondary shards are gathered through sockets.", ranks, error)
        return False
    return True


@torch.inference_mode(False)
def allocate(group: dist.ProcessGroup, num_bytes: int) -> torch.Tensor:
    """Return a zeroed uint8 [N, num_bytes] that all N ranks of ``group`` see. Collective.

    The first rank makes the file, and every rank maps it. Each step ends in an exchange, so that an error on one rank is
    an error on all of them, and none waits for a rank that has given up.

    Raises:
        OSError: on every rank, if the memory cannot be made or mapped on one of them.
    """
    shape = (group.size(), num_bytes)
    # An empty file cannot be mapped, and a unit may have nothing to keep.
    size = max(math.prod(shape), 1)
    descriptor, mapped, error = None, None, None
    try:
        descriptor = _create(size) if group.rank() == 0 else None
    except OSError as exception:
        error = str(exception)
    # A rank that failed sends its None in the same exchange: leaving it out would keep the others waiting.
    owner, owned = exchange((os.getpid(), descriptor), group)[0]
    try:
        mapped = _map(owner, owned, size)
    except OSError as exception:
        error = error or str(exception)
    texts = zip(dist.get_process_group_ranks(group), exchange(error, group), strict=True)
    errors = [f"rank {rank}: {text}" for rank, text in texts if text]
    if descriptor is not None:
        os.close(descriptor)  # the exchange above ends after every rank has mapped the file, or has failed to
    if errors:
        raise OSError(
            f"{size} bytes of memory cannot be shared: {'; '.join(errors)}. Free memory or raise the limit, or set "
            "shared_memory=False to exchange the same bytes through sockets."
        )
    # The tensor holds the mapping, and the mapping holds the memory, which is freed with the last tensor of the
    # last rank.
    return torch.frombuffer(mapped, dtype=torch.uint8)[: math.prod(shape)].view(shape)


def _place() -> tuple[str, int] | None:
    """Return a value that is equal for processes that can open each other's files; None where there is no memfd.

    It is the running kernel, which each boot gives a new id, and the PID namespace, in which /proc finds processes.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _create(size: int) -> int:
    """Return the descriptor of a new memfd of ``size`` bytes, which its owner alone may open, and which cannot be resized."""
    descriptor = os.memfd_create("zeropp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, _OWNER_ONLY)  # a memfd is made with all permissions for all users
        # Pages are allocated now: where memory runs out this is an error here, and not a SIGBUS when a page is touched.
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _map(owner: int, descriptor: int | None, size: int) -> mmap.mmap:
    """Map the file that process ``owner`` has open as ``descriptor``, which is None if it could not make one.

    Raises:
        OSError: it cannot be opened, or is not the file that ``_create`` made.
    """
    if descriptor is None:
        raise OSError("the first rank of the group could not allocate it")
    opened = os.open(f"/proc/{owner}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(opened, size)
        return mmap.mmap(opened, size)
    finally:
        os.close(opened)


def _check(opened: int, size: int) -> None:
    """Check that ``opened`` is a memfd of ours. The owner may have died, and another process have taken its number."""
    status = os.fstat(opened)
    if (status.st_size, status.st_uid, status.st_mode & 0o777) != (size, os.geteuid(), _OWNER_ONLY):
        raise OSError("its owner, mode or size is not that of the file that the first rank made")
    if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS:  # an OSError for files that are no memfd
        raise OSError("its size is not sealed")
