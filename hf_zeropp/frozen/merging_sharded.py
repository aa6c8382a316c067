"""Merging of adapters into sharded frozen weights, which lie on another mesh than the adapters.

PEFT's ``layer.merge`` and ``layer.unmerge`` compute with a weight of the base and with the adapter's. The former is sharded over
the node and the latter over the world, and DTensor takes no operands on two meshes. Besides, PEFT assigns to ``weight.data``
(``safe_merge``, DoRA), which changes nothing in a DTensor. So all parameters of a layer are whole while one of the two methods
runs, as in a model that is not sharded. Those of the base are gathered within the node, and adapters, which are small, across
nodes. At the end each rank keeps its shard of what PEFT has written. Packed weights do their part by themselves (``weight.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_zeropp.dtensors import local_part, with_local_part
from hf_zeropp.frozen.adapters import adapter_modules
from hf_zeropp.frozen.modules import Packed
from hf_zeropp.frozen.weight import local_rows
from hf_zeropp.frozen.writing import keep_shard

_IS_WHOLE = "_zeropp_is_whole"


def merge_whole(model: nn.Module) -> None:
    """Let the adapters' layers of ``model`` merge with whole parameters, where the base's are frozen and sharded."""
    for layer in list(model.modules()):
        if hasattr(layer, "adapter_layer_names") and callable(getattr(layer, "merge", None)):
            if any(isinstance(param, DTensor) for param in _frozen_base(layer)):
                # The class is changed and no new module made, so that hooks and references to the layer stay valid.
                layer.__class__ = _merging_class(type(layer))  # type: ignore[arg-type]  # classes are hashable
                keep_shard(layer)  # it may have merged before


class _MergesWhole(nn.Module):
    """Mixin of PEFT's layers."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Merge adapters into the base, as PEFT does."""
        with _whole(self):
            cast(Any, super()).merge(*args, **kwargs)

    def unmerge(self) -> None:
        """Take the merged adapters out of the base, as PEFT does."""
        with _whole(self):
            cast(Any, super()).unmerge()


@functools.cache
def _merging_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_MergesWhole, cls), {"__module__": cls.__module__})


@contextlib.contextmanager
def _whole(layer: nn.Module) -> Iterator[None]:
    """Within the context the layer's parameters are plain tensors. What is written to the base's is kept. Collective.

    Raises:
        RuntimeError: the base's parameters are gathered now.
    """
    if hasattr(layer, _IS_WHOLE):  # DoRA unmerges and merges other adapters while it merges one
        yield
        return
    if not any(isinstance(param, DTensor) for param in _frozen_base(layer)):
        raise RuntimeError(
            f"An adapter is merged or unmerged while the frozen weights of its layer are gathered (rank {dist.get_rank()}): the "
            "change would be lost when they are freed. Call merge_adapter() and unmerge_adapter() between forward passes, and "
            "outside of generation_mode; unmerge before disable_adapter()."
        )
    places = list(_sharded_places(layer))
    for module, name, param in places:
        whole = nn.Parameter(cast(DTensor, param.detach()).full_tensor(), requires_grad=param.requires_grad)
        module._parameters[name] = whole
    setattr(layer, _IS_WHOLE, True)
    try:
        yield
    finally:
        delattr(layer, _IS_WHOLE)
        added = adapter_modules(layer)
        for module, name, param in places:
            written, module._parameters[name] = module._parameters[name], cast(nn.Parameter, param)
            if module not in added:
                _keep_rows(param, cast(Tensor, written))


def _keep_rows(param: DTensor, written: Tensor) -> None:
    """Copy this rank's rows of ``written`` into ``param``, if they are others."""
    rows = written.detach()[local_rows(param.shape, param.device_mesh, param.placements)]
    if not torch.equal(rows, local_part(param.detach())):
        # A write to the DTensor moves the version counter by which ZeRO++ learns that a trainable weight has changed.
        with torch.no_grad():
            param.copy_(with_local_part(param, rows))


def _sharded_places(layer: nn.Module) -> Iterator[tuple[nn.Module, str, DTensor]]:
    """Iterate over the sharded parameters of a layer, and where they are. Codes and scales are left out."""
    for module in layer.modules():
        packed = module.stored_params() if isinstance(module, Packed) else {}
        for name, param in module._parameters.items():
            if isinstance(param, DTensor) and name not in packed:
                yield module, name, param


def _frozen_base(layer: nn.Module) -> list[Tensor]:
    """Return the frozen parameters of what a layer's adapters are added to."""
    added = adapter_modules(layer)
    params = (param for module in layer.modules() if module not in added for param in module._parameters.values())
    return [param for param in params if param is not None and not param.requires_grad]
