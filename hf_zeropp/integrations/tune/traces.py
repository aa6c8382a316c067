"""A user's files are the same after a trial as before: ranks note what the script writes, and the tuner takes it back.

A rank notes in a *journal* what it is about to make: folders, files and links, before they are there. The tuner removes them when
all ranks have ended, however they ended. Of a file that exists a rank keeps a copy before it writes to it, and the tuner puts it
back. Files and folders that were there before cannot be deleted or renamed: the script gets a PermissionError. Python's audit
events tell of all of this. They do not tell what a library writes from C or Rust. Such files lie in folders that Python made, but
for those of the functions that ``note_saves`` wraps.

From the first step on checkpoints are not saved at all: their functions do nothing.

Caches of the Hugging Face libraries and of compilers are left alone, so that a dataset is not prepared for each candidate.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import safetensors.numpy
import safetensors.torch
import torch
import transformers.trainer
from accelerate import Accelerator
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

MAX_COPY_BYTES = 2**30
JOURNAL = "journal"
_CACHES = (
    "HF_HOME",
    "HF_DATASETS_CACHE",
    "HF_HUB_CACHE",
    "XDG_CACHE_HOME",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)
_NOT_FILES = ("/dev", "/proc", "/sys")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Traces:
    """Notes what this process, and those that it forks, make in the file system.

    Args:
        folder: the tuner's, with the journal and the copies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journal = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        caches = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        homes = [os.path.expanduser(path) for path in ("~/.cache", "~/.triton")]
        self._left_alone = [os.path.realpath(path) for path in (*caches, *homes, *_NOT_FILES, str(folder))]
        self._noted: set[str] = set()
        self._inside = threading.local()
        self.is_training = False
        """Whether the first step has begun. Checkpoints are not saved from then on."""

    def watch(self) -> None:
        """Note all that is written from now on. It ends with the process."""
        sys.addaudithook(self._look)

    def note_saves(self) -> None:
        """Let functions that save do nothing in steps, and note the files that they write before from C or Rust."""
        for owner, name, keyword in (*_SAVES, *_saves_of_peft()):
            setattr(owner, name, self._in_steps_nothing(getattr(owner, name), keyword))
        cast(list[type[TrainerCallback]], transformers.trainer.DEFAULT_CALLBACKS).append(_StepsAlone)

    def _in_steps_nothing(self, save: Callable[..., Any], keyword: str | None) -> Callable[..., Any]:
        """Return a function in place of ``save``. ``keyword`` names its second argument where that must be noted."""

        @functools.wraps(save)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self.is_training:
                return None
            if keyword is not None:
                target: Any = args[1] if len(args) > 1 else kwargs[keyword]
                self._write(os.path.join(target, "tokenizer.json") if keyword == "save_directory" else target)
            return save(*args, **kwargs)

        return replacement

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        """Take note of an audit event. The hook of all of them, so it must be quick with those that do not matter."""
        action = _ACTIONS.get(event)
        if action is None or getattr(self._inside, "is_looking", False):
            return
        self._inside.is_looking = True
        try:
            action(self, *args)
        finally:
            self._inside.is_looking = False

    def _open(self, path: Any, mode: Any, flags: int) -> None:
        if flags & _WRITES:
            self._write(path)

    def _write(self, path: Any, *_: Any) -> None:
        """A file or folder is about to be made, or a file to be written to."""
        name = self._watched(path)
        if name is None or name in self._noted:
            return
        if not os.path.lexists(name):
            self._note(made=name)
        elif os.path.isfile(name) and not self._is_made_here(name):
            self._keep(name)

    def _make_at(self, source: Any, path: Any, *_: Any) -> None:
        self._write(path)

    def _rename(self, source: Any, path: Any, *descriptors: int) -> None:
        self._delete(source)
        self._write(path)

    def _delete(self, path: Any, descriptor: int = -1, *_: Any) -> None:
        # A name relative to an open folder comes from ``shutil.rmtree``, which was asked about the folder before.
        name = self._watched(path) if descriptor in (-1, None) else None
        if name is not None and os.path.lexists(name) and not self._is_made_here(name):
            raise PermissionError(
                f"the script would delete or rename {name!r}, which was there before it was tried. Let it write elsewhere."
            )

    def _watched(self, path: Any) -> str | None:
        """Return the full path, None for descriptors and for places that are left alone.

        Links to folders are followed: a script may make one, and write to files of the user behind it.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        parent, last = os.path.split(os.path.abspath(os.fsdecode(path)))
        name = os.path.join(os.path.realpath(parent), last)
        is_left_alone = any(name == place or name.startswith(place + os.sep) for place in self._left_alone)
        return None if is_left_alone else name

    def _is_made_here(self, name: str) -> bool:
        """Return whether a rank of this trial made the file or folder, or one that it lies in."""
        paths = {name, *map(str, Path(name).parents)}
        if self._noted.isdisjoint(paths):  # another rank of this node may have made it
            self._noted |= {entry["made"] for entry in entries_of(self._folder) if "made" in entry}
        return not self._noted.isdisjoint(paths)

    def _keep(self, name: str) -> None:
        """Keep a copy of a file. Of all ranks that want to, the one that comes first does."""
        if (size := os.path.getsize(name)) > MAX_COPY_BYTES:
            raise PermissionError(
                f"the script would write to {name!r}, of {size / 1e9:.1f} GB. Let it write elsewhere."
            )
        copy = self._folder / hashlib.sha256(os.fsencode(name)).hexdigest()
        if not copy.exists():
            descriptor, mine = tempfile.mkstemp(dir=self._folder)
            os.close(descriptor)
            shutil.copy2(name, mine)
            try:
                # It fails if another rank has linked its copy: that rank may be writing to the file by now.
                os.link(mine, copy)
                self._note(kept=name, copy=str(copy))
            except FileExistsError:
                pass
            os.remove(mine)
        self._noted.add(name)

    def _note(self, **entry: str) -> None:
        os.write(self._journal, (json.dumps(entry) + "\n").encode())
        self._noted.update(entry.values())


_ACTIONS: dict[str, Callable[..., None]] = {
    "open": Traces._open,
    "os.truncate": Traces._write,
    "os.mkdir": Traces._write,
    "os.symlink": Traces._make_at,
    "os.link": Traces._make_at,
    "os.rename": Traces._rename,
    "os.remove": Traces._delete,
    "os.rmdir": Traces._delete,
    "shutil.rmtree": Traces._delete,
    "sqlite3.connect": Traces._write,
}


_SAVES: tuple[tuple[Any, str, str | None], ...] = (
    (torch, "save", "f"),
    # ``save_file`` looks this function up when it is called. Libraries have bound ``save_file`` itself by name.
    (safetensors.torch, "serialize_file", "filename"),
    (safetensors.numpy, "serialize_file", "filename"),
    (PreTrainedTokenizerBase, "save_pretrained", "save_directory"),
    (PreTrainedModel, "save_pretrained", None),
    (Accelerator, "save", None),
    (Accelerator, "save_model", None),
    (Accelerator, "save_state", None),
)
"""Functions that save. Where they write a file without Python, the keyword is that of the second argument, the file or folder."""


def _saves_of_peft() -> list[tuple[Any, str, None]]:
    if importlib.util.find_spec("peft") is None:
        return []
    from peft import PeftModel  # an optional dependency, which ``transformers.trainer`` has imported

    return [(PeftModel, "save_pretrained", None)]


class _StepsAlone(TrainerCallback):
    """Lets a Trainer neither save nor evaluate between the steps that are measured."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = control.should_evaluate = False


def entries_of(folder: Path) -> list[dict[str, str]]:
    """Return what the ranks have noted so far."""
    path = folder / JOURNAL
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def undo(folder: Path, began_s: float) -> list[str]:
    """Remove what the ranks have made, and put back what they have written to. Call it when they have ended.

    Args:
        folder: that of ``Traces``.
        began_s: when the trial began, in seconds of ``time.time``.

    Returns:
        What could not be removed or put back, and why.
    """
    failures = []
    for entry in reversed(entries_of(folder)):
        try:
            if "made" in entry:
                _remove(entry["made"])
            # Nodes may share a file. What is newer than the trial was copied after ranks of another node had written.
            elif os.path.getmtime(entry["copy"]) < began_s:
                shutil.copy2(entry["copy"], entry["kept"])
        except OSError as error:
            failures.append(str(error))
    (folder / JOURNAL).unlink(missing_ok=True)
    return failures


def _remove(path: str) -> None:
    # Nodes may share a folder, and remove it at the same time.
    with suppress(FileNotFoundError):
        if os.path.islink(path) or not os.path.isdir(path):
            os.remove(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
            if os.path.isdir(path):
                shutil.rmtree(path)
