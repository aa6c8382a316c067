"""``apply_zeropp(model, config)``: it installs the two hops on a sharded model."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_zeropp import devices
from hf_zeropp.comm.agreement import Agreement, Channel
from hf_zeropp.comm.backend_variables import set_backend_variables
from hf_zeropp.comm.exchange import exchange
from hf_zeropp.comm.gloo_exit import give_gloo_time_at_exit
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.node_memory import can_share
from hf_zeropp.comm.topology import (
    ShardMesh,
    Topology,
    WorldGroups,
    get_replica_group,
    get_replica_rounds,
    get_topology,
    new_cpu_group,
    own_group,
)
from hf_zeropp.comm.two_hops import TwoHopGather, TwoHopReduce
from hf_zeropp.config import ENV_CHECK, ZeroPPConfig, variables_of_settings
from hf_zeropp.frozen.modules import dense_numel
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.reduce import NO_WIRE_FORM, ZeroPPReduceScatter
from hf_zeropp.fsdp.gradients.replicas_of_nodes import count_replicas_of_nodes
from hf_zeropp.fsdp.hooks import hook_heads, hook_loading, hook_passes, listen_to_optimizers
from hf_zeropp.fsdp.meshes import is_whole_copy, numel_in_group, ranks_of
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.predictions import leaves_gathers_to_fsdp2
from hf_zeropp.fsdp.sharded_models import find_units, without_compile_wrapper
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.frozen_copies import compare_frozen
from hf_zeropp.fsdp.weights.gather import MIXED_DTYPES, WeightGather
from hf_zeropp.fsdp.weights.node_gather import NodeGather, install_node_gathers, refuse_thawed_before_forwards
from hf_zeropp.fsdp.weights.secondary_check import SecondaryCheck
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.plan import Plan, agree, check_all_served, require_process_group
from hf_zeropp.step_record import record_steps
from hf_zeropp.traffic import (
    GATHER_CROSS,
    GATHER_NODE,
    GATHER_RESYNC,
    REDUCE_CROSS,
    REDUCE_NODE,
    REDUCE_REPLICAS,
    MeshBytes,
    Traffic,
    total,
    with_noun,
)

logger = logging.getLogger(__name__)

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
        mesh: the mesh that ``fully_shard`` got, (shard) or (replicate, shard), where other parallelism divides the world
            (pipeline stages). Tensor parallelism is noticed without it. All ranks of the world make their call at the same time,
            with meshes of one size.

    Returns:
        The handle. A loop of your own calls ``set_last_micro_step`` (accumulation), ``set_progress`` (``qgz_until``),
        ``save_state`` after saving a checkpoint and ``invalidate`` after loading one (exact resume with deltas). ``traffic``
        counts bytes.

    Raises:
        ValueError: on every rank, if on any rank the model is not sharded over the whole world, the settings do not
            fit the world, ranks differ in settings or in their models, or modules were sharded after an earlier call.
    """
    if (handle := get_handle(model)) is not None:
        if handle.is_active:
            check_all_served(model, handle.serves)
        return handle.check_same_config(ZeroPPConfig.resolve(config))
    require_process_group()
    set_backend_variables()
    # ``torch.compile`` wraps the model in a module of its own. The handle is kept on the module inside, so that a call
    # with the compiled model and a call with the plain one find the same handle.
    model = without_compile_wrapper(model)
    # Errors of one rank must be raised before the next line: the handle makes process groups, which every rank has to
    # make too. A rank that had already given up would leave the others waiting in there.
    plan, groups = agree(model, config, mesh)
    handle = _install(model, plan, groups)
    if plan.is_enabled and dist.get_rank() == 0:
        _warn_of_unread(handle)
    setattr(model, _HANDLE, handle)
    _handles.add(handle)
    record_steps(handle)
    give_gloo_time_at_exit()
    return handle


def get_handle(model: nn.Module) -> ZeroPPHandle | None:
    """Return the handle of a model that ``apply_zeropp`` was called with, or None."""
    return vars(without_compile_wrapper(model)).get(_HANDLE)


