"""The facts that ranks must have in common before ZeRO++ is installed on a model.

Ranks that differ in settings, in node sizes or in their models would run different collectives, and hang or crash in a place
that says nothing of the cause. So every rank states its plan, all plans are exchanged, and every rank raises the same error,
which names the first difference, before any process group is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from hf_zeropp import devices
from hf_zeropp.comm.hosts import Host, check_hosts, this_host
from hf_zeropp.comm.topology import (
    ShardGroups,
    WorldGroups,
    count_on_each_node,
    detect_ranks_per_node,
    resolve_hpz_size,
)
from hf_zeropp.compat import check_seams, version_of
from hf_zeropp.config import ZeroPPConfig, is_enabled
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.units import Unit, find_units
from hf_zeropp.fsdp.weights.first_use import is_running
from hf_zeropp.fsdp.weights.secondary_check import wants_check

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """One unit, as far as ranks must have it in common: these facts choose the sizes of collectives.

    Attributes:
        name: its module's name; "(root)" for the model itself.
        params: name, full shape, dtype and ``requires_grad`` of each parameter, in words.
        precision: FSDP2's mixed precision policy, in words.
    """

    name: str
    params: tuple[str, ...]
    precision: str

    @classmethod
    def of(cls, unit: Unit) -> UnitPlan:
        """Describe a unit."""
        return cls(unit.name, tuple(unit.describe_params()), unit.describe_precision())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The facts that every rank must have in common before anything is installed.

    Attributes:
        versions: of the libraries that choose collectives and bytes, as pairs of name and version.
        settings: the settings as they are in force on this device, as sorted pairs of name and value.
        ranks_per_node: ranks of each node of the world.
        ranks: those over which the model is sharded, in order: the world, or this rank's shard group.
        replicas: those that hold the same shard as this rank, one in each replica, in order; this rank alone without replicas.
        holders: those that hold a part of the same parameters, sorted: ``ranks``, and with replicas or tensor parallelism more.
        shard_ranks_per_node: how many of them each node has, N.
        hpz_size: ranks that share one secondary copy; None where none is kept.
        is_enabled: False with ``ZEROPP_ENABLED=0``.
        checks_secondaries: whether ``ZEROPP_CHECK=1`` is set.
        units: the units, in module order.
    """

    # The order of the fields is that in which they are compared. A cause comes before what follows from it: other
    # settings lead to another ``hpz_size``, and the error should name the settings.
    versions: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, Any], ...]
    ranks_per_node: int
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    holders: tuple[int, ...]
    shard_ranks_per_node: int
    hpz_size: int | None
    is_enabled: bool
    checks_secondaries: bool
    units: tuple[UnitPlan, ...]


