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


def keep_weights_loadable() -> None:
    """Let engines that are built later in this process compute with unpacked weights. Repeated calls change nothing.

    vLLM must be installed. It stays as it is where it does not run on a CPU.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not hasattr(utils.dispatch_cpu_unquantized_gemm, _PATCHED):
        utils.dispatch_cpu_unquantized_gemm = _unpacked(utils.dispatch_cpu_unquantized_gemm)


def _unpacked(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:  # a convolution, or experts that have kernels of their own
            return original(layer, remove_weight=remove_weight)
        layer.cpu_linear = linear

    setattr(dispatch, _PATCHED, True)
    return dispatch
