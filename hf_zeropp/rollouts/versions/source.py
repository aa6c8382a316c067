"""The place of the log: a folder, or the same folder behind a server of static files."""

from __future__ import annotations

import http.client
import os
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from hf_zeropp.files import file_in
from hf_zeropp.rollouts.versions.log import DamagedUpdateError

Read = Callable[[str, int], bytes]
"""Reads the file of a name, of at most so many bytes. Raises DamagedUpdateError where that is not possible."""

TIMEOUT_S = 60.0
"""Seconds without a byte after which a server counts as gone."""


def reader_of(place: str | os.PathLike[str]) -> Read:
    """Return what reads the log in a folder, or at a URL (``http`` or ``https``)."""
    text = os.fspath(place)
    if urllib.parse.urlsplit(text).scheme in ("http", "https"):
        return lambda name, max_bytes: _read_url(text, name, max_bytes)
    return lambda name, max_bytes: _read_file(Path(text), name, max_bytes)


def _read_file(folder: Path, name: str, max_bytes: int) -> bytes:
    try:
        return file_in(folder, name, max_bytes).read_bytes()
    except (OSError, ValueError) as error:
        raise DamagedUpdateError(f"{name} cannot be read: {error}") from error


def _read_url(base: str, name: str, max_bytes: int) -> bytes:
    url = f"{base.rstrip('/')}/{urllib.parse.quote(name, safe='')}"
    # A cache on the way must not answer with an older list.
    request = urllib.request.Request(url, headers={"Cache-Control": "no-cache"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(max_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        raise DamagedUpdateError(f"{url} cannot be read: {error}") from error
    if len(content) > max_bytes:
        raise DamagedUpdateError(f"{url} has more than {max_bytes} bytes.")
    return content
