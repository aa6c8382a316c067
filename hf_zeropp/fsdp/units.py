"""The units of an FSDP2 model: every private name of FSDP2 that this package reads stands in this file.

A unit is one FSDP2 communication group, the parameters of one ``fully_shard`` call that are gathered and reduced
together. FSDP2's public hooks (``set_custom_all_gather``, ``set_custom_reduce_scatter``) hand us flat tensors; to cut
blocks at parameter boundaries and to notice changed weights we must know which parameters lie in them. That is held
by ``FSDPState`` and ``FSDPParamGroup``, for which there is no public accessor. tests/test_units.py fails when a name
below moves.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    _get_gradient_divide_factors,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

__all__ = [
    "AllGather",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "ReduceScatter",
    "Unit",
    "WeightStamp",
    "find_units",
]


@dataclasses.dataclass(frozen=True)
class ParamShard:
    """One parameter of a unit as every rank's flat shard holds it."""

    name: str
    padded_numel: int
    numel: int
    ndim: int


class Unit:
    """One FSDP2 communication group: its parameters, its group, and the places where comm objects go."""

    def __init__(self, name: str, module: FSDPModule, param_group: FSDPParamGroup) -> None:
        self.name = name
        self._module = module
        self._group = param_group

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._group.modules)

    @property
    def params(self) -> list[DTensor]:
        """The sharded parameters, in the order of the flat shard. Not the unsharded ones a module shows in forward."""
        return [cast(DTensor, fsdp_param.sharded_param) for fsdp_param in self._group.fsdp_params]

    @property
    def trainable(self) -> list[DTensor]:
        return [param for param in self.params if param.requires_grad]

    @property
    def trains(self) -> bool:
        return len(self.trainable) > 0

    def param_shards(self, *, trainable_only: bool = False) -> list[ParamShard]:
        """What a flat shard consists of: of a gather all parameters, of a reduction the trainable ones."""
        return [
            ParamShard(
                name=fsdp_param._module_info.param_name,
                padded_numel=fsdp_param.padded_sharded_param_size.numel(),
                numel=fsdp_param.sharded_size.numel(),
                ndim=fsdp_param.sharded_param.ndim,
            )
            for fsdp_param in self._group.fsdp_params
            if fsdp_param.sharded_param.requires_grad or not trainable_only
        ]

    def shard_bytes(self) -> int:
        """Bytes of the flat shard when dtypes are mixed and FSDP2 gathers it as bytes."""
        return sum(
            shard.padded_numel * self._gather_dtype(param).itemsize
            for shard, param in zip(self.param_shards(), self.params, strict=True)
        )

    def _gather_dtype(self, param: DTensor) -> torch.dtype:
        """Of one parameter: FSDP2 casts floats alone."""
        cast = self._group.mp_policy.param_dtype if param.dtype.is_floating_point else None
        return cast or param.dtype

    def gathered_bytes(self) -> int:
        """Bytes of the unit while it is unsharded."""
        return self.shard_bytes() * self.shard_group.size()

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Gather the unit now and keep it so, whatever runs inside."""
        reshards = self.reshards_after_forward
        self._module.unshard()
        self._module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            self._module.set_reshard_after_forward(reshards, recurse=False)
            self._module.reshard()

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype in which weights are gathered (uint8 when parameters of several dtypes are mixed)."""
        dtypes = {self._gather_dtype(param) for param in self.params}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 hands gradients to the reduction."""
        policy = self._group.mp_policy
        return policy.reduce_dtype or policy.param_dtype or self.params[0].dtype

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return cast(FSDPMeshInfo, self._group.mesh_info).shard_process_group

    @property
    def is_hsdp(self) -> bool:
        return self._group._is_hsdp

    @property
    def device_type(self) -> str:
        return self._group.device.type

    @property
    def reshards_after_forward(self) -> bool:
        return self._group._reshard_after_forward

    @property
    def reshards_to_part_of_the_world(self) -> bool:
        """Whether backward gathers from other shards than forward, in another group (``reshard_after_forward=<int>``)."""
        return self._group._use_post_forward_mesh

    @property
    def is_unsharded(self) -> bool:
        return self._group.is_unsharded

    def reshard(self) -> None:
        """Drop the unsharded parameters, so that the next use gathers anew."""
        self._group._to_sharded()

    @property
    def shows_reduced_output(self) -> bool:
        """Whether user code sees a reduction's output before the backward pass ends (all-reduce or gradient hooks)."""
        hooks = any(getattr(param, "_post_accumulate_grad_hooks", None) for param in self.trainable)
        return hooks or self._group._all_reduce_hook is not None

    @property
    def has_plain_shards(self) -> bool:
        """Whether the flat shard is the parameters' data on the compute device, cast (no extension, no offload)."""
        return not any(
            fsdp_param.offload_to_cpu or hasattr(fsdp_param._sharded_local_tensor, "fsdp_pre_all_gather")
            for fsdp_param in self._group.fsdp_params
        )

    def flat_shard(self, dtype: torch.dtype) -> torch.Tensor:
        """What FSDP2 would hand to a gather: the padded shards of all parameters, cast and joined. Plain shards only."""
        shards = [fsdp_param._sharded_param_data for fsdp_param in self._group.fsdp_params]
        flat = torch.empty(sum(shard.numel() for shard in shards), dtype=dtype, device=self._group.device)
        torch._foreach_copy_(flat.split([shard.numel() for shard in shards]), shards)
        return flat

    def master_shards(self) -> list[torch.Tensor]:
        """The padded shards of all parameters as they are kept, one by one; in one piece, fp32, on devices where a launch
        for each would cost more than the copy. Plain shards only."""
        if self.device_type != "cpu":
            return [self.flat_shard(torch.float32)]
        return [fsdp_param._sharded_param_data for fsdp_param in self._group.fsdp_params]

    def set_all_gather(self, comm: AllGather) -> None:
        self._module.set_custom_all_gather(comm)

    def set_reduce_scatter(self, comm: ReduceScatter) -> None:
        self._module.set_custom_reduce_scatter(comm)

    @property
    def all_gather(self) -> AllGather:
        return self._group._all_gather_comm

    @property
    def reduce_scatter(self) -> ReduceScatter:
        return self._group._reduce_scatter_comm

    def divide_after_reduce(self, reduced: torch.Tensor) -> torch.Tensor:
        """Divide by what FSDP2 divides by after a reduction (fp16 only: it splits the mean in two divisions)."""
        _, factor, _, _ = _get_gradient_divide_factors(
            self._group._reduce_scatter_process_group,
            None,
            reduced.dtype,
            self._group.device.type,
            self._group.gradient_divide_factor,
            self._group.force_sum_reduction_for_comms,
        )
        return reduced if factor is None or factor == 1 else reduced.div_(factor)

    def stamp(self) -> WeightStamp:
        return WeightStamp.of(self.params)


