"""TRL's server mode (``use_vllm=True``, ``vllm_mode="server"``) where the server takes updates: the words that changed, no NCCL.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "hf_zeropp"}'

TRL's ``VLLMClient`` asks the server for its weight-transfer backend, and joins it over NCCL. That takes GPUs on both sides, and
all weights cross in each sync. Where the backend is this package's, the client sends versions of an ``UpdateSender`` instead
(``server_updates.py``), by files that both see or over HTTP. Servers with other backends get whole weights in TRL's way.

Only rank 0 has a client, so it alone knows the backend. In each sync all ranks learn it from rank 0, and then its errors.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_zeropp.compat.extend import extend
from hf_zeropp.rollouts.server_updates import ServerUpdates, from_rank_0
from hf_zeropp.rollouts.vllm_plugin import BACKEND

logger = logging.getLogger(__name__)

_UPDATES = "_zeropp_updates"


_next: list[Callable[[str], ServerUpdates]] = []
"""Makes the updates of the Trainer that is being built. After ``on_init_end`` TRL's client on rank 0 takes it from here."""


def send_updates_to_server(
    args: TrainingArguments, folder: str | os.PathLike[str] | None = None, place: str | None = None
) -> None:
    """Let the client that this process's TRL trainer builds next send updates, if the server's backend takes them.

    Args:
        args: of a Trainer under ZeRO++. Nothing is done unless it uses a server, nor where TRL's server is one of its own (TRL
            before 1.16). ``vllm_server_timeout`` also limits how long a sync waits for the server.
        folder: for the versions, written by rank 0. None for ``updates`` in the output directory.
        place: the folder as the server sees it, or its URL. None for the folder itself.
    """
    if not (getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", None) == "server"):
        return
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    if not hasattr(VLLMClient, "get_server_info"):
        return
    folder = Path(folder or Path(args.output_dir or ".", "updates"))
    timeout_s = getattr(args, "vllm_server_timeout", 240.0)
    _next[:] = [functools.partial(ServerUpdates, folder, place=place, timeout_s=timeout_s)]
    extend(VLLMClient, "init_communicator", _init_communicator)
    extend(VLLMGeneration, "sync_weights", _sync_weights)


def _init_communicator(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # Taken whatever the backend is: it is not for a later Trainer.
    make_updates = _next.pop() if _next else None
    config = self.get_server_info()["weight_transfer_config"]
    if config is None or config["backend"] != BACKEND:
        return original(self, *args, **kwargs)
    if make_updates is None:
        raise RuntimeError(
            f"The vLLM server at {self.base_url} takes its weights by the backend {BACKEND!r}, but the Trainer is not under "
            "ZeRO++. Pass ZeroPPCallback() to it, or start the server with another --weight-transfer-config."
        )
    updates = make_updates(self.base_url)
    setattr(self, _UPDATES, updates)
    self.update_named_params = lambda metadata, named_params: updates.send(named_params)
    self.reset_prefix_cache = functools.partial(_reset_cache, self, self.reset_prefix_cache, updates)
    logger.info("%s gets the weights that change, by way of %s.", self.base_url, updates.folder)


def _reset_cache(client: Any, reset: Callable[[], None], updates: ServerUpdates) -> None:
    """Let the server forget what it computed with the weights before, and keep the error if it cannot: all ranks raise it."""
    if updates.error is not None:
        return  # it may not answer this either, and the error to see is the first
    try:
        reset()
    except Exception as error:
        updates.error = (
            f"The vLLM server at {client.base_url} took new weights, and then could not reset its cache: {error!r}."
        )


def _sync_weights(original: Callable[[Any], None], self: Any) -> None:
    """Send the weights, and raise the errors of rank 0 on all ranks."""
    if self.mode != "server":
        return original(self)
    updates: ServerUpdates | None = getattr(getattr(self, "vllm_client", None), _UPDATES, None)
    if not from_rank_0(updates is not None):
        return original(self)
    # TRL goes through all weights before the first sync, for names and shapes that updates hold themselves.
    self._weight_metadata = []
    original(self)
    error = from_rank_0(None if updates is None else updates.take_error())
    if error is not None:
        raise RuntimeError(error)
