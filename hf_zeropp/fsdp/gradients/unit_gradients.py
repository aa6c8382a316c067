"""The gradients of one FSDP2 unit: what lies in a flat gradient, and what FSDP2 does around its reduction.

Private names of FSDP2 stand here and in param_gradients.py, and in units.py, param_shard.py and sharded_models.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter, _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from hf_zeropp.compat.extend import extend
from hf_zeropp.fsdp.gradients.param_gradients import (
    drop_unreduced,
    fill_in_zeros,
    gets_gradient,
    reduce_dtype_of,
    unreduced_of,
    was_gathered,
)
from hf_zeropp.fsdp.param_shard import ParamShard

__all__ = ["DefaultReduceScatter", "ReduceScatter", "ReducedShard", "UnitGradients"]


class ReducedShard(NamedTuple):
    """One parameter's part of every slice of a reduction.

    Attributes:
        shard: its sizes.
        param: the sharded parameter.
        start: its first element in the slice.
    """

    shard: ParamShard
    param: DTensor
    start: int

    def of(self, slices: torch.Tensor) -> torch.Tensor:
        """Return the part of ``slices`` [..., S] that belongs to the parameter, with its padding."""
        return slices[..., self.start : self.start + self.shard.padded_numel]


class UnitGradients:
    """How FSDP2 reduces the gradients of one unit.

    Args:
        module: the unit's first module.
        param_group: the unit as FSDP2 knows it.
        shards: its parameters, in the order of ``param_group``.
    """

    def __init__(self, module: FSDPModule, param_group: FSDPParamGroup, shards: Sequence[ParamShard]) -> None:
        self._module = module
        self._group = param_group
        self._shards = shards
        self._have_gradients = [True] * len(shards)
        self._behind: Callable[[torch.Tensor], None] | None = None
        self._reduced_shards: tuple[ReducedShard, ...] = ()
        self._reduced_key: list[tuple[int, int]] = []

    # The flat gradient: what FSDP2 hands to a reduction.

    def param_shards(self) -> list[ParamShard]:
        """Return the parts of a flat gradient of all trainable parameters."""
        params = self._group.fsdp_params
        return [self._shards[index] for index in self._order if params[index].sharded_param.requires_grad]

    def reduced_shards(self) -> tuple[ReducedShard, ...]:
        """Return the parts of the flat gradient that FSDP2 is about to hand to the reduction.

        They are the trainable parameters, and those that were frozen after the forward pass and have a gradient still. Valid
        during a reduction. As long as nothing of it changes, it is the same object.
        """
        params, have_gradients = self._group.fsdp_params, self._have_gradients
        found = [(index, params[index].sharded_param) for index in self._order if have_gradients[index]]
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

    @property
    def _order(self) -> Sequence[int]:
        """The order in which parameters lie in a flat gradient."""
        # Since torch 2.15 they are grouped there by the dtypes of their gradients. FSDP2 chooses the order at the first use.
        return getattr(self._group, "_reduce_scatter_param_indices", None) or range(len(self._group.fsdp_params))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 hands gradients to the reduction, where all trainable parameters have one.

        It is fp32 for a frozen unit, in which nothing is reduced.
        """
        dtypes = {reduce_dtype_of(param) for param in self._group.fsdp_params if param.sharded_param.requires_grad}
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    # Around a reduction.

    def reduce_through(self, comm: ReduceScatter) -> None:
        """Let FSDP2 reduce the unit's gradients through ``comm``."""
        self._module.set_custom_reduce_scatter(comm)

    @property
    def comm(self) -> ReduceScatter:
        """The comm object through which FSDP2 reduces the unit's gradients."""
        return self._group._reduce_scatter_comm

    def wrap_post_backward(
        self, keeps_unreduced: Callable[[], bool], before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call ``before`` and ``after`` around FSDP2's ``post_backward``, which reduces gradients and adds them to ``.grad``.

        Where ``keeps_unreduced()``, FSDP2 adds gradients up at full size instead, as under ``set_requires_gradient_sync(False)``.
        Weights that stay between forward and backward (``reshard_after_forward=False``) then stay as well, as under
        ``set_reshard_after_backward(False)``: the memory for them is there in each pass.
        """

        # FSDP2 looks the method up at each call (in its autograd function, and for units that autograd did not reach, in
        # its final callback), so one on the instance serves both.
        def post_backward(original: Callable[..., None], *args: Any) -> None:
            if keeps_unreduced():
                # FSDP2 would look for gradients of parameters that no pass has used yet, and raise.
                if not all(map(was_gathered, self._group.fsdp_params)):
                    return
                group = self._group
                reduces, reshards = group.reduce_grads, group.reshard_after_backward
                group.reduce_grads, group.reshard_after_backward = False, reshards and not self.let_weights_stay
                try:
                    original(*args)
                finally:  # the user's own choice, which may be the same
                    group.reduce_grads, group.reshard_after_backward = reduces, reshards
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
    def are_looked_at(self) -> bool:
        """Whether user code sees a reduction's output before the backward pass ends (all-reduce or gradient hooks)."""
        # This runs in every reduction. A plain loop over what exists is several times as fast as one over ``trainable``.
        for fsdp_param in self._group.fsdp_params:
            param = fsdp_param.sharded_param
            if getattr(param, "_post_accumulate_grad_hooks", None) and param.requires_grad:
                return True
        return self.have_all_reduce_hook

    @property
    def have_all_reduce_hook(self) -> bool:
        """Whether the user has set an all-reduce hook."""
        return self._group._all_reduce_hook is not self._behind

    def reduce_behind(self, finish: Callable[[torch.Tensor], None]) -> None:
        """Let FSDP2 call ``finish`` with each output of a reduction, on its stream for all-reduces, unless a hook is there."""
        if self._group._all_reduce_hook is None:
            self._behind = finish
            self._module.set_all_reduce_hook(finish)

    def structure(self) -> tuple[object, ...]:
        """Return the facts that choose the collectives of reductions: an all-reduce hook of the user's, and divisors."""
        group = self._group
        return self.have_all_reduce_hook, group.gradient_divide_factor, group.force_sum_reduction_for_comms

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
    def divide_factor(self) -> float | None:
        """By what gradients are divided in place of the number of ranks, if the user has set it."""
        return self._group.gradient_divide_factor

    # Replicas.

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
        # The parameters keep this mesh, also where ``take_over_replicas`` has changed that of the group.
        has_replicas = isinstance(self._group.fsdp_params[0].mesh_info, HSDPMeshInfo)
        return has_replicas and not self._group.all_reduce_grads

    # Gradients at full size.

    @property
    def let_weights_stay(self) -> bool:
        """Whether ``reshard_after_forward=False`` was set for the unit. What FSDP2 sets in its root by itself is not meant."""
        return not self._group._reshard_after_forward and not self._module._get_fsdp_state()._auto_reshard_after_forward

    def unreduced_bytes(self) -> int:
        """Bytes of the gradients that this rank keeps at full size until FSDP2 reduces them."""
        return sum(grad.nbytes for fsdp_param in self._group.fsdp_params for grad in unreduced_of(fsdp_param))

    def drop_unreduced(self) -> None:
        """Drop the gradients that ``unreduced_bytes`` counts."""
        for fsdp_param in self._group.fsdp_params:
            drop_unreduced(fsdp_param)

    @property
    def _reduces_unused(self) -> bool:
        """Whether FSDP2 was told to reduce zeros for parameters without a gradient (since torch 2.13)."""
        return getattr(self._group, "reduce_scatter_unused_params", False)

    def _get_gradients(self) -> list[bool]:
        """Return for each parameter whether FSDP2's next reduction takes a gradient of it."""
        return [gets_gradient(param, self._reduces_unused) for param in self._group.fsdp_params]
