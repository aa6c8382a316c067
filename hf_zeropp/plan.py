"""The facts that ranks must have in common before ZeRO++ is installed on a model.

Ranks that differ in settings, in node sizes or in their models would run different collectives, and hang or crash in a place
that says nothing of the cause. So every rank states its plan, all plans are exchanged, and every rank raises the same error,
which names the first difference, before any process group is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from hf_zeropp import devices
from hf_zeropp.comm.exchange import exchange, ranks_by, words_of
from hf_zeropp.comm.hosts import check_gloo_connects, check_hosts, this_host
from hf_zeropp.comm.topology import WorldGroups, detect_ranks_per_node
from hf_zeropp.compat import check_seams, version_of
from hf_zeropp.config import ZeroPPConfig, is_enabled
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.meshes import UnitMesh, check_no_unknown_replicas, holders_of, meshes_of, ranks_of, world_groups
from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.fsdp.unit_words import words_of_params, words_of_precision
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.first_use import is_running
from hf_zeropp.fsdp.weights.secondary_check import wants_check


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


class MeshSizes(NamedTuple):
    """The facts of a mesh that all shard groups must have in common, as ``UnitMesh`` has them."""

    ranks: int
    replicas: int
    ranks_per_node: int
    hpz_size: int | None
    has_units: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The facts that every rank must have in common before anything is installed.

    Attributes:
        versions: of the libraries that choose collectives and bytes, as pairs of name and version.
        settings: the settings as they are in force on this device, as sorted pairs of name and value.
        ranks_per_node: ranks of each node of the world.
        meshes: over which ranks units are sharded. The first is that of the model, the others are of experts. Ranks of one shard
            group may have others for experts, of the same sizes.
        holders: those that hold a part of the same parameters, sorted: with replicas or tensor parallelism more than one shard
            group.
        is_enabled: False with ``ZEROPP_ENABLED=0``.
        checks_secondaries: whether ``ZEROPP_CHECK=1`` is set.
        units: the units, in module order.
    """

    versions: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, Any], ...]
    ranks_per_node: int
    meshes: tuple[UnitMesh, ...]
    holders: tuple[int, ...]
    is_enabled: bool
    checks_secondaries: bool
    units: tuple[UnitPlan, ...]

    @property
    def sizes(self) -> tuple[MeshSizes, ...]:
        """The sizes of each mesh, which all shard groups must have in common."""
        return tuple(
            MeshSizes(len(mesh.ranks), len(mesh.replicas), mesh.ranks_per_node, mesh.hpz_size, mesh.has_units)
            for mesh in self.meshes
        )


# Fields are compared in this order. A cause comes before what follows from it: other settings lead to other sizes, and the error
# should name the settings.
_OF_ALL_RANKS = ("versions", "settings", "ranks_per_node", "sizes", "is_enabled")
_OF_ONE_MODEL = (*_OF_ALL_RANKS, "checks_secondaries", "units")


