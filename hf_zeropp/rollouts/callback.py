"""The callback's part for a Trainer that feeds an inference engine."""

from __future__ import annotations

import os

from transformers import TrainingArguments

from hf_zeropp.rollouts.trl_async import let_syncs_use_transfers
from hf_zeropp.rollouts.trl_server import send_updates_to_server
from hf_zeropp.rollouts.trl_sync import publish_to_vllm


def take_over_syncs(args: TrainingArguments, folder: str | os.PathLike[str] | None, place: str | None) -> None:
    """Put ``publish_weights`` under the syncs of the Trainer that is being built, before TRL builds its engine.

    Args:
        args: of a Trainer under ZeRO++ that feeds an engine.
        folder: for versions of the weights, where TRL's server takes them. None for ``updates`` in the output directory.
        place: the folder as the server sees it, or its URL. None for the folder itself.
    """
    publish_to_vllm(args)
    send_updates_to_server(args, folder, place)
    if type(args).__name__ == "AsyncGRPOConfig":  # on all ranks, also where only some made an UpdateTransfer
        let_syncs_use_transfers()
