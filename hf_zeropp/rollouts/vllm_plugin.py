"""The plugin that vLLM loads in each of its processes: it makes the weight-transfer backend ``hf_zeropp`` known.

vLLM finds it by the entry point ``vllm.general_plugins`` of this package. Nothing changes for engines with other backends.
"""

from __future__ import annotations

import functools

from hf_zeropp.rollouts.vllm_cpu import keep_weights_loadable

BACKEND = "hf_zeropp"


@functools.cache  # vLLM may call it several times in a process, and refuses a backend that it knows
def register() -> None:
    """Register the backend."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "hf_zeropp.rollouts.vllm_transfer", "UpdateEngine")
    keep_weights_loadable(_is_in_use)


def _is_in_use() -> bool:
    """Whether the engine that is being built gets its weights by the backend."""
    from vllm.config import get_current_vllm_config

    transfer = get_current_vllm_config().weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND
