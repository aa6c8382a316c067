"""TRL's trainers with ``use_vllm=True``: the engine gets its weights from the secondary shards of its own node.

TRL's ``VLLMGeneration.sync_weights`` feeds an engine with the pairs that ``VLLMGeneration._iter_named_params`` yields. TRL's own
pairs are gathered over the whole world, parameter by parameter, in the dtype of the masters, and adapters are merged into the
sharded base before. Under ``ZeroPPCallback`` the pairs come from ``publish_weights`` instead: nothing crosses nodes but what the
next forward pass would send first anyway, adapters are merged on the way, and the model stays as it is. Models that are not
under ZeRO++ keep TRL's way.

*Colocate mode.* Each rank feeds its own engine, or its part of one that is spread over ranks. The engine copies a weight before
the next one is asked for, and starts no collective meanwhile.

*Server mode.* Rank 0 sends, and all ranks iterate. While rank 0 waits for the server, the other ranks of its node wait in their
next gather, and other nodes need nothing of it. The server waits for rank 0 alone, so no circle of waits can close. A sender may
collect several weights before it sends the first, so rank 0 gets copies, which outlive their unit. They cross in TRL's way, or in
that of ``trl_server.py``.
"""

from __future__ import annotations

import importlib.util
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from transformers import TrainingArguments

from hf_zeropp.compat import TESTED, version_of
from hf_zeropp.compat.extend import extend
from hf_zeropp.fsdp.sharded_models import without_compile_wrapper
from hf_zeropp.generation import find_handle
from hf_zeropp.rollouts.publish import NamedWeights, publish_weights
from hf_zeropp.rollouts.vllm_cpu import keep_weights_loadable

logger = logging.getLogger(__name__)

_published: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose weights went to an engine."""


def publish_to_vllm(args: TrainingArguments) -> None:
    """Let engines that this process's TRL trainers build get the weights of ``publish_weights``. Repeated calls change nothing.

    Args:
        args: of a Trainer under ZeRO++. Without ``use_vllm`` nothing is done, and nothing imported.

    Raises:
        ValueError: this version of TRL has no place for it.
    """
    if not getattr(args, "use_vllm", False):
        return
    from trl.generation.vllm_generation import VLLMGeneration

    if not hasattr(VLLMGeneration, "_iter_named_params"):  # all ranks have the same TRL, so all of them raise
        raise ValueError(
            f"use_vllm=True under ZeRO++: expected TRL 1.11 or newer, got {version_of('trl')}, which gathers every weight over "
            f"all nodes for vLLM in each step. Install a newer TRL (tested: {TESTED['trl']}), or set use_vllm=False to generate "
            'with the sharded model, or fsdp_config={"zeropp": False} to train without ZeRO++.'
        )
    extend(VLLMGeneration, "_iter_named_params", _from_secondary_shards)
    if importlib.util.find_spec("vllm") is not None:
        keep_weights_loadable()


def warn_if_unused(args: TrainingArguments, model: nn.Module) -> None:
    """Warn if a Trainer that feeds an engine has not fed it through this module by the end of its first step."""
    if without_compile_wrapper(model) not in _published:
        logger.warning(
            "%s uses vLLM, and no weights went there through ZeRO++ in the first step. Trainers with a sync of their own (TRL's "
            "AsyncGRPOTrainer and OnlineDPOTrainer) gather every weight over all nodes. AsyncGRPOTrainer sends adapters alone to "
            "a server that was started with --enable-lora, and otherwise can send the weights that changed: "
            "weight_transfer=UpdateTransfer(...) from hf_zeropp.rollouts.trl_async.",
            type(args).__name__,
        )


def count_as_published(model: nn.Module) -> None:
    """Note that what an engine needs of a model does not cross nodes as a whole, so that ``warn_if_unused`` says nothing."""
    _published.add(without_compile_wrapper(model))


def _from_secondary_shards(original: Callable[[Any], NamedWeights], self: Any) -> NamedWeights:
    model = self.model
    if find_handle(model) is None:  # by settings that all ranks share
        return original(self)
    count_as_published(model)
    weights = publish_weights(model)
    is_sender = self.mode == "server" and self.accelerator.is_main_process
    return ((name, weight.clone()) for name, weight in weights) if is_sender else weights