def has_handles() -> bool:
    """Return whether any model of this process runs under ZeRO++, also one that is a container of sharded models."""
    return len(_handles) > 0


def _install(model: nn.Module, plan: Plan, groups: Sequence[WorldGroups]) -> ZeroPPHandle:
    units = find_units(model)
    hook_heads(model, units)
    meshes = {mesh.topology.ranks: mesh for mesh in _shard_meshes(plan, groups, units)}
    mesh = next(iter(meshes.values()))
    # Units over the whole shard group get the two hops, and experts whose own group spans nodes. The plan allows two other
    # kinds. Frozen units that are sharded over a node: FSDP2's own gather of those never leaves the node, so it is only counted,
    # and not replaced. And experts whose group does not leave a node.
    of_meshes = [unit for unit in units if _is_over(unit, meshes)]
    of_nodes = [unit for unit in units if not _is_over(unit, meshes)]
    num_nodes = len(_nodes_of(own_group(mesh.groups.data_parallel), plan.ranks_per_node))
    traffic = _new_traffic(model, of_meshes, of_nodes, plan.ranks_per_node, num_nodes, meshes)
    run = ModelRun(ZeroPPConfig(**dict(plan.settings)), mesh, traffic, checks=plan.checks_secondaries)
    # The copies of frozen weights on several nodes must be equal and stay so, whether ZeRO++ has anything to do or not.
    frozen = install_node_gathers(model, of_nodes, run.traffic)
    if frozen:
        compare_frozen(model, frozen, run)
    if not plan.is_enabled or mesh.topology.num_nodes == 1:
        refuse_thawed_before_forwards(model, frozen)
        _log_inactive(mesh.topology, num_nodes, is_enabled=plan.is_enabled)
        return ZeroPPHandle(run, of_meshes, of_nodes)
    # The mesh of the model spans nodes, so these are experts.
    by_fsdp2 = [unit for unit in of_meshes if meshes[ranks_of(unit)].topology.num_nodes == 1]
    served = [unit for unit in of_meshes if unit not in by_fsdp2]
    counted = count_replicas_of_nodes(by_fsdp2, run)
    decisions = _install_two_hops(model, run, served, meshes, frozen) if served else None
    if decisions is None:
        refuse_thawed_before_forwards(model, frozen)
    handle = ZeroPPHandle(run, served, of_nodes, decisions, by_fsdp2, [*frozen, *counted])
    _log_active(handle, len(units))
    return handle


def _is_over(unit: Unit, meshes: Mapping[tuple[int, ...], ShardMesh]) -> bool:
    """Return whether the unit is sharded and replicated over one of the meshes, and not sharded over a node alone."""
    mesh = meshes.get(ranks_of(unit))
    # The ranks alone do not tell where each replica is one node: trained and frozen units are sharded over the same ranks there.
    # Trained units have replicas on other nodes, and the frozen ones have none.
    return mesh is not None and (mesh.replicas is None or not is_whole_copy(unit))


def _shard_meshes(plan: Plan, groups: Sequence[WorldGroups], units: Sequence[Unit]) -> Iterator[ShardMesh]:
    """Make the groups of each mesh. Collective over the world."""
    for mesh, of_world in zip(plan.meshes, groups, strict=True):
        topology = get_topology(mesh.ranks_per_node, units[0].device.type, of_world.shards)
        of_mesh = (unit.replica_group for unit in units if ranks_of(unit) == mesh.ranks)
        replicas = next((group for group in of_mesh if group is not None), None)
        yield ShardMesh(topology, of_world, mesh.hpz_size, replicas)