def require_process_group() -> None:
    """Raise unless a process group exists.

    Raises:
        RuntimeError: there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "apply_zeropp needs a process group. Start with `accelerate launch` or `torchrun`, and call "
            "torch.distributed.init_process_group (Accelerate does) before sharding the model."
        )


def check_all_served(model: nn.Module, serves: Callable[[Unit], bool]) -> None:
    """Check that a model with a handle has no unit that the handle does not serve.

    Args:
        model: the model.
        serves: whether the handle serves a unit.

    Raises:
        ValueError: a module was sharded after the handle was made.
    """
    others = [unit.name for unit in find_units(model) if not serves(unit)]
    if others:
        raise ValueError(
            f"Units {', '.join(others)} were sharded after apply_zeropp, and it does not serve them (seen on rank "
            f"{dist.get_rank()}). Build the whole model first, shard it, and call apply_zeropp once."
        )


def agree(
    model: nn.Module,
    config: ZeroPPConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    mesh: DeviceMesh | None = None,
) -> tuple[Plan, WorldGroups]:
    """Check this rank's model and settings, and exchange the outcome. Collective over the world.

    Args:
        model: sharded.
        config: the settings.
        mesh: the mesh over which the model is sharded on purpose, though it is not the world.

    Returns:
        This rank's plan, which is that of all ranks of its shard group but for ``replicas``, and how the model divides the world.

    Raises:
        ValueError: on every rank, if any rank objects to its model or settings, if two ranks differ, or if a node has ranks on
            two hosts.
    """
    # Nothing before the exchange is collective, so a rank that objects early (its settings file is missing, its model
    # is not sharded) still meets the others in the exchange, which needs no more than the world's own group.
    plan, error = None, None
    try:
        plan = _make_plan(model, ZeroPPConfig.resolve(config), mesh)
    except Exception as exception:  # whatever it is, the other ranks must hear of it, or they would wait for ever
        error = f"{type(exception).__name__}: {exception}"
    # Plans are pickled. They hold words and numbers and no tensors, which would be copied to and from an accelerator.
    outcomes: list[tuple[Plan | None, str | None, Host, bool]] = [
        (None, None, this_host(), False)
    ] * dist.get_world_size()
    dist.all_gather_object(outcomes, (plan, error, this_host(), is_running()))
    plans = []
    for rank, (rank_plan, rank_error, *_) in enumerate(outcomes):
        if rank_plan is None:
            raise ValueError(f"ZeRO++ cannot run: rank {rank} says: {rank_error}")
        plans.append(rank_plan)
    _check_same_place([is_first_use for *_, is_first_use in outcomes])
    # Every rank has all plans and compares them in the same order, so every rank raises the same error or none.
    groups = WorldGroups(
        _shard_groups(plans), _data_parallel_groups(plans), tuple(dict.fromkeys(plan.replicas for plan in plans))
    )
    for ranks in groups.shards:
        _check_same_plan({rank: dataclasses.replace(plans[rank], replicas=()) for rank in ranks})
    for ranks in groups.data_parallel:
        _check_same_plan({rank: plans[rank] for rank in ranks}, of="hpz_size checks_secondaries units")
    if plans[0].is_enabled:
        check_hosts(
            [host for _, _, host, _ in outcomes], plans[0].ranks_per_node, dict(plans[0].settings)["ranks_per_node"]
        )
    return plans[dist.get_rank()], groups


def _check_same_place(are_first_uses: Sequence[bool]) -> None:
    """Raise if some ranks came here by a call of the user's, and others by a first forward pass, which asks by itself.

    Raises:
        ValueError: that is so. The hooks of the former already see that forward pass, and those of the latter the next one.
    """
    if len(set(are_first_uses)) > 1:
        forward, call = (
            [rank for rank, is_first in enumerate(are_first_uses) if is_first is it] for it in (True, False)
        )
        raise ValueError(
            f"All ranks must bring a model under ZeRO++ at the same place: ranks {call} do so by a call (handle_of, "
            f"apply_zeropp, generate), ranks {forward} in their first forward pass. Make that call on all ranks. After the "
            "first forward pass, one rank may call handle_of alone."
        )


def _shard_groups(plans: Sequence[Plan]) -> ShardGroups:
    """Return the shard groups that the ranks are in.

    Raises:
        ValueError: they overlap, or differ in size or in settings.
    """
    groups = tuple(dict.fromkeys(plan.ranks for plan in plans))
    for rank, plan in enumerate(plans):
        strangers = [other for other in plan.ranks if plans[other].ranks != plan.ranks]
        if strangers:
            raise ValueError(
                f"Ranks must agree on the ranks over which the model is sharded: rank {rank} has {list(plan.ranks)}, rank "
                f"{strangers[0]} has {list(plans[strangers[0]].ranks)}. Call fully_shard with the same mesh on all of them."
            )
    # All ranks make the process groups of all shard groups, so what these depend on must be equal over the world. Models may
    # differ (stages of a pipeline).
    firsts = {ranks[0]: _shape_of(plans[ranks[0]]) for ranks in groups}
    _check_same_plan(firsts, _Shape)
    _check_no_unknown_replicas([plans[ranks[0]] for ranks in groups])
    return groups


def _data_parallel_groups(plans: Sequence[Plan]) -> ShardGroups:
    """Return the data-parallel groups: the shard groups of all ranks that hold one shard.

    Raises:
        ValueError: ranks differ in them, so that their replicas overlap in part.
    """
    groups = [tuple(sorted(rank for replica in plan.replicas for rank in plans[replica].ranks)) for plan in plans]
    for rank, ranks in enumerate(groups):
        strangers = [other for other in ranks if groups[other] != ranks]
        if strangers:
            raise ValueError(
                f"Ranks must agree on the model's replicas: rank {rank} trains with {list(ranks)}, rank {strangers[0]} with "
                f"{list(groups[strangers[0]])}. Call fully_shard with the same (replicate, shard) mesh on all of them."
            )
    return tuple(dict.fromkeys(groups))


def _check_no_unknown_replicas(plans: Sequence[Plan]) -> None:
    """Raise a ValueError if two shard groups hold the same parameters, each for itself. ``plans`` has one of each group."""
    # Stages of a pipeline differ in their parameters. Groups beside tensor parallelism hold parts of the same ones.
    seen: dict[tuple[UnitPlan, ...], Plan] = {}
    for plan in plans:
        first = seen.setdefault(plan.units, plan)
        if not plan.is_enabled or set(plan.ranks) <= set(first.holders):
            continue
        raise ValueError(
            f"The model is sharded over ranks {list(first.ranks)}, and the same parameters once more over ranks "
            f"{list(plan.ranks)}: these are replicas whose gradients are not averaged, so they would drift apart. Call "
            "fully_shard with the whole mesh (replicate, shard) on all of them, or with a 1-D mesh over all ranks, and "
            "apply_zeropp without a mesh. If they are stages of a pipeline, give their modules different names."
        )


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The facts about a shard group that all of them must have in common."""

    versions: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, Any], ...]
    ranks_per_node: int
    number_of_ranks: int
    number_of_replicas: int
    shard_ranks_per_node: int
    is_enabled: bool


