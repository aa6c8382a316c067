"""The units of an FSDP2 model.

A unit is one FSDP2 communication group: the parameters of one ``fully_shard`` call, which are gathered and reduced
together. FSDP2's public hooks (``set_custom_all_gather``, ``set_custom_reduce_scatter``) hand us flat tensors. To cut
blocks at parameter boundaries, to notice changed weights, and to know whose gradients a flat tensor holds, we must know
which parameters lie in it. ``FSDPState`` and ``FSDPParamGroup`` know, and have no public accessor for it. Their private names
stand in this file, param_shard.py, sharded_models.py, gradients/unit_gradients.py and gradients/param_gradients.py.
tests/style/test_seams.py fails when one of them moves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from hf_zeropp import devices
from hf_zeropp.fsdp.gradients.unit_gradients import UnitGradients
from hf_zeropp.fsdp.param_shard import ParamShard, gather_dtype_of, grad_dtype_of, is_extension, shard_of
from hf_zeropp.ops.format import FLOAT_DTYPES

__all__ = ["AllGather", "DefaultAllGather", "Unit"]

ROOT = "(root)"
"""The name of the unit of the model itself."""


class Unit:
    """One FSDP2 communication group: its parameters, its group, and the places where comm objects go."""

    def __init__(self, name: str, module: FSDPModule, param_group: FSDPParamGroup) -> None:
        self.name = name
        self._module = module
        self._group = param_group

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

    @functools.cached_property
    def param_shards(self) -> tuple[ParamShard, ...]:
        """The parts of a flat shard: all parameters."""
        # FSDP2 cuts parameters once, in ``fully_shard``. Parameters that are replaced later must have the same sizes.
        return tuple(map(shard_of, self._group.fsdp_params))

    @functools.cached_property
    def gradients(self) -> UnitGradients:
        """The gradients of the unit: which of them a reduction takes, and the hooks around it."""
        return UnitGradients(self._module, self._group, self.param_shards)

    def shard_bytes(self) -> int:
        """Bytes of the flat shard when dtypes are mixed and FSDP2 gathers it as bytes."""
        return sum(
            shard.padded_numel * gather_dtype_of(fsdp_param).itemsize
            for shard, fsdp_param in zip(self.param_shards, self._group.fsdp_params, strict=True)
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
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks over which the unit is sharded."""
        return cast(FSDPMeshInfo, self._group.mesh_info).shard_process_group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard, one in each replica; None without replicas (HSDP)."""
        # Parameters keep this mesh, also where ``take_over_replicas`` has changed that of the group.
        info = self._group.fsdp_params[0].mesh_info
        return info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None

    @property
    def device(self) -> torch.device:
        """The device that computes with the unit."""
        return self._group.device

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
    def has_plain_shards(self) -> bool:
        """Whether the flat shard is the parameters' data on the compute device, cast (no extension, no offload)."""
        return not self._has_extensions and not any(param.offload_to_cpu for param in self._group.fsdp_params)

    def flat_shard(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what FSDP2 would hand to a gather: the padded shards of all parameters, cast and joined."""
        # One fused copy casts and joins all parameters, as FSDP2's own copy-in does.
        shards = self._shard_data
        flat = torch.empty(sum(shard.numel() for shard in shards), dtype=dtype, device=self._group.device)
        torch._foreach_copy_(flat.split([shard.numel() for shard in shards]), shards)
        return flat

    def shards_to_encode(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the padded shards of all parameters one by one, as they are kept, or the flat shard."""
        # On accelerators a kernel launch for each parameter would cost more than the copy that joins them. On CPU a call
        # costs little and a copy of the whole shard does not.
        shards = self._shard_data
        if devices.has_streams(self.device) or any(shard.dtype not in FLOAT_DTYPES for shard in shards):
            return [self.flat_shard(dtype)]
        return shards

    def set_all_gather(self, comm: AllGather) -> None:
        """Let FSDP2 gather the unit through ``comm``."""
        self._module.set_custom_all_gather(comm)

    def attached(self, kind: str) -> list[object]:
        """Return what hangs on FSDP2's group or on its gather and is of a class with this name, under whatever attribute."""
        values = [*vars(self._group).values(), *vars(self.all_gather).values()]
        return [value for value in values if any(base.__name__ == kind for base in type(value).__mro__)]

    @property
    def all_gather(self) -> AllGather:
        """The comm object through which FSDP2 gathers the unit."""
        return self._group._all_gather_comm

    def shard_memory(self) -> list[torch.Tensor] | None:
        """Return this rank's shards of all parameters, 1-D tensors that own the memory FSDP2 gathers from.

        None where that memory is not the parameters' own (tensor subclasses that make their gather input themselves).
        """
        return None if self._has_extensions else self._shard_data

    @property
    def _shard_data(self) -> list[torch.Tensor]:
        return [fsdp_param._sharded_param_data for fsdp_param in self._group.fsdp_params]

    @property
    def fsdp_params(self) -> list[FSDPParam]:
        """The parameters as FSDP2 knows them, for the functions of param_shard.py."""
        return self._group.fsdp_params

    def structure(self) -> tuple[object, ...]:
        """Return the facts that choose collectives: of each parameter, and of reductions."""
        # This runs before every forward pass, so it goes through the parameters once.
        params = ((fsdp_param.sharded_param, grad_dtype_of(fsdp_param)) for fsdp_param in self._group.fsdp_params)
        return (
            *(
                (param.requires_grad, param.dtype, grad_dtype, len(param._post_accumulate_grad_hooks or ()) > 0)
                for param, grad_dtype in params
            ),
            *self.gradients.structure(),
        )
