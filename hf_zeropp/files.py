"""Reading files that others may have made, renamed or damaged; writing files that are whole or absent.

A checkpoint may come from a disk that ran full, from a download that broke off, or from a stranger. So the functions here bound
what they read, follow no link out of a checkpoint's folder, and name the file in every error. Weights are read from safetensors
alone: PyTorch's other formats hold pickles, which can run any code when they are loaded.

Errors are ``ValueError`` throughout, because a file that cannot be used is a wrong argument of the caller.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

MAX_SETTINGS_BYTES = 2**20
"""Settings have about a thousand bytes. PyYAML reads about a million per second."""
MAX_JSON_BYTES = 100 * 2**20
"""The state of a training, whose log grows with each step, stays far below."""
PARTIAL = ".partial-"
"""How the names of folders begin in which something is written before it moves to its place."""


def read_text(path: Path, max_bytes: int) -> str:
    """Read a text file of at most ``max_bytes`` bytes.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: it is larger, or no UTF-8.
    """
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)  # the size is not asked for: pipes and devices do not know theirs
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return content.decode()


def parse_settings(text: str, *, is_json: bool = False) -> Any:
    """Parse YAML or JSON that a user wrote.

    Raises:
        ValueError: it is malformed or nested too deeply.
    """
    # ``safe_load`` makes plain values alone. PyYAML's unsafe loader constructs any Python object that a file names.
    try:
        return json.loads(text) if is_json else yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def file_in(folder: Path, name: str, max_bytes: int | None = None) -> Path:
    """Return the path of the file ``name`` in a checkpoint's folder.

    Args:
        folder: the folder, which may itself be a link.
        name: the name of a file in it, for instance as an index gives it.
        max_bytes: the largest size allowed; default: any.

    Raises:
        ValueError: ``name`` is a path, or there is no such file that ``check_file`` accepts.
    """
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ValueError(f"{str(folder)!r} names a file {name!r}; expected the name of a file in that folder.")
    check_file(folder / name, folder, max_bytes)
    return folder / name


def check_file(path: Path, folder: Path, max_bytes: int | None = None) -> None:
    """Check that ``path`` is a regular file inside ``folder``, links followed.

    A link out of the folder would let a stranger's checkpoint have any file of this machine read and copied. The cache of the
    hub, which stores a snapshot as links into its own ``blobs``, is the exception.

    Raises:
        ValueError: it is not, or has more than ``max_bytes`` bytes.
    """
    try:
        # Both are resolved, because the folder may be a link itself: only where the file really lies counts.
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
        size = real.stat().st_size
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise ValueError(f"{str(path)!r} cannot be opened: {error}") from error
    if not real.is_file():  # reading a pipe or a device might never end
        raise ValueError(f"{str(path)!r} is not a regular file.")
    if not any(real.is_relative_to(allowed) for allowed in (home, *_hub_blobs(home))):
        raise ValueError(
            f"{str(path)!r} leads out of its folder, to {str(real)!r}. Put a copy of the file in its place."
        )
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"{str(path)!r} has {size} bytes; expected at most {max_bytes}.")


def _hub_blobs(folder: Path) -> list[Path]:
    """Return where the files of a hub snapshot are stored: ``models--name/blobs`` for ``models--name/snapshots/commit``."""
    return [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        ValueError: there is no such file in the folder, or it holds something else. The message names the file.
    """
    path = file_in(folder, name, MAX_JSON_BYTES)
    try:
        value = json.loads(read_text(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, got {type(value).__name__}.")
    return value


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Its header is checked against its size before any tensor is read.

    Yields:
        What ``safetensors.safe_open`` returns. Only reads from it belong in the context, because errors of the operating
        system are taken for errors of this file.

    Raises:
        ValueError: the file is of another kind, cut off or damaged.
    """
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{str(path)!r} is not a safetensors file. Other formats may hold pickles, which are not loaded."
        )
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is cut off, damaged or no safetensors file: {error}") from error


@contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
    """Give a place to write a file or a folder to, which moves to ``path`` when the context ends.

    The place is in a new folder beside ``path`` that no other user can enter, so none can put a link there for the writer to
    follow. If writing fails, nothing is left at ``path`` that was not there before. A writer that is killed, or has no file
    descriptor left with which to remove its folder, leaves the folder, whose name begins with ``PARTIAL``.

    Yields:
        The path to write to, which does not exist yet.
    """
    # The folder is beside ``path``, so both are on one file system, and ``replace`` is one rename: no reader sees half a file.
    with tempfile.TemporaryDirectory(prefix=f"{PARTIAL}{path.name}-", dir=path.parent) as folder:
        place = Path(folder, path.name)
        yield place
        place.replace(path)


def make_readable(path: Path) -> None:
    """Give a file the mode of one that ``open`` makes. Libraries that write through temporary files leave it to its owner."""
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
