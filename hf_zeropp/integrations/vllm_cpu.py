"""vLLM on a CPU: weights that can be loaded again.

When vLLM has loaded a model, it packs the weights of linear layers for its CPU kernels and drops the originals. A second load
then finds no loader. The output head keeps its original beside the packed copy, takes the new weights, and goes on computing
with the old ones. On GPUs nothing is packed, so this concerns trials and tests on CPUs alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.functional import linear

_PATCHED = "_zeropp_keeps_weights"
_conditions: list[Callable[[], bool]] = []


def always() -> bool:
    """Return True."""
    return True


def keep_weights_loadable(condition: Callable[[], bool] = always) -> None:
    """Let engines that are built later in this process compute with unpacked weights. Repeated calls change nothing.

    vLLM must be installed. It stays as it is where it does not run on a CPU.

    Args:
        condition: whether it is to be so for the engine that is being built. One condition that holds is enough.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if condition not in _conditions:
        _conditions.append(condition)
    if current_platform.is_cpu() and not hasattr(utils.dispatch_cpu_unquantized_gemm, _PATCHED):
        utils.dispatch_cpu_unquantized_gemm = _unpacked(utils.dispatch_cpu_unquantized_gemm)


def _unpacked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        # Weights that are no matrices belong to convolutions, or to experts, which have kernels of their own.
        if layer.weight.ndim == 2 and any(condition() for condition in _conditions):
            layer.cpu_linear = linear
        else:
            original(layer, remove_weight=remove_weight)

    setattr(dispatch, _PATCHED, True)
    return dispatch