def require_process_group() -> None:
    """Raise unless a process group exists.

    Raises:
        RuntimeError: there is none.
    """
    if not dist.is_initialized():
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
) -> tuple[Plan, tuple[WorldGroups, ...]]:
    """Check this rank's model and settings, and exchange the outcome. Collective over the world.

    Args:
        model: sharded.
        config: the settings.
        mesh: the mesh over which the model is sharded on purpose, though it is not the world.

    Returns:
        This rank's plan, and how each of its meshes divides the world.

    Raises:
        ValueError: on every rank, if any rank objects to its model or settings, if two ranks differ, if a node has ranks on two
            hosts, or if ranks of several hosts could not connect by gloo.
    """
    # Nothing before the exchange is collective, so a rank that objects early (its settings file is missing, its model
    # is not sharded) still meets the others in the exchange, which needs no more than the world's own group.
    plan, error = None, None
    try:
        plan = _make_plan(model, ZeroPPConfig.resolve(config), mesh)
    except Exception as exception:  # whatever it is, the other ranks must hear of it, or they would wait for ever
        error = f"{type(exception).__name__}: {exception}"
    # Plans are pickled. They hold words and numbers and no tensors, which would be copied to and from an accelerator.
    plans, errors, hosts, are_first_uses = zip(*exchange((plan, error, this_host(), is_running())), strict=True)
    for rank, rank_error in enumerate(errors):
        if rank_error is not None:
            raise ValueError(f"ZeRO++ cannot run: rank {rank} says: {rank_error}")
    _check_same_place(are_first_uses)
    # Every rank has all plans and compares them in the same order, so every rank raises the same error or none.
    of_model = world_groups([plan.meshes[0] for plan in plans])
    # All ranks make the process groups of all shard groups, so what these depend on must be equal over the world. Models may
    # differ (stages of a pipeline).
    firsts = {ranks[0]: plans[ranks[0]] for ranks in of_model.shards}
    _check_same_plan(firsts, _OF_ALL_RANKS)
    if plans[0].is_enabled:
        check_no_unknown_replicas([(plan.meshes[0].ranks, plan.holders, plan.units) for plan in firsts.values()])
    for ranks in of_model.data_parallel:
        _check_same_plan({rank: plans[rank] for rank in ranks}, _OF_ONE_MODEL)
    of_experts = range(1, len(plans[0].meshes))
    groups = [of_model, *(world_groups([plan.meshes[index] for plan in plans]) for index in of_experts)]
    if plans[0].is_enabled:
        check_hosts(hosts, plans[0].ranks_per_node, dict(plans[0].settings)["ranks_per_node"])
        if any(mesh.has_units and mesh.ranks > mesh.ranks_per_node for mesh in plans[0].sizes):
            check_gloo_connects(hosts, of_model.data_parallel)  # within one node nothing is agreed on
    return plans[dist.get_rank()], tuple(groups)


