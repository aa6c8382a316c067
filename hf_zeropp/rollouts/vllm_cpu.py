"""vLLM on a CPU: weights that can be loaded again.

When vLLM has loaded a model, it packs the weights of linear layers for its CPU kernels and drops the originals. A second load
then finds no loader. The output head keeps its original beside the packed copy, takes the new weights, and goes on computing
with the old ones. Experts are packed in the memory of the originals, and a second load puts weights there that are not packed,
with which the kernels compute something else. Here experts keep their weights, and are packed for each computation.

On GPUs nothing is packed, so this concerns trials and tests on CPUs alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.nn.functional import linear

from hf_zeropp.compat.extend import extend

_conditions: list[Callable[[], bool]] = []


def keep_weights_loadable(condition: Callable[[], bool] = lambda: True) -> None:
    """Let engines that are built later in this process compute with unpacked weights. Repeated calls change nothing.

    vLLM must be installed. It stays as it is where it does not run on a CPU.

    Args:
        condition: whether it is to be so for the engine that is being built. One condition that holds is enough.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if condition not in _conditions:
        _conditions.append(condition)
    if current_platform.is_cpu():
        extend(utils, "dispatch_cpu_unquantized_gemm", _dispatch)
        _keep_experts_unpacked()


def _is_wanted() -> bool:
    return any(condition() for condition in _conditions)


def _dispatch(original: Callable[..., None], layer: Any, remove_weight: bool) -> None:
    # Weights that are not matrices belong to convolutions.
    if layer.weight.ndim == 2 and _is_wanted():
        layer.cpu_linear = linear
    else:
        original(layer, remove_weight=remove_weight)


def _keep_experts_unpacked() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pack = CPUUnquantizedExperts.process_weights_after_loading
    unpacked: weakref.WeakSet[Any] = weakref.WeakSet()

    def keep(original: Callable[..., None], self: Any, layer: nn.Module) -> None:
        if not _is_wanted():
            original(self, layer)
            return
        if any(name.endswith("_bias") for name, _ in layer.named_parameters(recurse=False)):
            raise ValueError(  # on all ranks: they build the same engine
                "expected experts without biases, got some: vLLM pads them beside the weights on a CPU, and would not know them "
                "after a sync of weights. Let vLLM run on a GPU, or generate with the sharded model (use_vllm=False)."
            )
        unpacked.add(self)

    def apply(
        compute: Callable[..., None],
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self in unpacked:
            layer = nn.Module()
            layer.w13_weight, layer.w2_weight = (nn.Parameter(weight, requires_grad=False) for weight in (w1, w2))
            pack(self, layer)
            w1, w2 = layer.w13_weight, layer.w2_weight
        compute(self, output, hidden_states, w1, w2, *args, **kwargs)

    extend(CPUUnquantizedExperts, "process_weights_after_loading", keep)
    extend(CPUUnquantizedExperts, "apply", apply)