@dataclasses.dataclass(frozen=True, eq=False)
class WeightStamp:
    """Identity and version counters of a unit's sharded parameters, and of their local tensors, at one moment.

    Both are kept: a DTensor's own counter moves with optimizers and with operations on the parameter, its local
    tensor's with writes through ``to_local()``. Conversions (``model.half()``) keep the parameter object and swap the
    local tensor inside. Writes through ``.data``, raw pointers, ``torch._foreach_*`` or collectives move nothing.

    The references are strong: a weak one makes ``model.to()`` fail (``torch.utils.swap_tensors`` refuses tensors with
    weak references), and an id may be taken again by the successor of a freed tensor.
    """

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, params: list[DTensor]) -> WeightStamp:
        tensors = tuple(tensor for param in params for tensor in (param, param._local_tensor))
        return cls(tensors, tuple(tensor._version for tensor in tensors))

    def matches(self, params: list[DTensor]) -> bool:
        now = WeightStamp.of(params)
        same_tensors = all(ours is theirs for ours, theirs in zip(self.tensors, now.tensors, strict=True))
        return same_tensors and self.versions == now.versions


def find_units(model: nn.Module) -> list[Unit]:
    """The model's units in module order, each once (``fully_shard([a, b])`` makes two modules with one state).

    Raises:
        ValueError: a ``fully_shard`` call made several communication groups (``shard_placement_fn`` with meshes).
    """
    units: list[Unit] = []
    seen: set[int] = set()
    for name, module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        groups = _param_groups(state)
        if len(groups) > 1:
            raise ValueError(
                f"The module {name!r} was sharded into {len(groups)} communication groups (a shard_placement_fn that "
                "names meshes); ZeRO++ needs one per fully_shard call. Call fully_shard on the submodules instead."
            )
        units.extend(Unit(name or "(root)", module, group) for group in groups)
    return units


def find_sharded_modules() -> list[FSDPModule]:
    """All FSDP2 modules alive in this process, whatever model they belong to. For warnings: ranks may see others."""
    modules = (module for module in list(_module_state_mapping) if isinstance(module, FSDPModule))
    return [module for module in modules if any(True for _ in module.parameters())]


def _fsdp_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule))


def _param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """Torch 2.12 and later hold a list of groups, 2.11 one or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass under way ends, after FSDP2's own final callback."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def current_backward() -> int:
    """A number that identifies the backward pass under way, -1 outside of one."""
    return torch._C._current_graph_task_id()


def without_compile_wrapper(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(model)`` wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def on_first_use(model: nn.Module, action: Callable[[], object]) -> None:
    """Run ``action`` once, before the first forward of the model or of any of its submodules.

    A global pre-hook and not one of the model: it runs ahead of FSDP2's own, and it also sees calls that bypass the
    root, such as ``generate`` on a PEFT model.
    """
    members = weakref.WeakSet(model.modules())

    def before_forward(module: nn.Module, args: Any) -> None:
        if without_compile_wrapper(module) in members:
            handle.remove()
            action()

    handle = nn.modules.module.register_module_forward_pre_hook(before_forward)