def _install_two_hops(
    model: nn.Module,
    run: ModelRun,
    units: Sequence[Unit],
    meshes: Mapping[tuple[int, ...], ShardMesh],
    frozen: Sequence[NodeGather],
) -> Decisions:
    # Agreements have a group of their own, so that no hop can come between, and on the CPU, so that no stream waits.
    channel = Channel(new_cpu_group(run.mesh.groups.data_parallel))
    first_of_node = dist.get_process_group_ranks(run.mesh.topology.node_group)[0]
    decisions = Decisions(run, Agreement(channel, nodes=exchange(first_of_node, channel.group)), frozen, model)
    # Programs that make many models, such as hyperparameter searches, would collect threads otherwise.
    weakref.finalize(decisions, channel.close).atexit = False
    # Hops are made mesh by mesh, in one order on all ranks, since some of them meet to share memory.
    ways: dict[tuple[int, ...], tuple[TwoHopGather | None, TwoHopReduce]] = {}
    for ranks, mesh in meshes.items():
        if any(ranks_of(unit) == ranks for unit in units):
            ways[ranks] = _gather_hops(mesh, run), _reduce_hops(mesh, run)
    for unit in units:
        if run.config.keeps_weights and unit.trains:
            unit.stay_gathered_after_forward()
        gather_hops, reduce_hops = ways[ranks_of(unit)]
        check = _check_of(unit, meshes[ranks_of(unit)], run, gather_hops, decisions)
        gather = WeightGather(unit, run, decisions.weights.before_gather, gather_hops, check)
        reduce = ZeroPPReduceScatter(unit, run, decisions.gradients, reduce_hops)
        unit.gradients.take_over_replicas()
        unit.set_all_gather(gather)
        unit.gradients.reduce_through(reduce)
        # FSDP2 adds the output of a reduction to ``.grad``. Where that stands for a result still to come, ``.grad`` must be
        # a plain tensor while FSDP2 adds, and marked as pending before anybody else can look at it.
        unit.gradients.wrap_post_backward(
            decisions.gradients.keeps_unreduced, reduce.drop_unwanted, reduce.after_post_backward
        )
        decisions.add_unit(gather, reduce)
    # The hooks come after the comm objects. From here on a forward pass runs agreements on all of them.
    hook_passes(model, decisions)
    hook_loading(model, decisions.weights.invalidate)
    listen_to_optimizers(decisions)
    _warn_of_fallbacks(run, decisions)
    return decisions


def _check_of(
    unit: Unit, mesh: ShardMesh, run: ModelRun, hops: TwoHopGather | None, decisions: Decisions
) -> SecondaryCheck | None:
    """Make what compares the copies of a unit with its masters; None where nothing is to be compared."""
    if not run.checks or hops is None or mesh.hpz_size is None:
        return None
    # The ranks of this mesh compare their copies with each other. If the model has further ranks (replicas, or experts on a mesh
    # of their own), these see no fault by themselves, so they are told of it and stop as well.
    is_whole = mesh.topology.num_ranks == len(own_group(run.mesh.groups.data_parallel))
    return SecondaryCheck(unit, hops, None if is_whole else decisions.questions.tell_faults)


def _gather_hops(mesh: ShardMesh, run: ModelRun) -> TwoHopGather | None:
    """Make the two hops in which units of a mesh gather; None where FSDP2 gathers them itself."""
    # Nothing is quantized and nothing is kept here, so the gather stays FSDP2's own. It is wrapped all the same:
    # its bytes are counted, and a unit that stayed unsharded is gathered anew when its weights change.
    if leaves_gathers_to_fsdp2(run.config, mesh.hpz_size, mesh.topology.num_ranks):
        return None
    if run.checks and mesh.hpz_size is None and dist.get_rank() == 0:
        logger.warning("%s=1 compares the nodes' copies of the weights; with hpz_size=None there are none.", ENV_CHECK)
    # The groups of gathers follow ``hpz_size``, the number of ranks that share a copy, and may differ from the true
    # nodes. The groups of reductions do not: their node hop is meant for the fast links, whatever the copies are.
    groups = mesh.topology if mesh.hpz_size is None else mesh.topology_of(mesh.hpz_size)
    cross = Hop(GATHER_CROSS, groups.cross_group, run.traffic, is_async=run.overlaps_by_itself)
    # The node hop is waited for at once, since FSDP2 needs the weights that it delivers now.
    node = Hop(GATHER_NODE, groups.node_group, run.traffic)
    # The same group under another name: a table then tells resyncs, which should be rare.
    resync = Hop(GATHER_RESYNC, groups.cross_group, run.traffic, is_async=run.overlaps_by_itself)
    is_cpu = not devices.has_streams(mesh.device_type)
    # It is equal on all ranks, since the settings and the device are. ``can_share`` is a collective, so a rank that
    # skipped it alone would leave its node waiting. Without hpZ nothing is kept that peers could read later, and where weights
    # travel decoded, peers read nothing that is kept.
    is_read = mesh.hpz_size is not None and run.config.qwz_intra_bits is not None
    may_share = run.config.shared_memory and is_read and is_cpu
    return TwoHopGather(cross, node, run.buffers, may_share and can_share(node.group), resync)