def _check_same_place(are_first_uses: Sequence[bool]) -> None:
    """Raise if some ranks came here by a call in the script, and others by a first forward pass, which comes here by itself.

    Raises:
        ValueError: that is so. The hooks of the former already see that forward pass, and those of the latter the next one.
    """
    ranks = ranks_by(enumerate(are_first_uses))
    if len(ranks) > 1:
        raise ValueError(
            f"All ranks must bring a model under ZeRO++ at the same place, by a call (handle_of, apply_zeropp, generate) as "
            f"{words_of(ranks[False])}, or in their first forward pass as {words_of(ranks[True])}. Make that call on all "
            "ranks. After the first forward pass, one rank may call handle_of alone."
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
    meshes = meshes_of(units, config.hpz_size, ranks_per_node, mesh)
    of_model = meshes[0]
    if is_enabled():  # FSDP2's own collectives run with any settings
        for unit in units:
            _check_unit(unit)
        _check_copies(config, units, meshes)
    # From here on no setting depends on the device any more: handles and reports show what is in force.
    config = config.resolve_node_bits(
        on_cpu=not devices.has_streams(units[0].device),
        copies_span_nodes=(of_model.hpz_size or 0) > of_model.ranks_per_node,
    )
    return Plan(
        versions=tuple((library, version_of(library)) for library in ("hf_zeropp", "torch")),
        settings=tuple(sorted(config.to_dict().items())),
        ranks_per_node=ranks_per_node,
        meshes=meshes,
        holders=tuple(sorted(set(of_model.ranks).union(*map(holders_of, units)))),
        is_enabled=is_enabled(),
        checks_secondaries=wants_check(),
        units=tuple(UnitPlan(unit.name, tuple(words_of_params(unit)), words_of_precision(unit)) for unit in units),
    )


def _check_unit(unit: Unit) -> None:
    # The handle is on the module that ``apply_zeropp`` was called with, so a call above or below that module does not
    # find it. A second installation would replace the comm objects under the first handle's hooks.
    if isinstance(unit.gradients.comm, ZeroPPReduceScatter):
        raise ValueError(
            f"unit {unit.name} already runs ZeRO++ through another apply_zeropp call, on a module above or below this "
            "one. Call it once, on the model."
        )
    if unit.reshards_to_part_of_the_world:
        raise ValueError(
            f"unit {unit.name} was sharded with reshard_after_forward=<int>, which keeps other shards for backward; "
            "ZeRO++ keeps its own. Call fully_shard with reshard_after_forward=True (and set hpz_size to that int)."
        )
    # The default one takes what a gather delivers in rank order, as the two hops do. Others expect another order in its output.
    layouts = {type(layout).__name__ for layout in unit.attached("AllGatherLayout")} - {"DefaultAllGatherLayout"}
    if layouts:
        raise ValueError(
            f"unit {unit.name} has an all-gather layout of its own ({', '.join(sorted(layouts))}), which belongs to another "
            "gather than ZeRO++'s. Leave out set_all_gather_layout, and set_custom_all_gather with such a layout."
        )


def _check_copies(config: ZeroPPConfig, units: Sequence[Unit], meshes: Sequence[UnitMesh]) -> None:
    """Raise a ValueError where the mode needs secondary shards, or finer masters, that are not there."""
    of_model = meshes[0]
    for unit in units:
        # Frozen units over a node are not gathered by deltas, so their dtype does not matter.
        if config.sends_deltas and any(ranks_of(unit) == each.ranks for each in meshes):
            _check_deltas(unit)
    # A copy over the world with one node is not a mistake: nothing crosses nodes there, and nothing is installed.
    if config.qwz_mode != "values" and of_model.hpz_size == len(of_model.ranks) > of_model.ranks_per_node:
        raise ValueError(
            f"hpz_size={of_model.hpz_size} spreads one copy of the weights over all ranks: none is kept that "
            f"qwz_mode={config.qwz_mode!r} could bring up to date. Set hpz_size='node', or qwz_mode='values'."
        )


def _check_deltas(unit: Unit) -> None:
    # A delta is master less copy. Only an fp32 master is finer than the copy: a bf16 master lost the small updates of
    # its optimizer already, and a delta can carry only what the master still holds.
    others = {param.dtype for param in unit.trainable} - {torch.float32}
    if others:
        raise ValueError(
            f"qwz_mode='delta' needs fp32 master weights, but unit {unit.name} trains parameters in {others.pop()}, whose own "
            "rounding is what a delta would correct. Load the model in float32 with bf16 mixed precision (Accelerate then "
            "keeps fp32 masters), or set qwz_mode='values' or 'exact'."
        )
    # Deltas are encoded from the masters where they lie, while FSDP2's own flat shard is in the compute dtype.
    if not unit.has_plain_shards:
        raise ValueError(
            f"qwz_mode='delta' reads master weights where FSDP2 keeps them, but unit {unit.name} is offloaded to the CPU or "
            "its parameters are tensor subclasses. Turn offloading off, or set qwz_mode='values' or 'exact'."
        )


def _check_same_plan(plans: Mapping[int, Plan], fields: Sequence[str]) -> None:
    """Raise a ValueError that names the first rank and field that differ from the first rank."""
    (first, expected), *others = plans.items()
    for rank, plan in others:
        for field in fields:
            ours, theirs = getattr(expected, field), getattr(plan, field)
            if ours != theirs:
                own, other = _first_difference(ours, theirs)
                raise ValueError(
                    f"Ranks must agree on ZeRO++'s {field}: rank {first} has {own}, rank {rank} has {other}. Give all "
                    "ranks the same settings, environment and model."
                )


def _first_difference(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Return the first items of two plans' fields that differ, looking into tuples and into units."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        ours, theirs = _first_unequal(ours, theirs)
    if isinstance(ours, UnitPlan) and isinstance(theirs, UnitPlan):
        if ours.name != theirs.name:
            return f"unit {ours.name}", f"unit {theirs.name}"
        # Whole descriptions of two units would fill the screen. The first parameter that differs tells the cause.
        own, other = _first_unequal((*ours.params, ours.precision), (*theirs.params, theirs.precision))
        return f"unit {ours.name} with {own}", f"unit {theirs.name} with {other}"
    return ours, theirs


def _first_unequal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> tuple[Any, Any]:
    # One side may have more entries, for instance a unit that the other rank does not have.
    pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing")
    return next((own, other) for own, other in pairs if own != other)
