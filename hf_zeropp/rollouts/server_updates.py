"""Servers elsewhere get the weights that changed: rank 0 writes a version, and tells each server to take it.

    updates = ServerUpdates("updates", "http://server:8000", place="https://trainer/updates")      # on all ranks
    updates.send(publish_weights(model))                                                            # on rank 0
    if error := from_rank_0(updates.take_error()): ...                                              # on all ranks

A sync has two parts that never mix: collectives, in which no rank talks to a server, and then requests, while the other ranks
wait. A server pauses only for its own part, the loading (``vllm_transfer.py``), and answers until then.

[Note: errors of rank 0] Rank 0 alone writes and sends. If it raised there, the others would wait for it in their next
collective until the process group's timeout. So its error is kept, it goes through the rest of the sync, and all ranks raise.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list

from hf_zeropp.rollouts.publish import NamedWeights
from hf_zeropp.rollouts.versions import UpdateSender

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MIN_TIMEOUT_S = 5.0
"""Seconds that a request may take where a sync's time is nearly over."""


class ServerUpdates:
    """Sends weights to vLLM servers as versions of an ``UpdateSender``.

    Servers run ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "hf_zeropp"}'``. A server that
    fails keeps its weights, and stays paused if it had begun to load; it is left out with a warning as long as another one takes
    the version. The next ``send`` tells it the newest one, also after it has been restarted. A version that no server takes is
    offered again for ``timeout_s``.

    Args:
        folder: for the versions, written by rank 0. No other sender may write to it.
        servers: base URL of a server, or several.
        place: the folder as servers see it, or its URL behind a server of static files. None for ``folder`` itself.
        timeout_s: seconds that a sync may wait for servers, fewer than the process group's timeout.

    Attributes:
        error: of rank 0, kept for ``take_error``.

    Raises:
        ValueError: a server or ``place`` is no URL, there is no server, or ``timeout_s`` is not above 0.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        servers: str | Sequence[str],
        *,
        place: str | None = None,
        timeout_s: float = 240.0,
    ) -> None:
        urls = [servers] if isinstance(servers, str) else list(servers)
        if not urls or not all(urllib.parse.urlsplit(url).scheme in ("http", "https") for url in urls):
            raise ValueError(f"expected the URLs of one server or more ('http://localhost:8000'), got {servers!r}")
        if not timeout_s > 0:
            raise ValueError(f"expected timeout_s above 0, got {timeout_s!r}")
        self.folder, self._timeout_s = Path(folder).absolute(), timeout_s
        self._place = str(self.folder) if place is None else place
        self._servers = [_Server(url, self._place) for url in urls]
        # It is made in the first sync, because a folder that cannot be written to is an error of rank 0 alone.
        self._sender: UpdateSender | None = None
        self.error: str | None = None

    def send(self, iterator: NamedWeights) -> None:
        """Write a version, and tell all servers to take it. Errors of both are kept for ``take_error``.

        Args:
            iterator: names and full weights. It is gone through to its end, and its errors are raised: all ranks see them.
        """
        weights = _ToTheEnd(iterator)
        try:
            self._sender = self._sender or UpdateSender(self.folder)
            version = self._sender.publish(weights)
        except Exception as error:
            if weights.has_failed:
                raise
            weights.skip()
            self.error = (
                f"The weights could not be written to {self.folder}: {error!r}. Look at its free space and rights, or name "
                "another folder."
            )
            logger.error(self.error, exc_info=error)
        else:
            self.error = self._offer(version)

    def take_error(self) -> str | None:
        """Return what went wrong in the last sync, once; None for nothing."""
        error, self.error = self.error, None
        return error

    def _offer(self, version: int) -> str | None:
        """Tell servers to take a version until one does. Returns what is wrong if none did."""
        end = time.monotonic() + self._timeout_s
        while True:
            with ThreadPoolExecutor(len(self._servers)) as pool:
                failures = list(pool.map(lambda server: server.take(version, end), self._servers))
            failed = [f"{server.url}: {why}" for server, why in zip(self._servers, failures, strict=True) if why]
            if len(failed) < len(self._servers):
                if failed:
                    logger.warning(
                        "Version %d of the weights is not at %s. The next sync tries again.", version, "; ".join(failed)
                    )
                return None
            if time.monotonic() > end:
                return (
                    f"No server took version {version} of the weights within {self._timeout_s:g} s: {'; '.join(failed)}. Each "
                    f"must run, reach {self._place}, and have been started as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL "
                    '--weight-transfer-config \'{"backend": "hf_zeropp"}\'. Resume from the last checkpoint then.'
                )
            time.sleep(1)


class _Server:
    """One vLLM server, and the requests that bring it to a version."""

    def __init__(self, url: str, place: str) -> None:
        self.url, self._place = url.rstrip("/"), place
        self._knows_place = False

    def take(self, version: int, end: float) -> str:
        """Bring the server to a version, before a moment of the monotonic clock. Returns why it is not there; "" if it is."""
        failure = self._try(version, end)
        # A server that was restarted has forgotten where versions are, and a connection may just have been cut.
        return failure and self._try(version, end)

    def _try(self, version: int, end: float) -> str:
        post = functools.partial(self._post, end)
        try:
            if not self._knows_place:
                post("/init_weight_transfer_engine", {"init_info": {"place": self._place}})
                self._knows_place = True
            # Requests under way are held, and go on with the new weights, as with TRL's own transfer.
            post("/pause?mode=keep", {})
            post("/start_weight_update", {"is_checkpoint_format": True})
            try:
                post("/update_weights", {"update_info": {"version": version}})
            except BaseException:
                # The next start must find no update under way.
                with contextlib.suppress(OSError, http.client.HTTPException):
                    post("/finish_weight_update", {})
                raise
            post("/finish_weight_update", {})
            # Not after an error: with tensor parallelism some processes may have the version and some not.
            post("/resume", {})
        except (OSError, http.client.HTTPException) as error:
            self._knows_place = False
            return _words_of(error)
        return ""

    def _post(self, end: float, path: str, content: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(content).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=max(end - time.monotonic(), MIN_TIMEOUT_S)) as answer:
            answer.read()


class _ToTheEnd:
    """An iterator of weights that knows whether an error is its own, and that can be gone through after another one."""

    def __init__(self, iterator: NamedWeights) -> None:
        self._iterator, self.has_failed = iterator, False

    def __iter__(self) -> NamedWeights:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except BaseException:
            self.has_failed = True
            raise

    def skip(self) -> None:
        """Go to the end: other ranks gather what is left."""
        for _ in self:
            pass


def _words_of(error: Exception) -> str:
    """Return an error of a request with the beginning of the server's answer, which names the cause."""
    if isinstance(error, urllib.error.HTTPError):
        with contextlib.suppress(OSError, http.client.HTTPException):
            return f"{error} ({error.read(500).decode(errors='replace').strip()})"
    return f"{error}" or repr(error)


def from_rank_0(value: _T) -> _T:
    """Return rank 0's value on all ranks."""
    received: list[_T] = broadcast_object_list([value], from_process=0)
    return received[0]