def _shape_of(plan: Plan) -> _Shape:
    return _Shape(
        plan.versions,
        plan.settings,
        plan.ranks_per_node,
        len(plan.ranks),
        len(plan.replicas),
        plan.shard_ranks_per_node,
        plan.is_enabled,
    )


def _make_plan(model: nn.Module, config: ZeroPPConfig, mesh: DeviceMesh | None) -> Plan:
    check_seams()  # here, where an error of one rank reaches all
    world_size = dist.get_world_size()
    units = find_units(model)
    if not units:
        raise ValueError(
            "the model is not sharded: expected FSDP2 modules (torch.distributed.fsdp.fully_shard), found none. "
            "Prepare it with Accelerate and a ZeroPPPlugin, or call fully_shard on its blocks and on the model."
        )
    ranks_per_node = detect_ranks_per_node(config.ranks_per_node, world_size)
    ranks, replicas = _ranks_of_model(units, mesh)
    for unit in units:
        _check_unit(unit, ranks, replicas, ranks_per_node)
        # Frozen units over a node are not gathered by deltas, so their dtype does not matter.
        if config.sends_deltas and _ranks_of(unit) == ranks:
            _check_deltas(unit, config.qwz_mode)
    world_size, shard_ranks_per_node = len(ranks), count_on_each_node(ranks, ranks_per_node)
    hpz_size = resolve_hpz_size(config.hpz_size, shard_ranks_per_node, world_size)
    # A copy over the world with one node is not a mistake: nothing crosses nodes there, and nothing is installed.
    if config.qwz_mode != "values" and hpz_size == world_size > shard_ranks_per_node:
        raise ValueError(
            f"hpz_size={hpz_size} spreads one copy of the weights over all ranks: none is kept that qwz_mode={config.qwz_mode!r} "
            "could bring up to date. Set hpz_size='node', or qwz_mode='values'."
        )
    # From here on no setting depends on the device any more: handles and reports show what is in force.
    config = config.resolve_node_bits(
        on_cpu=not devices.has_streams(units[0].device_type), copies_span_nodes=(hpz_size or 0) > shard_ranks_per_node
    )
    return Plan(
        versions=tuple((library, version_of(library)) for library in ("hf_zeropp", "torch")),
        settings=tuple(sorted(config.to_dict().items(), key=lambda item: item[0])),
        ranks_per_node=ranks_per_node,
        ranks=ranks,
        replicas=replicas,
        holders=tuple(sorted(set(ranks).union(*map(_holders_of, units)))),
        shard_ranks_per_node=shard_ranks_per_node,
        hpz_size=hpz_size,
        is_enabled=is_enabled(),
        checks_secondaries=wants_check(),
        units=tuple(map(UnitPlan.of, units)),
    )


def _ranks_of(unit: Unit) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(unit.shard_group))


def _holders_of(unit: Unit) -> set[int]:
    return {rank for param in unit.params for rank in param.device_mesh.mesh.flatten().tolist()}


def _replicas_of(unit: Unit) -> tuple[int, ...]:
    group = unit.replica_group
    return (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))


