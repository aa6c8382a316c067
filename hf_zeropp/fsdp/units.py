"""The units of an FSDP2 model: private names of FSDP2 that this package reads stand in this file and in param_shard.py.

A unit is one FSDP2 communication group: the parameters of one ``fully_shard`` call, which are gathered and reduced
together. FSDP2's public hooks (``set_custom_all_gather``, ``set_custom_reduce_scatter``) hand us flat tensors. To cut
blocks at parameter boundaries, to notice changed weights, and to know whose gradients a flat tensor holds, we must know
which parameters lie in it. ``FSDPState`` and ``FSDPParamGroup`` know, and have no public accessor for it.
tests/style/test_seams.py fails when one of the names below moves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from hf_zeropp import devices
from hf_zeropp.compat.extend import extend
from hf_zeropp.fsdp.param_shard import (
    ParamShard,
    ReducedShard,
    drop_unreduced,
    fill_in_zeros,
    gather_dtype_of,
    gets_gradient,
    grad_dtype_of,
    is_extension,
    reduce_dtype_of,
    shard_of,
    unreduced_of,
    was_gathered,
)
from hf_zeropp.ops.format import FLOAT_DTYPES

__all__ = ["AllGather", "DefaultAllGather", "DefaultReduceScatter", "ReduceScatter", "Unit", "find_units"]


class Unit:
    """One FSDP2 communication group: its parameters, its group, and the places where comm objects go."""

    def __init__(self, name: str, module: FSDPModule, param_group: FSDPParamGroup) -> None:
        self.name = name
        self._module = module
        self._group = param_group
        self._have_gradients = [True] * len(param_group.fsdp_params)
        self._behind: Callable[[torch.Tensor], None] | None = None
        self._reduced_shards: tuple[ReducedShard, ...] = ()
        self._reduced_key: list[tuple[int, int]] = []

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that FSDP2 gathers together."""
        return tuple(self._group.modules)

    @property
    def params(self) -> list[DTensor]:
        """The sharded parameters, in the order of the flat shard. Not the unsharded ones a module shows in forward."""
        return [cast(DTensor, fsdp_param.sharded_param) for fsdp_param in self._group.fsdp_params]

    @property
    def trainable(self) -> list[DTensor]:
        """The sharded parameters with ``requires_grad``."""
        return [param for param in self.params if param.requires_grad]

    @property
    def trains(self) -> bool:
        """Whether any parameter is trainable."""
        return any(fsdp_param.sharded_param.requires_grad for fsdp_param in self._group.fsdp_params)

    def has_param_of(self, ids: set[int]) -> bool:
        """Return whether one of the unit's parameters, trainable or not, is among the objects with these ids."""
        return any(id(param) in ids for param in self.params)

    def param_shards(self, *, trainable_only: bool = False) -> list[ParamShard]:
        """Return the parts of a flat shard: all parameters (as gathered), or the trainable ones (as reduced)."""
        if not trainable_only:
            return list(self._shards)
        params = self._group.fsdp_params
        return [self._shards[index] for index in self._reduction_order if params[index].sharded_param.requires_grad]

    @functools.cached_property
    def _shards(self) -> tuple[ParamShard, ...]:
        # FSDP2 cuts parameters once, in ``fully_shard``. Parameters that are replaced later must have the same sizes.
        return tuple(map(shard_of, self._group.fsdp_params))

    @property
    def _reduction_order(self) -> Sequence[int]:
        """The order in which parameters lie in a flat gradient."""
        # Since torch 2.15 they are grouped there by the dtypes of their gradients. FSDP2 chooses the order at the first use.
        return getattr(self._group, "_reduce_scatter_param_indices", None) or range(len(self._group.fsdp_params))

    def reduced_shards(self) -> tuple[ReducedShard, ...]:
        """Return the parts of the flat gradient that FSDP2 is about to hand to the reduction.

        They are the trainable parameters, and those that were frozen after the forward pass and have a gradient still. Valid
        during a reduction. As long as nothing of it changes, it is the same object.
        """
        params, have_gradients = self._group.fsdp_params, self._have_gradients
        found = [(index, params[index].sharded_param) for index in self._reduction_order if have_gradients[index]]
        # Parameters are compared by identity. What was found last holds them, so no other one can have their ids.
        key = [(index, id(param)) for index, param in found]
        if key != self._reduced_key:
            self._reduced_key = key
            shards = [self._shards[index] for index, _ in found]
            starts = itertools.accumulate((shard.padded_numel for shard in shards), initial=0)
            self._reduced_shards = tuple(
                ReducedShard(shard, cast(DTensor, param), start)
                for shard, start, (_, param) in zip(shards, starts, found, strict=False)
            )
        return self._reduced_shards

    def wrap_post_backward(
        self, keeps_unreduced: Callable[[], bool], before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call ``before`` and ``after`` around FSDP2's ``post_backward``, which reduces gradients and adds them to ``.grad``.

        Where ``keeps_unreduced()``, FSDP2 adds gradients up at full size instead, as under ``set_requires_gradient_sync(False)``.
        """

        # FSDP2 looks the method up at each call (in its autograd function, and for units that autograd did not reach, in
        # its final callback), so one on the instance serves both.
        def post_backward(original: Callable[..., None], *args: Any) -> None:
            if keeps_unreduced():
                # FSDP2 would look for gradients of parameters that no pass has used yet, and raise.
                if not all(map(was_gathered, self._group.fsdp_params)):
                    return
                reduces, self._group.reduce_grads = self._group.reduce_grads, False
                try:
                    original(*args)
                finally:  # the user's own choice, which may be the same
                    self._group.reduce_grads = reduces
                return
            # FSDP2 does not say which parameters are in the flat tensor that it reduces: those with a gradient. They are noted
            # here, because it takes the gradients off the parameters next.
            if self._group.reduce_grads and not self._reduces_unused:
                fill_in_zeros(self._group.fsdp_params)
            self._have_gradients = self._get_gradients()
            before()
            try:
                original(*args)
            finally:  # a reduction that raised is as unfinished as one that is under way
                after()

        extend(self._group, "post_backward", post_backward)

    def wrap_own_reduction(self, wrapper: Callable[[Callable[[], None], bool], None]) -> None:
        """Let ``wrapper`` run each reduction that FSDP2 does itself. It is also told whether replicas are averaged behind it."""

        def post_backward(original: Callable[..., None], *args: Any) -> None:
            if self._group.reduce_grads and any(self._get_gradients()):
                wrapper(lambda: original(*args), self._group.all_reduce_grads)
            else:
                original(*args)

        extend(self._group, "post_backward", post_backward)

    @property
    def _reduces_unused(self) -> bool:
        """Whether FSDP2 was told to reduce zeros for parameters without a gradient (since torch 2.13)."""
        return getattr(self._group, "reduce_scatter_unused_params", False)

    def _get_gradients(self) -> list[bool]:
        """Return for each parameter whether FSDP2's next reduction takes a gradient of it."""
        return [gets_gradient(param, self._reduces_unused) for param in self._group.fsdp_params]

    def unreduced_bytes(self) -> int:
        """Bytes of the gradients that this rank keeps at full size until FSDP2 reduces them."""
        return sum(grad.nbytes for fsdp_param in self._group.fsdp_params for grad in unreduced_of(fsdp_param))

    def drop_unreduced(self) -> None:
        """Drop the gradients that ``unreduced_bytes`` counts."""
        for fsdp_param in self._group.fsdp_params:
            drop_unreduced(fsdp_param)

    def shard_bytes(self) -> int:
        """Bytes of the flat shard when dtypes are mixed and FSDP2 gathers it as bytes."""
        return sum(
            shard.padded_numel * gather_dtype_of(fsdp_param).itemsize
            for shard, fsdp_param in zip(self.param_shards(), self._group.fsdp_params, strict=True)
        )

    def gathered_bytes(self) -> int:
        """Bytes of the unit while it is unsharded."""
        return self.shard_bytes() * self.shard_group.size()

    def gather(self) -> None:
        """Gather the unit now. A backward pass reshards it, or ``reshard``."""
        self._module.unshard()

    def stay_gathered_after_forward(self) -> None:
        """Let forward passes leave the unit gathered until the backward pass, as FSDP2 leaves its root unit by default."""
        self._module.set_reshard_after_forward(False, recurse=False)

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        """Gather the unit now and keep it so, whatever runs inside."""
        reshards = self.reshards_after_forward
        self.gather()
        # A forward pass inside would reshard the unit at its end. Units within this one keep their own setting.
        self._module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            self._module.set_reshard_after_forward(reshards, recurse=False)
            self._module.reshard()

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype in which weights are gathered (uint8 where dtypes are mixed, or tensors make their gather's input)."""
        dtypes = set(map(gather_dtype_of, self._group.fsdp_params))
        return dtypes.pop() if len(dtypes) == 1 and not self._has_extensions else torch.uint8

    @property
    def _has_extensions(self) -> bool:
        """Whether a parameter is a tensor subclass that makes the input of its gather itself, of any size and dtypes."""
        return any(map(is_extension, self._group.fsdp_params))

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 hands gradients to the reduction, where all trainable parameters have one."""
        trainable = [param for param in self._group.fsdp_params if param.sharded_param.requires_grad]
        # Nothing is reduced in a frozen unit, and not every two dtypes of weights can be promoted.
        return (
            functools.reduce(torch.promote_types, set(map(reduce_dtype_of, trainable)))
            if trainable
            else self.param_dtype
        )

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks over which the unit is sharded."""
        return cast(FSDPMeshInfo, self._group.mesh_info).shard_process_group

    @property
    def has_other_parallelism(self) -> bool:
        """Whether parameters are sharded over a second mesh as well, which is that of tensor parallelism."""
        num_dimensions = 1 if self.replica_group is None else 2
        return any(param.device_mesh.ndim > num_dimensions for param in self.params)

    def numel_in_group(self, param: DTensor) -> int:
        """Return how many elements of a parameter the shard group holds: a part, if tensor or expert parallelism cuts it."""
        num_own = 1 if self.replica_group is None else 2  # dimensions that FSDP2 has put in front of the others
        others = zip(param.device_mesh.shape[num_own:], param.placements[num_own:], strict=True)
        return param.numel() // math.prod(size for size, placement in others if placement.is_shard())

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard, one in each replica; None without replicas (HSDP)."""
        # Parameters keep this mesh, also where ``take_over_replicas`` has changed that of the group.
        info = self._group.fsdp_params[0].mesh_info
        return info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None

    def take_over_replicas(self) -> None:
        """Let FSDP2 leave the mean over replicas to the unit's comm object: it shards over the shard group, and that is all.

        FSDP2 would average its output in every micro-step, also zeros that stand for a gradient which is still pending. The
        parameters keep their mesh of two dimensions, so checkpoints, clipping and optimizers see replicas as before.
        """
        info = self._group.mesh_info
        if isinstance(info, HSDPMeshInfo):
            shards = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
            # FSDP2 compares the two to tell whether backward gathers from other shards.
            self._group.mesh_info = shards
            if self._group.post_forward_mesh_info is not None:
                self._group.post_forward_mesh_info = shards

    @property
    def puts_off_replicas(self) -> bool:
        """Whether the user lets reductions leave out the mean over replicas for now (``set_requires_all_reduce(False)``)."""
        return self.replica_group is not None and not self._group.all_reduce_grads

    @property
    def device_type(self) -> str:
        """The type of the device that computes with the unit."""
        return self._group.device.type

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the unit is resharded between forward and backward, and gathered twice."""
        # FSDP2 keeps its root gathered unless it was told otherwise, and notes that in the first forward pass.
        state = self._module._get_fsdp_state()
        stays_gathered = self.name == ROOT and state._is_root is None and state._auto_reshard_after_forward
        return self._group._reshard_after_forward and not stays_gathered

    @property
    def reshards_to_part_of_the_world(self) -> bool:
        """Whether backward gathers from other shards than forward, in another group (``reshard_after_forward=<int>``)."""
        return self._group._use_post_forward_mesh

    def initialize(self) -> None:
        """Let FSDP2 take over parameters that were replaced since ``fully_shard``, as it does before a unit's first gather.

        Raises:
            RuntimeError: parameters are on the meta device still.
        """
        if not self._group._reset_sharded_params:
            self._group.lazy_init()
        # There FSDP2 chooses the dtype of gradients, and up to torch 2.14 none for a unit that is frozen at that time: when it
        # thaws, stock FSDP2 raises where it reduces a micro-step by itself (pytorch#186998).
        elif getattr(self._group, "_orig_dtype", self) is None and self.trains:
            self._group._init_mp_dtypes()

    @property
    def is_unsharded(self) -> bool:
        """Whether the unit's parameters are gathered now, also if nothing has used them yet (a prefetch)."""
        return self._group.is_unsharded or self._group._all_gather_result is not None

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward pass of the model that the unit belongs to is under way, or of a sharded part of it."""
        return self._module._get_fsdp_state()._state_ctx.iter_forward_root is not None

    @property
    def is_in_backward(self) -> bool:
        """Whether FSDP2 has begun a backward pass of the model that the unit belongs to, and not ended it."""
        return self._module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued

    def reshard(self) -> None:
        """Drop the unsharded parameters, so that the next use gathers anew."""
        # FSDP2 would give what it prefetched for a unit that a pass skipped, or did not reach before it raised, to the next pass.
        if (prefetched := self._group._all_gather_result) is not None:
            if prefetched.all_gather_event is not None:
                self._group.device_handle.current_stream().wait_event(prefetched.all_gather_event)
            if isinstance(prefetched.all_gather_work, dist.Work):
                prefetched.all_gather_work.wait()
            self._group._all_gather_result = None
        self._group._to_sharded()

    @property
    def shows_reduced_output(self) -> bool:
        """Whether user code sees a reduction's output before the backward pass ends (all-reduce or gradient hooks)."""
        # This runs in every reduction. A plain loop over what exists is several times as fast as one over ``trainable``.
        for fsdp_param in self._group.fsdp_params:
            param = fsdp_param.sharded_param
            if getattr(param, "_post_accumulate_grad_hooks", None) and param.requires_grad:
                return True
        return self._group._all_reduce_hook is not self._behind

    def reduce_behind(self, finish: Callable[[torch.Tensor], None]) -> None:
        """Let FSDP2 call ``finish`` with each output of a reduction, on its stream for all-reduces, unless a hook is there."""
        if self._group._all_reduce_hook is None:
            self._behind = finish
            self._module.set_all_reduce_hook(finish)

    @property
    def has_plain_shards(self) -> bool:
        """Whether the flat shard is the parameters' data on the compute device, cast (no extension, no offload)."""
        return not self._has_extensions and not any(param.offload_to_cpu for param in self._group.fsdp_params)

    def flat_shard(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what FSDP2 would hand to a gather: the padded shards of all parameters, cast and joined. Plain shards only."""
        # One fused copy casts and joins all parameters, as FSDP2's own copy-in does.
        shards = self._shard_data
        flat = torch.empty(sum(shard.numel() for shard in shards), dtype=dtype, device=self._group.device)
        torch._foreach_copy_(flat.split([shard.numel() for shard in shards]), shards)
        return flat

    def shards_to_encode(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the padded shards of all parameters one by one, as they are kept, or the flat shard. Plain shards only."""
        # On accelerators a kernel launch for each parameter would cost more than the copy that joins them. On CPU a call
        # costs little and a copy of the whole shard does not.
        shards = self._shard_data
        if devices.has_streams(self.device_type) or any(shard.dtype not in FLOAT_DTYPES for shard in shards):
            return [self.flat_shard(dtype)]
        return shards

    def masters(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what ``flat_shard`` returns, read from the parameters themselves. For checks."""
        flat = torch.zeros(sum(shard.padded_numel for shard in self._shards), dtype=dtype, device=self._group.device)
        places = flat.split([shard.padded_numel for shard in self._shards])
        for place, param in zip(places, self.params, strict=True):
            local = local_tensor_of(param).detach().reshape(-1)
            place[: local.numel()].copy_(local)
        return flat

    def set_all_gather(self, comm: AllGather) -> None:
        """Let FSDP2 gather the unit through ``comm``."""
        self._module.set_custom_all_gather(comm)

    def set_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Let FSDP2 reduce the unit's gradients through ``comm``."""
        self._module.set_custom_reduce_scatter(comm)

    def attached(self, kind: str) -> list[object]:
        """Return what hangs on FSDP2's group or on its gather and is of a class with this name, under whatever attribute."""
        values = [*vars(self._group).values(), *vars(self.all_gather).values()]
        return [value for value in values if any(base.__name__ == kind for base in type(value).__mro__)]

    @property
    def all_gather(self) -> AllGather:
        """The comm object through which FSDP2 gathers the unit."""
        return self._group._all_gather_comm

    @property
    def reduce_scatter(self) -> ReduceScatter:
        """The comm object through which FSDP2 reduces the unit's gradients."""
        return self._group._reduce_scatter_comm

    def divisor_after_reduce(self, dtype: torch.dtype) -> float:
        """Return the divisor that FSDP2 applies after a reduction in ``dtype``: not 1 where it asks for sums, and in fp16."""
        # The predivide factor is left out: FSDP2 has applied it to the flat gradient before our reduction got it.
        group = self._group
        factor, sums = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        _, divisor, _, _ = _get_gradient_divide_factors(
            group._reduce_scatter_process_group, None, dtype, group.device.type, factor, sums
        )
        return 1.0 if divisor is None else divisor

    @property
    def gradient_divide_factor(self) -> float | None:
        """By what gradients are divided in place of the number of ranks, if the user has set it."""
        return self._group.gradient_divide_factor

    def shard_memory(self) -> list[torch.Tensor] | None:
        """Return this rank's shards of all parameters, 1-D tensors that own the memory FSDP2 gathers from.

        None where that memory is not the parameters' own (tensor subclasses that make their gather input themselves).
        """
        return None if self._has_extensions else self._shard_data

    @property
    def _shard_data(self) -> list[torch.Tensor]:
        return [fsdp_param._sharded_param_data for fsdp_param in self._group.fsdp_params]

    def describe_params(self) -> list[str]:
        """Return name, full shape, dtype and training of each parameter, in words."""
        return [
            f"{shard.name} {tuple(param.shape)} in {param.dtype}{'' if param.requires_grad else ', frozen'}"
            f"{'' if grad_dtype in (None, param.dtype) else f', its gradient in {grad_dtype}'}"
            f"{', with a gather of its own' if hasattr(local_tensor_of(param), 'fsdp_pre_all_gather') else ''}"
            for shard, param, grad_dtype in zip(
                self.param_shards(), self.params, map(grad_dtype_of, self._group.fsdp_params), strict=True
            )
        ]

    def describe_precision(self) -> str:
        """Return the dtypes of FSDP2's mixed precision policy, in words."""
        policies = [param.mp_policy for param in self._group.fsdp_params]
        # From torch 2.15 on the parameters of a unit may differ in param_dtype.
        param_dtypes = sorted({str(policy.param_dtype) for policy in policies})
        return f"param_dtype {', '.join(param_dtypes)}, reduce_dtype {policies[0].reduce_dtype}"

    @property
    def grad_dtypes(self) -> set[torch.dtype | None]:
        """The dtypes in which trainable parameters keep their gradients; None where FSDP2 takes them as they are."""
        return {grad_dtype_of(param) for param in self._group.fsdp_params if param.sharded_param.requires_grad}

    def structure(self) -> tuple[object, ...]:
        """Return the facts that choose collectives: of each parameter, of an all-reduce hook, and the divisors of gradients."""
        # This runs before every forward pass, so it goes through the parameters once.
        params = ((fsdp_param.sharded_param, grad_dtype_of(fsdp_param)) for fsdp_param in self._group.fsdp_params)
        return (
            *(
                (param.requires_grad, param.dtype, grad_dtype, len(param._post_accumulate_grad_hooks or ()) > 0)
                for param, grad_dtype in params
            ),
            self._group._all_reduce_hook is not self._behind,
            self._group.gradient_divide_factor,
            self._group.force_sum_reduction_for_comms,
        )


def local_tensor_of(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of a DTensor itself, which ``to_local`` returns a view of, through autograd."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor, as FSDP2 does where it accumulates gradients."""
    tensor._local_tensor = local


ROOT = "(root)"
"""The name of the unit of the model itself."""


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
        units.extend(Unit(name or ROOT, module, group) for group in groups)
    return units


def initialize_root(module: nn.Module) -> None:
    """Let FSDP2 do what it does before a root's first forward pass, if ``module`` is sharded and about to run one."""
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._lazy_init()


def find_sharded_modules() -> list[FSDPModule]:
    """All FSDP2 modules alive in this process, whatever model they belong to. For warnings: ranks may see others."""
    # The list is a copy: a module that is freed meanwhile would change the weak dictionary under the loop.
    modules = (module for module in list(_module_state_mapping) if isinstance(module, FSDPModule))
    return [module for module in modules if any(True for _ in module.parameters())]


def _fsdp_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule))


def _param_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """Torch 2.12 and later hold a list of groups, 2.11 one or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def without_compile_wrapper(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(model)`` wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def on_backward(model: nn.Module, action: Callable[[], None]) -> None:
    """Run ``action`` wherever a backward pass enters a unit, behind FSDP2's call that queues its final callback."""

    # FSDP2 looks the method up at each call. Only the first call of a pass queues a callback.
    def register(original: Callable[[], None]) -> None:
        original()
        action()

    for state in {module._get_fsdp_state() for _, module in _fsdp_modules(model)}:
        extend(state, "_register_root_post_backward_final_callback", register)