def _reduce_hops(mesh: ShardMesh, run: ModelRun) -> TwoHopReduce:
    node = Hop(REDUCE_NODE, mesh.topology.node_group, run.traffic, is_async=run.overlaps_by_itself)
    # With streams too, FSDP2 goes on before cross hops have ended.
    cross = Hop(REDUCE_CROSS, mesh.topology.cross_group, run.traffic, is_async=run.config.overlap)
    accumulator = getattr(torch, run.config.qgz_accumulator)
    rounds = get_replica_rounds(mesh.groups.replicas)
    replicas = [Hop(REDUCE_REPLICAS, group, run.traffic, is_async=run.config.overlap) for group in rounds]
    group = get_replica_group(mesh.groups.replicas)
    whole = None if group is None else Hop(REDUCE_REPLICAS, group, run.traffic, is_async=run.config.overlap)
    return TwoHopReduce(node, cross, run.buffers, accumulator, replicas, whole)


def _warn_of_fallbacks(run: ModelRun, decisions: Decisions) -> None:
    """Name the units that stay with FSDP2's collectives, in one warning. Units that change later are named then."""
    gathered = [gather.unit for gather in decisions.weights.gathers if gather.has_hops]
    run.warn(MIXED_DTYPES, [unit for unit in gathered if unit.param_dtype not in FLOAT_DTYPES])
    trained = [reduce.unit for reduce in decisions.gradients.reduces if reduce.unit.trains]
    run.warn(NO_WIRE_FORM, [unit for unit in trained if unit.gradients.dtype not in FLOAT_DTYPES])


def _warn_of_unread(handle: ZeroPPHandle) -> None:
    """Warn if the environment holds other settings than those in force. They are not read where a script passes its own."""
    if not (names := variables_of_settings()):
        return
    try:
        handle.check_same_config(ZeroPPConfig.from_env())
    except ValueError:  # they are others, or wrong
        logger.warning(
            "The script passes settings of its own, so those of the environment are not read: %s (`hf-zeropp launch` sets "
            'ZEROPP_CONFIG_FILE from the `zeropp_config:` block). Leave out the script\'s (zeropp=, or "zeropp" in fsdp_config) '
            "for the environment's to count.",
            ", ".join(names),
        )


def _new_traffic(
    model: nn.Module,
    units: list[Unit],
    frozen_units: list[Unit],
    ranks_per_node: int,
    num_nodes: int,
    meshes: Mapping[tuple[int, ...], ShardMesh],
) -> Traffic:
    # M is the model as ZeRO-3 would send it, so packed frozen weights count as the bf16 weights that they stand for.
    frozen = dense_numel(model, [param for unit in frozen_units for param in unit.params]) * torch.bfloat16.itemsize
    model_bytes = frozen + sum(
        sum(param.numel() for param in unit.params) * unit.param_dtype.itemsize for unit in units
    )
    trainable_bytes = sum(
        sum(param.numel() for param in unit.trainable) * unit.gradients.dtype.itemsize for unit in units
    )
    of_meshes: list[MeshBytes] = []
    for ranks, mesh in meshes.items():
        of_mesh = [unit for unit in units if ranks_of(unit) == ranks]
        # ZeRO-3 would shard what is frozen as the rest of the model.
        of_meshes.append(_mesh_bytes(of_mesh, mesh, ranks_per_node, 0 if of_meshes else frozen))
    return Traffic(ranks_per_node, num_nodes, model_bytes, trainable_bytes, of_meshes)