def _ranks_of_model(units: Sequence[Unit], mesh: DeviceMesh | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks over which the model has to be sharded, and those that have to hold the same shard as this rank.

    They are the world and this rank, unless there are replicas or other parallelism.
    """
    # Parameters of replicas and of tensor parallelism have a second mesh. Nothing else tells a shard group from a mistake: a
    # model that is sharded over a node, say, whose copies on other nodes are not kept alike.
    beside = Counter(
        (_ranks_of(unit), _replicas_of(unit))
        for unit in units
        if unit.has_other_parallelism or unit.replica_group is not None
    )
    ranks, replicas = (
        beside.most_common(1)[0][0] if beside else (tuple(range(dist.get_world_size())), (dist.get_rank(),))
    )
    if mesh is None:
        return ranks, replicas
    # The mesh that the caller gives may be that of the replicas too. Its last dimension is the one over which FSDP2 shards.
    given = (
        mesh.mesh.flatten().tolist() if mesh.ndim == 1 else dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    )
    return tuple(given), replicas


def _words_of(ranks: tuple[int, ...]) -> str:
    return f"all {len(ranks)} ranks" if len(ranks) == dist.get_world_size() else f"ranks {list(ranks)}"


def _own_node(ranks_per_node: int) -> tuple[int, ...]:
    first = dist.get_rank() // ranks_per_node * ranks_per_node
    return tuple(range(first, first + ranks_per_node))


def _check_unit(unit: Unit, model_ranks: tuple[int, ...], replicas: tuple[int, ...], ranks_per_node: int) -> None:
    # The handle is on the module that ``apply_zeropp`` was called with, so a call above or below that module does not
    # find it. A second installation would replace the comm objects under the first handle's hooks.
    if isinstance(unit.reduce_scatter, ZeroPPReduceScatter):
        raise ValueError(
            f"unit {unit.name} already runs ZeRO++ through another apply_zeropp call, on a module above or below this "
            "one. Call it once, on the model."
        )
    if unit.reshards_to_part_of_the_world:
        raise ValueError(
            f"unit {unit.name} was sharded with reshard_after_forward=<int>, which keeps other shards for backward; "
            "ZeRO++ keeps its own. Call fully_shard with reshard_after_forward=True (and set hpz_size to that int)."
        )
    # A unit over one node must be frozen, since its gradients would be summed over that node and never across nodes.
    ranks, node = _ranks_of(unit), _own_node(ranks_per_node)
    if ranks != model_ranks and not (ranks == node and not unit.trainable):
        raise ValueError(
            f"unit {unit.name} is sharded over ranks {list(ranks)}, expected {_words_of(model_ranks)} in order"
            f"{'' if unit.trainable else f', or, as it is frozen, this node: {ranks_per_node} ranks from {node[0]}'}. "
            "Call fully_shard with a 1-D mesh over them. If other parallelism divides the world, pass that mesh to apply_zeropp."
        )
    if ranks == model_ranks and _replicas_of(unit) != replicas:
        raise ValueError(
            f"unit {unit.name} is replicated over ranks {list(_replicas_of(unit))}, and other units over {list(replicas)}. Call "
            "fully_shard with the same mesh for all units."
        )


def _check_deltas(unit: Unit, mode: str) -> None:
    # A delta is master less copy. Only an fp32 master is finer than the copy: a bf16 master lost the small updates of
    # its optimizer already, and a delta can carry only what the master still holds.
    others = {param.dtype for param in unit.trainable} - {torch.float32}
    if others:
        raise ValueError(
            f"qwz_mode={mode!r} needs fp32 master weights, but unit {unit.name} trains parameters in {others.pop()}, whose own "
            "rounding is what a delta would correct. Load the model in float32 with bf16 mixed precision (Accelerate then "
            "keeps fp32 masters), or set qwz_mode='values' or 'exact'."
        )
    # Deltas are encoded from the masters where they lie, while FSDP2's own flat shard is in the compute dtype.
    if not unit.has_plain_shards:
        raise ValueError(
            f"qwz_mode={mode!r} reads master weights where FSDP2 keeps them, but unit {unit.name} is offloaded to the CPU or "
            "its parameters are tensor subclasses. Turn offloading off, or set qwz_mode='values' or 'exact'."
        )


def _check_same_plan(
    plans: Mapping[int, Plan] | Mapping[int, _Shape], form: type = Plan, *, of: str | None = None
) -> None:
    """Raise a ValueError that names the first rank and field that differ from the first rank. ``of`` names the fields."""
    (first, expected), *others = plans.items()
    names = [field.name for field in dataclasses.fields(form)] if of is None else of.split()
    for rank, plan in others:
        for name in names:
            ours, theirs = getattr(expected, name), getattr(plan, name)
            if ours != theirs:
                own, other = _first_difference(ours, theirs)
                raise ValueError(
                    f"Ranks must agree on ZeRO++'s {name}: rank {first} has {own}, rank {rank} has {other}. Give all "
                    "ranks the same settings, environment and model."
                )


def _first_difference(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Return the first items of two plans' fields that differ, looking into tuples and into units."""
    if isinstance(ours, UnitPlan) and isinstance(theirs, UnitPlan):
        if ours.name != theirs.name:
            return f"unit {ours.name}", f"unit {theirs.name}"
        # Whole descriptions of two units would fill the screen. The first parameter that differs tells the cause.
        own, other = _first_unequal((*ours.params, ours.precision), (*theirs.params, theirs.precision))
        return f"unit {ours.name} with {own}", f"unit {theirs.name} with {other}"
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        own, other = _first_unequal(ours, theirs)
        are_units = isinstance(own, UnitPlan) and isinstance(other, UnitPlan)
        return _first_difference(own, other) if are_units else (own, other)
    return ours, theirs


def _first_unequal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> tuple[Any, Any]:
    # One side may have more entries, for instance a unit that the other rank does not have.
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing")
    return next((own, other) for own, other in pairs if own != other)
