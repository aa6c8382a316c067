"""Seams to PyTorch: FSDP2's groups and parameters, tensor subclasses, autograd, process groups."""

from __future__ import annotations

from hf_zeropp.compat.seam import ON_IMPORT, ON_USE, Relation, Seam

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"

PYTORCH: tuple[Seam, ...] = (
    # FSDP2
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_api",
        names=("AllGather", "ReduceScatter"),
        used_by=("fsdp.units",),
        why="The base classes of objects that take the place of FSDP2's collectives.",
        if_moved=ON_IMPORT,
    ),
    Seam(
        owner=_COLLECTIVES,
        names=("DefaultAllGather", "DefaultReduceScatter", "_get_gradient_divide_factors"),
        used_by=("fsdp.units",),
        why="FSDP2's own collectives, for units that keep them; and by what FSDP2 divides gradients.",
        if_moved=ON_IMPORT,
    ),
    Seam(
        owner=f"{_COLLECTIVES}:_get_gradient_divide_factors",
        names=(
            # All are passed by position. If one were added or moved, values would arrive at other parameters, which
            # might take them without an error.
            *("reduce_scatter_group", "all_reduce_group", "reduce_dtype", "device_type", "factor"),
            "force_sum_reduction_for_comms",
        ),
        used_by=("fsdp.units",),
        why="It is called with these arguments, by position.",
        if_moved="Gradients in fp16 are divided by a wrong number.",
        relation=Relation.TAKES,
        is_silent=True,
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo",
        names=("shard_process_group",),
        used_by=("fsdp.units",),
        why="The ranks over which a unit is sharded.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        names=("_fsdp_param_group",),
        used_by=("fsdp.units",),
        why="The parameters of a unit (torch 2.11).",
        if_moved=ON_USE,
        until=(2, 12),
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        # Two seams for one thing: torch 2.11 has the attribute above, later versions this one. fsdp/units.py asks for
        # this one first.
        names=("_fsdp_param_groups",),
        used_by=("fsdp.units",),
        why="The parameters of a unit, where one `fully_shard` call may make several groups.",
        if_moved="`_fsdp_param_group` is read in its place, which raises if there are several.",
        since=(2, 12),
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        names=("_is_root", "_auto_reshard_after_forward"),
        used_by=("fsdp.units",),
        why="Whether FSDP2 will keep its root unit gathered, before a first forward pass has told.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        names=("_lazy_init",),
        used_by=("fsdp.units",),
        why="FSDP2 takes over parameters that were replaced there; ranks must agree on the new ones.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        names=("_state_ctx",),
        used_by=("fsdp.units",),
        why="The state that the units of a model share.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext",
        names=("post_backward_final_callback_queued",),
        used_by=("fsdp.units",),
        why="Whether a backward pass of the model is under way, which uses the weights of the forward pass.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.distributed.fsdp:FSDPModule",
        names=("_get_fsdp_state",),
        used_by=("fsdp.units",),
        why="The way from a module to its unit.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.distributed._composable_state",
        names=("_module_state_mapping",),
        used_by=("fsdp.units",),
        why="All sharded modules of the process, to warn of those that run without ZeRO++.",
        if_moved=ON_IMPORT,
    ),
    Seam(
        owner=f"{_GROUP}:FSDPParamGroup",
        names=(
            *("modules", "fsdp_params", "mesh_info", "device", "is_unsharded", "gradient_divide_factor"),
            *(
                "force_sum_reduction_for_comms",
                "_is_hsdp",
                "_reshard_after_forward",
                "_use_post_forward_mesh",
                "_to_sharded",
            ),
            *(
                "_all_reduce_hook",
                "_all_gather_comm",
                "_reduce_scatter_comm",
                "_reduce_scatter_process_group",
                "post_backward",
            ),
            *("lazy_init", "_reset_sharded_params"),
        ),
        used_by=("fsdp.units",),
        why="What a unit consists of, how it is gathered and reduced, and in which state it is.",
        if_moved=ON_USE,
    ),
    Seam(
        owner=_GROUP,
        # The relation is not HAS, because the method could stay and be bound earlier. FSDP2's autograd node looks it up
        # on the group when the backward pass arrives there. Only for this reason a replacement that is set on the group
        # is called.
        names=("post_backward",),
        used_by=("fsdp.units",),
        why="Ours stands in its place, to note before a reduction which parameters have gradients.",
        if_moved="Gradients that wait for a reduction are lost, or added to those of other parameters.",
        relation=Relation.READS,
        is_silent=True,
    ),
    Seam(
        owner="torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        # As above: a replacement that is set on the state is called because FSDP2 looks the method up at each call.
        names=("_register_root_post_backward_final_callback",),
        used_by=("fsdp.units",),
        why="Ours stands in its place, to end a backward pass where FSDP2 ends it.",
        if_moved="Under reentrant activation checkpointing gradients cross nodes several times, and are rounded each time.",
        relation=Relation.READS,
        is_silent=True,
    ),
    Seam(
        owner=f"{_GROUP}:FSDPParamGroup",
        # It is read with a default of False, which is right for torch 2.12 and earlier. In later versions a renamed one
        # would read as False too, and the positions of gradients in the flat buffer would be wrong.
        names=("reduce_scatter_unused_params",),
        used_by=("fsdp.units",),
        why="Whether FSDP2 reduces zeros for parameters without a gradient.",
        if_moved="Gradients are taken for those of other parameters where a parameter has none.",
        is_silent=True,
        since=(2, 13),
    ),
    Seam(
        owner=f"{_PARAM}:FSDPParam",
        names=(
            *(
                "sharded_param",
                "sharded_size",
                "padded_sharded_param_size",
                "offload_to_cpu",
                "mp_policy",
                "unsharded_accumulated_grad",
            ),
            *("_module_info", "_sharded_local_tensor", "_sharded_param_data"),
        ),
        used_by=("fsdp.shards", "fsdp.units"),
        why="Name, sizes and memory of a parameter's shard, and its gradient before the reduction.",
        if_moved=ON_USE,
    ),
    Seam(
        owner=f"{_GROUP}:FSDPParamGroup",
        # It is read with a default, which is right for torch 2.14 and earlier.
        names=("_reduce_scatter_param_indices",),
        used_by=("fsdp.units",),
        why="The order of parameters in a flat gradient.",
        if_moved="Gradients of a unit with several dtypes are taken for those of other parameters.",
        is_silent=True,
        since=(2, 15),
    ),
    Seam(
        owner=f"{_PARAM}:FSDPParam",
        # It is read with a default, which is right for torch 2.14 and earlier.
        names=("sharded_grad_dtype",),
        used_by=("fsdp.shards",),
        why="The dtype in which gradients are reduced where the policy names none.",
        if_moved="Gradients are taken to be reduced in another dtype, and bytes are predicted wrongly.",
        is_silent=True,
        since=(2, 15),
    ),
    Seam(
        owner=f"{_PARAM}:FSDPParam",
        # It is read with a default, because FSDP2 sets it at the first gather. A name that is gone would look like a
        # parameter that was never gathered.
        names=("_unsharded_param",),
        used_by=("fsdp.shards",),
        why="A parameter whose gathered form has no gradient is left out of the flat gradient.",
        if_moved="All parameters count as parameters without a gradient, and theirs are lost.",
        is_silent=True,
    ),
    Seam(
        owner=f"{_PARAM}:FSDPParam",
        names=("fsdp_pre_all_gather",),
        used_by=("fsdp.shards", "fsdp.units"),
        why="A tensor that defines this method makes its own input to a gather.",
        if_moved="Deltas are taken of memory that is not what FSDP2 gathers, and the weights drift apart.",
        relation=Relation.READS,
        is_silent=True,
    ),
    # Tensors, autograd, process groups, modules
    Seam(
        owner="torch:Tensor",
        # It is read with a default of None, so a name that is gone would look like a parameter without hooks.
        names=("_post_accumulate_grad_hooks",),
        used_by=("fsdp.units",),
        why="A parameter with such hooks shows its gradient before the backward pass ends.",
        if_moved="The hooks see zeros in the place of gradients that are still under way.",
        is_silent=True,
    ),
    Seam(
        owner="torch:Tensor",
        names=("_version", "_base"),
        used_by=("fsdp.freshness", "comm.hop"),
        why="The counter that moves when a tensor is written; the buffer behind a slice of it.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch:Tensor",
        names=("_make_wrapper_subclass",),
        used_by=("frozen.weight", "fsdp.pending"),
        why="The only way to make a tensor with shape and dtype but no memory.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch:_C",
        names=("_disabled_torch_function_impl",),
        used_by=("frozen.weight", "fsdp.pending"),
        why="Sends operations on a tensor subclass straight to `__torch_dispatch__`.",
        if_moved=ON_IMPORT,
    ),
    Seam(
        owner="torch:_C",
        names=("_current_graph_task_id",),
        used_by=("fsdp.backward",),
        why="Tells one backward pass from another.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch:_C",
        names=("_len_torch_dispatch_stack", "_is_torch_function_mode_enabled"),
        used_by=("ops.eager",),
        why="Whether a mode has to see the call of an operator.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.autograd",
        names=("_profiler_enabled",),
        used_by=("ops.eager",),
        why="Whether the profiler has to see the call of an operator.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.autograd:Variable",
        names=("_execution_engine",),
        used_by=("fsdp.backward",),
        why="Runs a function at the end of a backward pass.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch",
        names=("_foreach_copy_",),
        used_by=("fsdp.units",),
        why="Copies the shards of a unit with one kernel.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.ops:aten",
        names=("_unsafe_view", "_foreach_zero_"),
        used_by=("frozen.weight", "fsdp.pending"),
        why="Operators that tensor subclasses treat in ways of their own.",
        if_moved=ON_IMPORT,
    ),
    Seam(
        owner="torch.ops:aten.add.Tensor",
        names=("_schema",),
        used_by=("frozen.weight",),
        why="Whether an operator writes to its argument.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.utils._pytree",
        names=("tree_map", "tree_leaves", "tree_map_only"),
        used_by=("frozen.weight", "fsdp.pending"),
        why="Tensor subclasses among the nested arguments of an operator.",
        if_moved=ON_IMPORT,
    ),
    Seam(
        owner="torch.distributed.tensor:DTensor",
        names=("_local_tensor",),
        used_by=("fsdp.units",),
        why="The local tensor itself, which `to_local` returns a view of, through autograd.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch.distributed.tensor._utils",
        names=("compute_local_shape_and_global_offset",),
        used_by=("frozen.weight",),
        why="The rows of a sharded tensor that a rank holds.",
        if_moved=ON_IMPORT,
    ),
    Seam(
        owner="torch.distributed:ProcessGroup",
        names=("_get_backend", "_device_types"),
        used_by=("comm.topology",),
        why="The timeout of the world's collectives.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch._C._distributed_c10d:Backend.Options",
        names=("_timeout",),
        used_by=("comm.topology",),
        why="The timeout of the world's collectives.",
        if_moved=ON_USE,
    ),
    Seam(
        owner="torch._dynamo.eval_frame:OptimizedModule",
        # It is read with a default, because most models are not compiled.
        names=("_orig_mod",),
        used_by=("fsdp.units",),
        why="The module that `torch.compile(model)` wraps.",
        if_moved="A compiled model is not recognized, and trains on FSDP2's own collectives.",
        is_silent=True,
    ),
    Seam(
        owner="torch.nn.parameter:_ParameterMeta",
        names=("_is_param",),
        used_by=("frozen.weight",),
        why="The mark makes a packed weight count as a parameter.",
        if_moved="Transformers and PEFT pass over packed weights, or replace them.",
        relation=Relation.READS,
        is_silent=True,
    ),
    Seam(
        owner="torch.nn:Module.to",
        names=("_apply",),
        used_by=("frozen.modules",),
        why="Ours notes the dtype to which packed weights decode from then on.",
        if_moved="Packed weights decode to the dtype they had before `model.to(dtype)`.",
        relation=Relation.READS,
        is_silent=True,
    ),
    Seam(
        owner="torch.nn:Module.state_dict",
        names=("_save_to_state_dict",),
        used_by=("frozen.modules",),
        why="Ours returns codes and scales as bytes, where FSDP2 shards them under a float dtype (torch 2.11).",
        if_moved="Checkpoints hold packed weights under that dtype, and other versions of torch cannot load them.",
        relation=Relation.READS,
        is_silent=True,
    ),
    Seam(
        owner="torch.nn:Module.load_state_dict",
        names=("_load_from_state_dict",),
        used_by=("frozen.modules",),
        why="Ours takes codes and scales as bytes, where FSDP2 shards them under a float dtype (torch 2.11).",
        if_moved="Bytes are cast to that dtype as if they were numbers, and packed weights decode to nonsense.",
        relation=Relation.READS,
        is_silent=True,
    ),
)
