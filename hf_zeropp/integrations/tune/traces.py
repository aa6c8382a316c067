"""A user's files are the same after a trial as before: ranks note what the script writes, and the tuner takes it back.

A rank notes in a *journal* what it is about to make: folders, files and links, before they are there. The tuner removes them when
all ranks have ended, however they ended. Of a file that exists a rank keeps a copy before it writes to it, and the tuner puts it
back. Other files and folders that were there before cannot be deleted or renamed: the script gets a PermissionError. Python's
audit events tell of all of this. They do not tell what a library writes from C or Rust, so the functions that do are wrapped.

Caches of the Hugging Face libraries and of compilers are left alone, so that a dataset is not prepared for each candidate.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import tokenizers
import torch

MAX_COPY_BYTES = 2**30
JOURNAL = "journal"
_CACHES = (
    "HF_HOME HF_DATASETS_CACHE HF_HUB_CACHE XDG_CACHE_HOME TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR".split()
)
_LEFT_ALONE = ("~/.cache", "~/.triton", "/dev", "/proc", "/sys")
_OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_WRITES = {
    "open": 0,
    "os.truncate": 0,
    "os.mkdir": 0,
    "os.symlink": 1,
    "os.link": 1,
    "os.rename": 1,
    "sqlite3.connect": 0,
}
"""The audit events of what makes or changes a file or folder, and which of their arguments is its path."""
_DELETIONS = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
"""The audit events after which a path is gone: their first argument."""
_WRITERS: tuple[tuple[Any, str], ...] = (
    (torch, "save"),
    # ``save_file`` looks this function up when it is called. Libraries have bound ``save_file`` itself by name.
    (safetensors.torch, "serialize_file"),
    (safetensors.numpy, "serialize_file"),
    (tokenizers.Tokenizer, "save"),
    (torch.autograd.profiler.profile, "export_chrome_trace"),
)
"""The functions that write a file without Python. The first argument is what they write, and one of the others is the path."""


def trace(folder: Path) -> None:
    """Note what this process, and those that it forks, make in the file system, from now on until the process ends.

    Args:
        folder: the tuner's, with the journal and the copies.
    """
    sys.addaudithook(_Traces(folder).look)


class _Traces:
    """Writes the journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journal = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        self._left_alone = [os.path.realpath(os.path.expanduser(path)) for path in (*caches, *_LEFT_ALONE, str(folder))]
        self._noted: set[str] = set()
        self._inside = threading.local()
        for owner, name in _WRITERS:
            setattr(owner, name, self._noting_paths(getattr(owner, name)))

    def _noting_paths(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            for argument in (*args[1:], *kwargs.values()):
                self._write(argument)
            return write(*args, **kwargs)

        return replacement

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        """Take note of an audit event. The hook of all of them, so it must be quick with those that do not matter."""
        if (event not in _WRITES and event not in _DELETIONS) or getattr(self._inside, "is_looking", False):
            return
        if event == "open" and not args[2] & _OPENS_TO_WRITE:
            return
        self._inside.is_looking = True
        try:
            if event in _DELETIONS:
                self._delete(*args[:2])
            if event in _WRITES:
                self._write(args[_WRITES[event]])
        finally:
            self._inside.is_looking = False

    def _write(self, path: Any) -> None:
        """Take note of a file or folder that is about to be made, or of a file that is about to be written to."""
        name = self._watched(path)
        if name is None or name in self._noted:
            return
        if os.path.islink(name) and not os.path.exists(name):
            name = os.path.realpath(name)  # the file that the link names, which is not there yet
        if not os.path.lexists(name):
            self._note(made=name)
        elif os.path.isfile(name) and not self._is_noted(name):
            self._keep(name)

    def _delete(self, path: Any, descriptor: Any = None) -> None:
        # A name relative to an open folder comes from ``shutil.rmtree``, which was asked about the folder before. Before
        # Python 3.11 the event of ``shutil.rmtree`` itself has no descriptor.
        name = None if isinstance(descriptor, int) and descriptor >= 0 else self._watched(path)
        if name is not None and os.path.lexists(name) and not self._is_noted(name):
            raise PermissionError(
                f"the script would delete or rename {name!r}, which was there before it was tried. Let it write elsewhere."
            )

    def _watched(self, path: Any) -> str | None:
        """Return the full path, None for what is no path and for places that are left alone.

        Links to folders are followed: a script may make one, and write to files of the user behind it.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        parent, last = os.path.split(os.path.abspath(os.fsdecode(path)))
        name = os.path.join(os.path.realpath(parent), last)
        is_left_alone = any(name == place or name.startswith(place + os.sep) for place in self._left_alone)
        return None if is_left_alone else name

    def _is_noted(self, name: str) -> bool:
        """Return whether a rank of this trial made the file or folder, or one that it lies in, or keeps a copy of the file."""
        paths = {name, *map(str, Path(name).parents)}
        if self._noted.isdisjoint(paths):  # it may be another rank of this node
            self._noted.update(*(entry.values() for entry in entries_of(self._folder)))
        return not self._noted.isdisjoint(paths)

    def _keep(self, name: str) -> None:
        """Keep a copy of a file. Several ranks may: ``undo`` restores the first noted last, which is older than all writes."""
        if (size := os.path.getsize(name)) > MAX_COPY_BYTES:
            raise PermissionError(
                f"the script would write to {name!r}, of {size / 1e9:.1f} GB. Let it write elsewhere."
            )
        descriptor, copy = tempfile.mkstemp(dir=self._folder)
        os.close(descriptor)
        shutil.copy2(name, copy)
        self._note(kept=name, copy=copy)

    def _note(self, **entry: str) -> None:
        os.write(self._journal, (json.dumps(entry) + "\n").encode())
        self._noted.update(entry.values())


def entries_of(folder: Path) -> list[dict[str, str]]:
    """Return what the ranks have noted so far."""
    path = folder / JOURNAL
    # The last line is whole only if it ends: another rank may be writing it, or was killed while it did.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def undo(folder: Path, began_s: float) -> list[str]:
    """Remove what the ranks have made, and put back what they have written to. Call it when they have ended.

    Args:
        folder: that of ``trace``.
        began_s: when the trial began, in seconds of ``time.time``.

    Returns:
        What could not be removed or put back, and why.
    """
    failures = []
    for entry in reversed(entries_of(folder)):
        try:
            if "made" in entry:
                _remove(entry["made"])
            # Nodes may share a file. A copy newer than the trial's begin may hold what another node's ranks wrote: it is left.
            elif os.path.getmtime(entry["copy"]) < began_s:
                shutil.copy2(entry["copy"], entry["kept"])
        except OSError as error:
            failures.append(str(error))
    (folder / JOURNAL).unlink(missing_ok=True)
    return failures


def _remove(path: str) -> None:
    # Nodes may share a folder, and remove it at the same time. This leaves files and links alone.
    shutil.rmtree(path, ignore_errors=True)
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)  # it raises what stands in the way
        else:
            os.remove(path)
