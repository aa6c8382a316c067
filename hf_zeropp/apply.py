"""``apply_zeropp(model, config)``: it installs the two hops on a sharded model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from hf_zeropp import devices
from hf_zeropp.announcement import log_active, log_inactive
from hf_zeropp.comm.agreement import Agreement, Channel
from hf_zeropp.comm.gloo_exit import give_gloo_time_at_exit
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.node_memory import NodeMemory
from hf_zeropp.comm.topology import WorldGroups, get_replica_rounds, get_topology, new_cpu_group
from hf_zeropp.comm.two_hops import TwoHopGather, TwoHopReduce
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.frozen.modules import dense_numel
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.reduce import NO_WIRE_FORM, ZeroPPReduceScatter
from hf_zeropp.fsdp.hooks import hook_loading, hook_passes, listen_to_optimizers
from hf_zeropp.fsdp.predictions import leaves_gathers_to_fsdp2
from hf_zeropp.fsdp.run import Run
from hf_zeropp.fsdp.units import Unit, find_units, without_compile_wrapper
from hf_zeropp.fsdp.weights.frozen_copies import compare_frozen
from hf_zeropp.fsdp.weights.frozen_gather import FrozenGather, install_frozen_gathers, refuse_thawed_before_forwards
from hf_zeropp.fsdp.weights.gather import MIXED_DTYPES, CountedWeightGather, WeightGather, ZeroPPAllGather
from hf_zeropp.fsdp.weights.secondary_check import SecondaryCheck
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.plan import Plan, agree, check_all_served, require_process_group
from hf_zeropp.traffic import (
    GATHER_CROSS,
    GATHER_NODE,
    GATHER_RESYNC,
    REDUCE_CROSS,
    REDUCE_NODE,
    REDUCE_REPLICAS,
    Traffic,
)

# A module's attribute and no weak dictionary: the handle holds the model's modules, so it must die with the model.
_HANDLE = "_zeropp_handle"
_handles: weakref.WeakSet[ZeroPPHandle] = weakref.WeakSet()


def apply_zeropp(
    model: nn.Module,
    config: ZeroPPConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    mesh: DeviceMesh | None = None,
) -> ZeroPPHandle:
    """Run a sharded model's weight gathers and gradient reductions as ZeRO++ does. Idempotent. Call it on all ranks.

    Args:
        model: sharded by ``fully_shard`` over the whole world (Accelerate's FSDP2 and Transformers'
            ``distributed_config`` do so), over a mesh (replicate, shard), or over a part of it beside other parallelism.
        config: the settings, a mapping or file of them, a preset's name, or None for the environment.
        mesh: the 1-D mesh that ``fully_shard`` got, where other parallelism divides the world (pipeline stages). Tensor
            parallelism is noticed without it. All ranks of the world make their call at the same time, with meshes of one size.

    Returns:
        The handle. A loop of your own calls ``set_last_micro_step`` (accumulation), ``set_progress`` (``qgz_until``),
        and ``save_state`` and ``load_state`` beside checkpoints (exact resume with deltas); ``traffic`` counts bytes.

    Raises:
        ValueError: on every rank, if on any rank the model is not sharded over the whole world, the settings do not
            fit the world, ranks differ in settings or in their models, or modules were sharded after an earlier call.
    """
    if (handle := get_handle(model)) is not None:
        if handle.is_active:
            check_all_served(model, handle.serves)
        return handle.check_same_config(ZeroPPConfig.resolve(config))
    require_process_group()
    # ``torch.compile`` wraps the model in a module of its own. The handle is kept on the module inside, so that a call
    # with the compiled model and a call with the plain one find the same handle.
    model = without_compile_wrapper(model)
    # Errors of one rank must be raised before the next line: the handle makes process groups, which every rank has to
    # make too. A rank that had already given up would leave the others waiting in there.
    plan, groups = agree(model, config, mesh)
    handle = _install(model, plan, groups)
    setattr(model, _HANDLE, handle)
    _handles.add(handle)
    give_gloo_time_at_exit()
    return handle


def get_handle(model: nn.Module) -> ZeroPPHandle | None:
    """Return the handle of a model that ``apply_zeropp`` was called with, or None."""
    return vars(without_compile_wrapper(model)).get(_HANDLE)


def has_handles() -> bool:
    """Return whether any model of this process runs under ZeRO++, also one that is a container of sharded models."""
    return len(_handles) > 0


def _install(model: nn.Module, plan: Plan, groups: WorldGroups) -> ZeroPPHandle:
    units = find_units(model)
    topology = get_topology(plan.shard_ranks_per_node, units[0].device_type, groups.shards)
    # Units over the whole shard group get the two hops. The plan allows one other kind: frozen units that are sharded
    # over a node. FSDP2's own gather of those never leaves the node, so it is only counted, and not replaced.
    ranks = list(topology.ranks)
    units_of_all = [unit for unit in units if dist.get_process_group_ranks(unit.shard_group) == ranks]
    units_of_nodes = [unit for unit in units if unit not in units_of_all]
    run = Run.of(
        ZeroPPConfig(**dict(plan.settings)),
        topology,
        groups,
        next((unit.replica_group for unit in units_of_all if unit.replica_group is not None), None),
        _new_traffic(model, units_of_all, units_of_nodes, plan.ranks_per_node, _num_nodes(plan, groups)),
        hpz_size=plan.hpz_size,
        checks=plan.checks_secondaries,
    )
    if not plan.is_enabled or topology.num_nodes == 1:
        log_inactive(topology, run.traffic.num_nodes, is_enabled=plan.is_enabled)
        return ZeroPPHandle(run, units_of_all, units_of_nodes)
    frozen = install_frozen_gathers(model, units_of_nodes, run.traffic)
    if frozen:
        compare_frozen(model, frozen, run)
    if units_of_all:
        handle = _install_two_hops(model, run, units_of_all, frozen)
    else:
        refuse_thawed_before_forwards(model, frozen)
        handle = ZeroPPHandle(run, [], units_of_nodes, frozen)
    on_cpu = not devices.has_streams(topology.mesh.device_type)
    log_active(run.config, run.traffic, handle.predict(), num_units=len(units), on_cpu=on_cpu)
    return handle


def _install_two_hops(
    model: nn.Module, run: Run, units: Sequence[Unit], frozen: Sequence[FrozenGather]
) -> ZeroPPHandle:
    # Agreements have a group of their own, so that no hop can come between, and on the CPU, so that no stream waits.
    channel = Channel(new_cpu_group(run.groups.data_parallel))
    decisions = Decisions(run, Agreement(channel), frozen)
    # Programs that make many models, such as hyperparameter searches, would collect threads otherwise.
    weakref.finalize(decisions, channel.close).atexit = False
    gathers = _make_gathers(run, decisions, units)
    hops = _reduce_hops(run)
    for unit, gather in zip(units, gathers, strict=True):
        reduce = ZeroPPReduceScatter(unit, run, decisions, hops)
        unit.take_over_replicas()
        unit.set_all_gather(gather)
        unit.set_reduce_scatter(reduce)
        # FSDP2 adds the output of a reduction to ``.grad``. Where that stands for a result still to come, ``.grad`` must be
        # a plain tensor while FSDP2 adds, and marked as pending before anybody else can look at it.
        unit.wrap_post_backward(reduce.keeps_unreduced, reduce.before_post_backward, reduce.after_post_backward)
        decisions.add_unit(gather, reduce)
    # The hooks come after the comm objects. From here on a forward pass runs agreements on all of them.
    hook_passes(model, decisions)
    hook_loading(model, decisions.invalidate)
    listen_to_optimizers(decisions)
    _warn_of_fallbacks(run, decisions)
    return ZeroPPHandle(run, units, [gather.unit for gather in frozen], frozen, decisions)


def _make_gathers(run: Run, decisions: Decisions, units: Sequence[Unit]) -> list[WeightGather]:
    # Nothing is quantized and nothing is kept here, so the gather stays FSDP2's own. It is wrapped all the same:
    # its bytes are counted, and a unit that stayed unsharded is gathered anew when its weights change.
    if leaves_gathers_to_fsdp2(run.config, run.hpz_size, run.topology.num_ranks):
        return [CountedWeightGather(unit, run, decisions) for unit in units]
    hops, check = _gather_hops(run), None
    if run.checks:
        hpz_size = None if run.hpz_size is None else hops.node_hop.size
        check = SecondaryCheck.of(hpz_size, units[0].shard_group, run.replicas)
    return [ZeroPPAllGather(unit, run, decisions, hops, check) for unit in units]


def _gather_hops(run: Run) -> TwoHopGather:
    # The groups of gathers follow ``hpz_size``, the number of ranks that share a copy, and may differ from the true
    # nodes. The groups of reductions do not: their node hop is meant for the fast links, whatever the copies are.
    groups = run.topology if run.hpz_size is None else run.topology_of(run.hpz_size)
    cross = Hop(GATHER_CROSS, groups.cross_group, run.traffic, is_async=run.overlaps_by_itself)
    # The node hop is waited for at once, since FSDP2 needs the weights that it delivers now.
    node = Hop(GATHER_NODE, groups.node_group, run.traffic)
    # The same group under another name: a table then tells resyncs, which should be rare.
    resync = Hop(GATHER_RESYNC, groups.cross_group, run.traffic, is_async=run.overlaps_by_itself)
    is_cpu = not devices.has_streams(run.topology.mesh.device_type)
    # It is equal on all ranks, since the settings and the device are. ``connect`` is a collective, so a rank that
    # skipped it alone would leave its node waiting. Without hpZ nothing is kept that peers could read later, and where weights
    # travel decoded, peers read nothing that is kept.
    is_read = run.hpz_size is not None and run.config.qwz_intra_bits is not None
    may_share = run.config.shared_memory and is_read and is_cpu
    return TwoHopGather(cross, node, run.buffers, NodeMemory.connect(node.group) if may_share else None, resync)


def _reduce_hops(run: Run) -> TwoHopReduce:
    node = Hop(REDUCE_NODE, run.topology.node_group, run.traffic, is_async=run.overlaps_by_itself)
    # With streams too, FSDP2 goes on before cross hops have ended.
    cross = Hop(REDUCE_CROSS, run.topology.cross_group, run.traffic, is_async=run.config.overlap)
    accumulator = getattr(torch, run.config.qgz_accumulator)
    rounds = get_replica_rounds(run.groups.replicas)
    replicas = [Hop(REDUCE_REPLICAS, group, run.traffic, is_async=run.config.overlap) for group in rounds]
    return TwoHopReduce(node, cross, run.buffers, accumulator, replicas)


def _warn_of_fallbacks(run: Run, decisions: Decisions) -> None:
    """Name the units that stay with FSDP2's collectives, in one warning. Units that change later are named then."""
    gathered = [gather.unit for gather in decisions.gathers if isinstance(gather, ZeroPPAllGather)]
    run.warnings.warn(MIXED_DTYPES, [unit for unit in gathered if unit.param_dtype not in FLOAT_DTYPES])
    trained = [reduce.unit for reduce in decisions.reduces if reduce.unit.trains]
    run.warnings.warn(NO_WIRE_FORM, [unit for unit in trained if unit.reduce_dtype not in FLOAT_DTYPES])


def _num_nodes(plan: Plan, groups: WorldGroups) -> int:
    """Return over how many nodes the model is trained, with all its replicas."""
    own = next(ranks for ranks in groups.data_parallel if dist.get_rank() in ranks)
    return len({rank // plan.ranks_per_node for rank in own})


def _new_traffic(
    model: nn.Module, units: list[Unit], frozen_units: list[Unit], ranks_per_node: int, num_nodes: int
) -> Traffic:
    model_bytes = sum(sum(param.numel() for param in unit.params) * unit.param_dtype.itemsize for unit in units)
    # M is the model as ZeRO-3 would send it, so packed frozen weights count as the bf16 weights that they stand for.
    frozen = [param for unit in frozen_units for param in unit.params]
    model_bytes += dense_numel(model, frozen) * torch.bfloat16.itemsize
    trainable_bytes = sum(sum(param.numel() for param in unit.trainable) * unit.reduce_dtype.itemsize for unit in units)
    return Traffic(ranks_per_node, num_nodes, model_bytes, trainable_bytes)
