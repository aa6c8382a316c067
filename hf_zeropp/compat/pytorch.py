"""Seams to PyTorch: FSDP2's groups and parameters, tensor subclasses, autograd, process groups."""

from __future__ import annotations

from hf_zeropp.compat.seam import Seam, called, has, reads, sets, takes

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"

# fmt: off
PYTORCH: tuple[Seam, ...] = (
    # FSDP2
    has("torch.distributed.fsdp._fully_shard._fsdp_api", "AllGather ReduceScatter", "fsdp.units fsdp.gradients.unit_gradients",
        "The base classes of objects that take the place of FSDP2's collectives."),
    has(_COLLECTIVES, "DefaultAllGather DefaultReduceScatter _get_gradient_divide_factors",
        "fsdp.units fsdp.gradients.unit_gradients",
        "FSDP2's own collectives, for units that keep them; and by what FSDP2 divides gradients."),
    # All are passed by position. If one were added or moved, values would arrive at other parameters, which might
    # take them without an error.
    takes(f"{_COLLECTIVES}:_get_gradient_divide_factors",
        "reduce_scatter_group all_reduce_group reduce_dtype device_type factor force_sum_reduction_for_comms",
        "fsdp.gradients.unit_gradients",
        "It is called with these arguments, by position. If it moved: gradients in fp16 are divided by a wrong "
        "number.", silent=True),
    has("torch.distributed.fsdp._fully_shard._fsdp_common", "FSDPMeshInfo HSDPMeshInfo",
        "fsdp.units fsdp.gradients.unit_gradients", "Over which ranks FSDP2 shards a unit, and over which it averages."),
    has("torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo", "shard_process_group", "fsdp.units",
        "The ranks over which a unit is sharded."),
    has("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState", "_fsdp_param_group", "fsdp.sharded_models",
        "The parameters of a unit (torch 2.11).", until=(2, 12)),
    # Two seams for one thing: torch 2.11 has the attribute above, later versions this one, which
    # fsdp/sharded_models.py asks for first.
    has("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState", "_fsdp_param_groups", "fsdp.sharded_models",
        "The parameters of a unit, where one `fully_shard` call may make several groups. If it moved: "
        "`_fsdp_param_group` is read in its place, which raises if there are several.", since=(2, 12)),
    has("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        "_is_root _auto_reshard_after_forward _state_ctx",
        "fsdp.units fsdp.sharded_models fsdp.gradients.unit_gradients",
        "Whether FSDP2 will keep its root unit gathered, before a first forward pass has told; and the state that the units of a "
        "model share."),
    called("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState", "_lazy_init", "fsdp.sharded_models",
        "Takes over parameters that were replaced, on which ranks must agree."),
    has("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext",
        "post_backward_final_callback_queued iter_forward_root post_optim_event", "fsdp.units fsdp.sharded_models",
        "Whether a backward pass of the model is under way, which uses the weights of the forward pass; whether a forward pass "
        "is; and where the optimizer's step ends. If it moved: AttributeError in a pass."),
    called("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", "fsdp.units fsdp.sharded_models fsdp.gradients.unit_gradients",
        "The way from a module to its unit."),
    has("torch.distributed._composable_state", "_module_state_mapping", "fsdp.sharded_models",
        "All sharded modules of the process, to warn of those that run without ZeRO++."),
    has(f"{_GROUP}:FSDPParamGroup",
        "modules fsdp_params device is_unsharded all_reduce_grads gradient_divide_factor force_sum_reduction_for_comms "
        "_reshard_after_forward _use_post_forward_mesh _all_reduce_hook _all_gather_comm _reduce_scatter_comm "
        "_reduce_scatter_process_group _reset_sharded_params device_handle",
        "fsdp.units fsdp.sharded_models fsdp.gradients.unit_gradients",
        "What a unit consists of, how it is gathered and reduced, and in which state it is."),
    called(f"{_GROUP}:FSDPParamGroup", "_to_sharded lazy_init", "fsdp.units",
        "Shows a unit's sharded parameters; and takes over those that were replaced."),
    # It is read with a default, which is right from torch 2.15 on.
    has(f"{_GROUP}:FSDPParamGroup", "_orig_dtype", "fsdp.units",
        "The dtype of gradients; None for a unit that was frozen when FSDP2 chose. If it moved: training raises when such a unit "
        "thaws.", until=(2, 15)),
    called(f"{_GROUP}:FSDPParamGroup", "_init_mp_dtypes", "fsdp.units",
        "Chooses that dtype anew.", until=(2, 15)),
    sets(f"{_GROUP}:FSDPParamGroup",
        "reduce_grads reshard_after_backward mesh_info post_forward_mesh_info _all_gather_result post_backward",
        "fsdp.units fsdp.gradients.unit_gradients",
        "Whether a pass reduces; over which ranks; what was prefetched and is dropped; and ours in the place of the method. If "
        "one cannot be set: training raises, or FSDP2 averages over replicas in every micro-step.", silent=True),
    # The relation is not HAS, because the method could stay and be bound earlier. FSDP2's autograd node looks it up
    # on the group when the backward pass arrives there. Only for this reason a replacement that is set on the group
    # is called.
    reads(_GROUP, "post_backward", "fsdp.gradients.unit_gradients",
        "Ours stands in its place, to note before a reduction which parameters have gradients. If it moved: "
        "gradients that wait for a reduction are lost, or added to those of other parameters.", silent=True),
    # As above: a replacement that is set on the state is called because FSDP2 looks the method up at each call.
    reads("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
        "_register_root_post_backward_final_callback", "fsdp.sharded_models",
        "Ours stands in its place, to end a backward pass where FSDP2 ends it. If it moved: under reentrant "
        "activation checkpointing gradients cross nodes several times, and are rounded each time.", silent=True),
    # It is read with a default of False, which is right for torch 2.12 and earlier. In later versions a renamed one
    # would read as False too, and the positions of gradients in the flat buffer would be wrong.
    has(f"{_GROUP}:FSDPParamGroup", "reduce_scatter_unused_params", "fsdp.gradients.unit_gradients",
        "Whether FSDP2 reduces zeros for parameters without a gradient. If it moved: gradients are taken for those "
        "of other parameters where a parameter has none.", silent=True, since=(2, 13)),
    has(f"{_PARAM}:FSDPParam",
        "sharded_param sharded_size padded_sharded_param_size offload_to_cpu mp_policy "
        "mesh_info _module_info _sharded_local_tensor _sharded_param_data",
        "fsdp.units fsdp.param_shard fsdp.gradients.unit_gradients",
        "Name, sizes and memory of a parameter's shard."),
    # Later versions keep such a gradient on the gathered parameter, and show it by a property of this name.
    sets(f"{_PARAM}:FSDPParam", "unsharded_accumulated_grad", "fsdp.gradients.param_gradients",
        "The gradient that a rank keeps at full size until it is reduced, and zeros where it has none. If it moved: what "
        "`discard_accumulated` drops is reduced all the same, and ranks reduce gradients of different experts.",
        silent=True, until=(2, 15)),
    # It is read with a default, which is right for torch 2.14 and earlier.
    has(f"{_GROUP}:FSDPParamGroup", "_reduce_scatter_param_indices", "fsdp.gradients.unit_gradients",
        "The order of parameters in a flat gradient. If it moved: gradients of a unit with several dtypes are taken "
        "for those of other parameters.", silent=True, since=(2, 15)),
    # It is read with a default, which is right for torch 2.14 and earlier.
    has(f"{_PARAM}:FSDPParam", "sharded_grad_dtype", "fsdp.param_shard",
        "The dtype in which gradients are reduced where the policy names none. If it moved: gradients are taken to "
        "be reduced in another dtype, and bytes are predicted wrongly.", silent=True, since=(2, 15)),
    # It is read with a default, because FSDP2 sets it at the first gather. A name that is gone would look like a
    # parameter that was never gathered.
    has(f"{_PARAM}:FSDPParam", "_unsharded_param", "fsdp.gradients.param_gradients",
        "A parameter whose gathered form has no gradient is left out of the flat gradient. If it moved: all "
        "parameters count as parameters without a gradient, and theirs are lost.", silent=True),
    reads(f"{_PARAM}:FSDPParam", "fsdp_pre_all_gather", "fsdp.param_shard",
        "A tensor that defines this method makes its own input to a gather. If it moved: deltas are taken of memory "
        "that is not what FSDP2 gathers, and the weights drift apart.", silent=True),
    # No release up to 2.15 has it. It is looked for by the name of its class, so one that is gone would look like a unit without.
    has("torch.distributed.fsdp._fully_shard._all_gather_layout", "AllGatherLayout DefaultAllGatherLayout", "plan",
        "What packs a gather's input and reads its output in an order of its own. If it moved: a unit where a user chose one "
        "is not refused, and computes with weights in the wrong order.", since=(2, 16)),
    # Tensors, autograd, process groups, modules
    # It is read with a default of None, so a name that is gone would look like a parameter without hooks.
    has("torch:Tensor", "_post_accumulate_grad_hooks", "fsdp.units fsdp.gradients.unit_gradients",
        "A parameter with such hooks shows its gradient before the backward pass ends. If it moved: the hooks see "
        "zeros in the place of gradients that are still under way.", silent=True),
    has("torch:Tensor", "_version _base", "fsdp.weights.weight_stamp comm.wire_buffers",
        "The counter that moves when a tensor is written; the buffer behind a slice of it."),
    called("torch:Tensor", "_make_wrapper_subclass", "frozen.weight fsdp.gradients.pending",
        "The only way to make a tensor with shape and dtype but no memory."),
    has("torch:_C", "_disabled_torch_function_impl", "frozen.weight fsdp.gradients.pending",
        "Sends operations on a tensor subclass straight to `__torch_dispatch__`."),
    called("torch:_C", "_current_graph_task_id", "fsdp.gradients.backward_passes",
        "Tells one backward pass from another."),
    called("torch:_C", "_len_torch_dispatch_stack _is_torch_function_mode_enabled", "ops.direct_calls",
        "Whether a mode has to see the call of an operator."),
    called("torch.autograd", "_profiler_enabled", "ops.direct_calls",
        "Whether the profiler has to see the call of an operator."),
    has("torch.autograd:Variable", "_execution_engine", "fsdp.gradients.backward_passes",
        "Runs a function at the end of a backward pass."),
    called("torch", "_foreach_copy_", "fsdp.units",
        "Copies the shards of a unit with one kernel."),
    has("torch.ops:aten", "_unsafe_view _foreach_zero_", "frozen.weight fsdp.gradients.pending",
        "Operators that tensor subclasses treat in ways of their own."),
    has("torch.ops:aten.add.Tensor", "_schema", "frozen.weight",
        "Whether an operator writes to its argument."),
    called("torch.utils._pytree", "tree_map tree_map_only",
        "frozen.weight fsdp.gradients.pending",
        "Tensors and their subclasses among the nested arguments of an operator."),
    sets("torch.distributed.tensor:DTensor", "_local_tensor", "dtensors",
        "The local tensor itself, which `to_local` returns a view of, through autograd."),
    called("torch.optim._muon", "_adjust_lr _zeropower_via_newtonschulz", "muon",
        "What `torch.optim.Muon` makes of one matrix: `Muon` gives its bits."),
    takes("torch.optim._muon:_zeropower_via_newtonschulz", "grad ns_coefficients ns_steps eps", "muon",
        "It is called with these arguments, by position. If they moved: it raises, or orthogonalizes something else.",
        silent=True),
    called("torch.optim:AdamW.step", "__wrapped__", "muon",
        "The step of an optimizer without the hooks around it."),
    called("torch.distributed:ProcessGroup", "_get_backend", "comm.topology comm.collectives",
        "The timeout of the world's collectives; whether gloo moves the tensors of a GPU."),
    has("torch.distributed:ProcessGroup", "_device_types", "comm.topology",
        "The timeout of the world's collectives."),
    # They are not private, and not documented either. The second name is asked for first.
    called("torch.distributed:ProcessGroup", "reduce_scatter_tensor_coalesced", "comm.collectives",
        "Several reduce-scatters in one call, which NCCL runs as one kernel.", until=(2, 13)),
    called("torch.distributed:ProcessGroup", "reduce_scatter_single_coalesced", "comm.collectives",
        "The same.", since=(2, 13)),
    sets("torch.distributed:ReduceScatterOptions", "asyncOp", "comm.collectives",
        "Whether the caller waits for them.", silent=True),
    called("torch.distributed:ProcessGroup", "allgather_into_tensor_coalesced", "comm.collectives",
        "Several all-gathers in one call, as above.", until=(2, 13)),
    called("torch.distributed:ProcessGroup", "all_gather_single_coalesced", "comm.collectives",
        "The same.", since=(2, 13)),
    sets("torch.distributed.distributed_c10d:AllgatherOptions", "asyncOp", "comm.collectives",
        "Whether the caller waits for them.", silent=True),
    has("torch._C._distributed_c10d:Backend.Options", "_timeout", "comm.topology",
        "The timeout of the world's collectives."),
    # It is read with a default, because most models are not compiled.
    has("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod", "fsdp.sharded_models",
        "The module that `torch.compile(model)` wraps. If it moved: a compiled model is not recognized, and trains "
        "on FSDP2's own collectives.", silent=True),
    reads("torch.nn.parameter:_ParameterMeta", "_is_param", "frozen.weight",
        "The mark makes a packed weight count as a parameter. If it moved: Transformers and PEFT pass over packed "
        "weights, or replace them.", silent=True),
    has("torch.nn:Module", "_non_persistent_buffers_set", "frozen.published",
        "Which buffers checkpoints do not hold."),
    has("torch.nn:Module", "_parameters", "frozen.modules frozen.units",
        "A packed weight's name stands there as None, which `torch.nn.utils.parametrize` asks for."),
    reads("torch.nn:Module.to", "_apply", "frozen.modules",
        "Ours notes the dtype to which packed weights decode from then on. If it moved: packed weights decode to "
        "the dtype they had before `model.to(dtype)`.", silent=True),
    reads("torch.nn:Module.state_dict", "_save_to_state_dict", "frozen.modules",
        "Ours returns codes and scales as bytes, where FSDP2 shards them under a float dtype (torch 2.11). If it "
        "moved: checkpoints hold packed weights under that dtype, and other versions of torch cannot load them.", silent=True),
    reads("torch.nn:Module.load_state_dict", "_load_from_state_dict", "frozen.modules",
        "Ours takes codes and scales as bytes, where FSDP2 shards them under a float dtype (torch 2.11). If it "
        "moved: bytes are cast to that dtype as if they were numbers, and packed weights decode to nonsense.", silent=True),
)
# fmt: on
