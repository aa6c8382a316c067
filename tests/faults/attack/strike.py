"""The struck rank counts the calls that it makes inside a point of the program, and strikes itself at one of them.

Calls of Python functions and of built-in ones count alike (``sys.setprofile``), so a fault can happen anywhere: between two
writes of a checkpoint, before a rank waits for a collective, in the middle of an agreement. An unbroken run of the same job
counts how many there are, and a fault is a fraction of that number.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import transformers.trainer
from transformers import Trainer

from attack.fault import FULL, HOP_1, HOP_2, Fault
from attack.place import FILLER, SHM
from hf_zeropp import traffic
from hf_zeropp.comm import node_memory
from hf_zeropp.comm.hop import Hop
from hf_zeropp.integrations import accelerate as plugin_module

STRUCK = "struck.json"
_NODE_HOPS = (traffic.GATHER_NODE, traffic.REDUCE_NODE)


class Watch:
    """Counts the calls inside the points of the program, in this process.

    Args:
        blow: called at the call with this number inside this point, once.
    """

    def __init__(
        self, point: str | None = None, number: int = 0, blow: Callable[[FrameType], None] | None = None
    ) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._open: list[str] = []
        self._point, self._number, self._blow = point, number, blow

    @contextlib.contextmanager
    def window(self, point: str) -> Iterator[None]:
        """Count what is called inside as calls of ``point``, and of the points around it."""
        self._open.append(point)
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._open.remove(point)
            if self._open:
                sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        for point in set(self._open):
            self.counts[point] += 1
        if self._blow is not None and self._point in self._open and self.counts[self._point] >= self._number:
            blow, self._blow = self._blow, None
            blow(frame)


def watch_training(watch: Watch, kind: str) -> None:
    """Have ``watch`` count in all points of a training run in this process."""
    save = "full save" if kind == FULL else "sharded save"
    for name in ("all_gather", "all_to_all", "barrier"):
        _wrap(Hop, name, watch, lambda hop, *_: HOP_1 if hop.name in _NODE_HOPS else HOP_2)
    _wrap(plugin_module, "apply_zeropp", watch, lambda *_: "installing")
    _wrap(node_memory, "allocate", watch, lambda *_: "sharing memory")
    _wrap(Trainer, "_save_checkpoint", watch, lambda *_: save)
    _wrap(transformers.trainer, "rotate_checkpoints", watch, lambda *_: "rotation")


def _wrap(owner: Any, name: str, watch: Watch, point_of: Callable[..., str]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with watch.window(point_of(*args)):
            return original(*args, **kwargs)

    setattr(owner, name, wrapped)


class Blow:
    """The effect of a fault on the rank that calls it.

    Args:
        fault: the fault.
        folder: where the moment of the strike is noted, outside of the disk.
        disk: the disk of the checkpoints.
    """

    def __init__(self, fault: Fault, folder: Path, disk: Path) -> None:
        self._fault, self._note, self._disk = fault, folder / STRUCK, disk

    def __call__(self, frame: FrameType) -> None:
        """Strike."""
        act = getattr(self, "_" + "".join(letter if letter.isalnum() else "_" for letter in self._fault.blow))
        code = frame.f_code
        note = {"time": time.monotonic(), "pid": os.getpid(), "where": f"{Path(code.co_filename).name}:{code.co_name}"}
        # The note is written before: some blows are the last thing that a process does.
        self._note.write_text(json.dumps(note))
        act()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    _pause = _stop

    def _full_disk(self) -> None:
        _fill(self._disk)

    def _full__dev_shm(self) -> None:
        _fill(Path(SHM))

    def _few_descriptors(self) -> None:
        # The limit is on numbers. Those between the ones in use are taken, so that what is closed from here on counts, whatever
        # its number is.
        used = {int(name) for name in os.listdir("/proc/self/fd")}
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1 + self._fault.spare, most))
        for _ in set(range(max(used))) - used:
            os.open(os.devnull, os.O_RDONLY)


def _fill(folder: Path) -> None:
    with open(folder / FILLER, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