def _mesh_bytes(units: Sequence[Unit], mesh: ShardMesh, ranks_per_node: int, frozen_bytes: int) -> MeshBytes:
    own_nodes = _nodes_of(own_group(mesh.groups.data_parallel), ranks_per_node)
    own_node = dist.get_rank() // ranks_per_node
    num_parts = sum(own_node in _nodes_of(ranks, ranks_per_node) for ranks in mesh.groups.data_parallel)

    def numel_on_node(unit: Unit, params: Sequence[DTensor]) -> int:
        # A weight that other parallelism does not cut is the same in each part, and has to arrive once.
        return sum(min(param.numel(), num_parts * numel_in_group(unit, param)) for param in params)

    return MeshBytes(
        weights=frozen_bytes + sum(numel_on_node(unit, unit.params) * unit.param_dtype.itemsize for unit in units),
        gradients=sum(numel_on_node(unit, unit.trainable) * unit.gradients.dtype.itemsize for unit in units),
        num_nodes=mesh.topology.num_nodes,
        num_replicas=max(1, len(own_nodes) // mesh.topology.num_nodes),  # those that are on other nodes
    )


def _nodes_of(ranks: Sequence[int], ranks_per_node: int) -> set[int]:
    return {rank // ranks_per_node for rank in ranks}


# The lines that a user reads when ZeRO++ is applied are logged at warning level, though nothing is wrong: it is the level that
# shows where a script configures no logging, which is how Transformers and Accelerate speak to users. A line at info level would
# be seen by few, and a job that runs on other nodes or settings than was meant looks like one that runs well.


def _log_inactive(topology: Topology, num_nodes: int, *, is_enabled: bool) -> None:
    """Say that FSDP2's own collectives stay, and what a user can do whose model is sharded within a node. Rank 0 speaks for all.

    Args:
        topology: one node.
        num_nodes: the nodes on which the model is trained, with all its replicas.
        is_enabled: False with ``ZEROPP_ENABLED=0``.
    """
    if not is_enabled or topology.num_ranks == 1:
        logger.info("%s: FSDP2's own collectives stay.", "One rank only" if is_enabled else "ZEROPP_ENABLED=0")
    elif topology.rank == 0 and num_nodes > 1:
        logger.warning(
            "Each replica of the model lies within one node (%d ranks), so ZeRO++ has nothing to do: FSDP2's own collectives "
            "stay, and average the gradients of %d nodes at their full size. Shard the model over several nodes "
            "(dp_replicate_size of 1, or a smaller one), and ZeRO++ quantizes what crosses them.",
            topology.num_ranks,
            num_nodes,
        )
    elif topology.rank == 0:
        logger.warning(
            "One node only (%d ranks), and nothing crosses nodes: FSDP2's own collectives stay. If the links between these "
            'ranks are slow (GPUs without NVLink), preset="pcie" quantizes what they exchange.',
            topology.num_ranks,
        )


def _log_active(handle: ZeroPPHandle, num_units: int) -> None:
    """Say that ZeRO++ runs, and what is expected to cross nodes. Rank 0 speaks for all."""
    if dist.get_rank() != 0:
        return
    config, traffic = handle.config, handle.traffic
    name = config.preset_name(on_cpu=not devices.has_streams(handle.topology.mesh.device_type))
    logger.warning(
        "ZeRO++ is on: %d nodes x %s, %s, %s. In a step of one micro-step a node is expected to receive %s%s from "
        "other nodes. FSDP2's own collectives would take %s or more.",
        traffic.num_nodes,
        with_noun(traffic.ranks_per_node, "rank"),
        f"preset {name!r}" if name else "settings of no preset",
        with_noun(num_units, "unit"),
        # How many words change is known after a step. Until then whole weights, or deltas, are counted.
        "at most " if config.sends_changes else "",
        _in_words(traffic.ranks_per_node * total(handle.predict().values()).cross_node),
        _in_words(traffic.zero3_bytes(1)),
    )


def _in_words(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
