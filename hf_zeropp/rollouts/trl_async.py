"""TRL's ``AsyncGRPOTrainer``: servers elsewhere get the weights that changed, from the secondary shards.

    transfer = UpdateTransfer("updates", "http://server:8000", place="https://trainer/updates")      # on all ranks
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)

TRL's own transfer gathers each parameter over all nodes, in the dtype of the masters, and sends all of them over NCCL. Here all
ranks iterate over ``publish_weights``, and rank 0 sends what changed (``server_updates.py``), while the other ranks wait at TRL's
barrier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn as nn

from hf_zeropp.compat import TESTED, is_at_least, version_of
from hf_zeropp.compat.extend import extend
from hf_zeropp.generation import find_handle
from hf_zeropp.rollouts.publish import NamedWeights, publish_weights
from hf_zeropp.rollouts.server_updates import ServerUpdates, from_rank_0
from hf_zeropp.rollouts.trl_sync import count_as_published


class UpdateTransfer(ServerUpdates):
    """The transfer of an ``AsyncGRPOTrainer`` that sends versions of an ``UpdateSender``. Make it on all ranks.

    Where no server takes a version within ``timeout_s``, or it cannot be written, the sync raises RuntimeError on all ranks.

    Under ZeRO++ the weights come from ``publish_weights``, and adapters are merged on the way. Other models keep TRL's iteration.

    Its arguments are those of ``ServerUpdates``, which also says how to start a server.

    Raises:
        ValueError: as ``ServerUpdates`` does; or this version of TRL is not known to have what this needs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        let_syncs_use_transfers()

    def init_weight_transfer(self) -> None:
        """Do nothing: servers are told where versions are with the first of them."""

    def pause(self) -> None:
        """Do nothing: a server is paused while it loads, and answers while weights are gathered and written."""

    def send_weights(self, iterator: NamedWeights) -> None:
        """Send a version, as ``ServerUpdates.send`` does."""
        self.send(iterator)

    def resume(self) -> None:
        """Do nothing: each server that has the version resumed by itself."""

    def destroy(self) -> None:
        """Do nothing: no connection stays open, and the folder stays for servers that come later."""


def let_syncs_use_transfers() -> None:
    """Let syncs of this process's AsyncGRPOTrainers publish weights and agree on errors, where they use an ``UpdateTransfer``.

    Raises:
        ValueError: this version of TRL is not known to have what this needs. All ranks have the same.
    """
    if not is_at_least("trl", (1, 16)):
        raise ValueError(
            f"UpdateTransfer: expected TRL 1.16 or newer, got {version_of('trl')}. Install it (tested: {TESTED['trl']}), or use "
            "GRPOTrainer with use_vllm=True."
        )
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    extend(AsyncGRPOTrainer, "_sync_weight", _sync_weight)


def _sync_weight(original: Callable[[Any], None], self: Any) -> None:
    # TRL keeps the transfer on rank 0 alone.
    transfer = getattr(self, "weight_transfer", None)
    if not from_rank_0(isinstance(transfer, UpdateTransfer)):
        return original(self)
    model = self.accelerator.unwrap_model(self.model)
    with _from_secondary_shards(self, model) if find_handle(model) is not None else contextlib.nullcontext():
        original(self)
    error = from_rank_0(transfer.take_error() if isinstance(transfer, UpdateTransfer) else None)
    if error is not None:
        raise RuntimeError(error)


@contextlib.contextmanager
def _from_secondary_shards(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Inside, TRL iterates over ``publish_weights``, which merges adapters itself: the model's own stay as they are."""
    count_as_published(model)
    replaced: list[tuple[Any, str]] = [(trainer, "_streaming_iter")]
    trainer._streaming_iter = lambda: publish_weights(model)
    for name in ("merge_adapter", "unmerge_adapter"):
        if hasattr(model, name):
            setattr(model, name, lambda: None)
            replaced.append((model, name))
    try:
        yield
    finally:
        for owner, name in replaced:
            delattr(owner, name)  # the class's own is seen again
