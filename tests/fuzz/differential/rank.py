"""A worker process: it runs cases, one after another, as one rank of a gloo world."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import logging
import math
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from differential import planted
from differential.cases import Case
from differential.compare import Difference, first_difference, same_bits
from differential.hazards import refusal
from differential.meshes import cut_dim, make_mesh, place_of, rank_of
from differential.plain_side import Plain
from differential.sharded_sides import Ours, Stock
from differential.sides import Observation, Side
from hf_zeropp.comm import topology

# In the shared progress array: 1000 * side + operation, so that the parent can say where a rank stood.
SIDES = ("ours", "plain", "stock")
BETWEEN_CASES = -1
SETTING_UP = 999


@dataclasses.dataclass(frozen=True)
class Job:
    """One case for a world.

    Attributes:
        sides: which of ``SIDES`` run; "plain" is the oracle of the other two.
        plant: a bug of ``planted.PLANTS`` to put into our side.
    """

    case: Case
    sides: tuple[str, ...] = SIDES
    plant: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of one rank.

    Attributes:
        differences: by side, where it first differs from the oracle; None where it does not.
        error: a traceback, where something raised; ``error_kind`` its type and message.
        stood: the side and the operation that ran when it raised.
    """

    differences: Mapping[str, Difference | None] = dataclasses.field(default_factory=dict)
    error: str | None = None
    error_kind: str | None = None
    stood: tuple[str, int] | None = None


def main(rank: int, world: int, connection: Any, progress: Any, folder: str, timeout_s: float) -> None:
    """Serve jobs from ``connection`` until it closes."""
    _set_environment(rank, world)
    os.dup2(os.open(os.path.join(folder, f"errors{rank}"), os.O_WRONLY | os.O_CREAT), 2)  # gloo's words when it aborts
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with open(os.path.join(folder, f"stack{rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        meshes = {("", 1): make_mesh(Case(world=world))}  # by their kind and groups
        gc.collect()
        gc.freeze()  # what was imported need not be searched after each case
        connection.send_bytes(pickle.dumps("ready"))
        while True:
            try:
                job = pickle.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)
            if (kind := (job.case.mesh, job.case.groups)) not in meshes:
                meshes[kind] = make_mesh(job.case)
            report = _serve(job, rank, progress, folder, meshes[kind])
            if report.error is None:  # otherwise the parent replaces this process
                _destroy_groups_but(meshes.values())
            connection.send_bytes(pickle.dumps(report))
            progress[rank] = BETWEEN_CASES


def _destroy_groups_but(meshes: Iterable[DeviceMesh]) -> None:
    """Destroy the process groups of the last case: each keeps threads that wake a hundred times a second."""
    dist.barrier()  # another rank may be in a collective of the case still
    kept = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in kept:
            dist.destroy_process_group(group)
    topology._made.clear()
    # DTensor keeps its ways from placements to placements, and what operators return, for meshes that compare equal, with the
    # names of their groups.
    _redistribute._gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()


def _set_environment(rank: int, world: int) -> None:
    for name in [name for name in os.environ if name.startswith("ZEROPP_") and name != "ZEROPP_KERNELS"]:
        del os.environ[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}


def _serve(job: Job, rank: int, progress: Any, folder: str, mesh: DeviceMesh) -> Report:
    try:
        return Report(differences=_run_case(job, rank, progress, folder, mesh))
    except Exception as error:  # noqa: BLE001 - the parent shows it
        stood = (SIDES[progress[rank] // 1000], progress[rank] % 1000) if progress[rank] >= 0 else ("before", 0)
        return Report(error=traceback.format_exc(), error_kind=f"{type(error).__name__}: {error}", stood=stood)


def _run_case(job: Job, rank: int, progress: Any, folder: str, mesh: DeviceMesh) -> dict[str, Difference | None]:
    """Run the sides one after another: an optimizer's step on one of them is seen by all ZeRO++ handles alive."""
    case, found = job.case, {}
    must_raise = refusal(case)

    def run(name: str, forced: Sequence[Sequence[Observation]] | None = None) -> _Trace:
        progress[rank] = 1000 * SIDES.index(name) + SETTING_UP
        side, trace = _make(name, job, rank, folder, mesh), _Trace([], [])
        for index, operation in enumerate(case.operations):
            progress[rank] = 1000 * SIDES.index(name) + index
            trace.observations.append(side.run(operation.name, operation.all_args))
            if isinstance(side, Plain):
                trace.scales.append(dict(side.scales))
                if forced is not None:
                    side.force(forced[index])
        return trace

    ours = run("ours") if "ours" in job.sides else None
    if must_raise is not None and must_raise.is_due:  # there are no right numbers to compare with
        where = must_raise.last
        return {"ours": Difference(where, "silence", "no error", "an error on all ranks", math.inf)}
    gc.collect()  # the handle is gone, and its hooks with it
    exact = run("plain") if case.is_exact or "stock" in job.sides else None
    if ours is not None:
        forced = None if case.is_exact else _weights_of_ranks(ours.observations)
        oracle = exact if forced is None else run("plain", forced)
        assert oracle is not None
        found["ours"] = first_difference(
            case, ours.observations, oracle.observations, oracle.scales, forced=forced is not None
        )
        if case.mesh in ("replicas", "tp"):
            apart = _first_apart(_weights_of_ranks(ours.observations), rank, case)
            found["ours"] = found["ours"] or apart
    if "stock" in job.sides:
        stock = run("stock")
        assert exact is not None
        found["stock"] = first_difference(case, stock.observations, exact.observations, exact.scales, forced=False)
        if ours is not None and same_bits(ours.observations, stock.observations):
            # In 16 bits the two are compared with oracles that differ a little (``forced``), and a difference at the edge of
            # its bound may pass with one of them alone.
            found["stock"] = found["ours"]
    gc.collect()
    return found


def _make(name: str, job: Job, rank: int, folder: str, mesh: DeviceMesh) -> Side:
    of_ours = Ours if job.plant is None else planted.PLANTS[job.plant]
    side = {"plain": Plain, "stock": Stock, "ours": of_ours}[name]
    stages, (_, group) = job.case.stages, place_of(job.case, rank)
    return side(stages[group % len(stages)], rank, folder, mesh)


@dataclasses.dataclass(frozen=True)
class _Trace:
    observations: list[Observation]
    scales: list[dict[str, float]]


def _first_apart(of_ranks: Sequence[Sequence[Observation]], rank: int, case: Case) -> Difference | None:
    """Return where this rank's weights first differ in any bit from those that the first group holds as well."""
    place, _ = place_of(case, rank)
    first = rank_of(case, place, 0)
    for index, weights in enumerate(of_ranks):
        for key, value in weights[rank].items():
            if cut_dim(case, key.removeprefix("weight ")) is None and not torch.equal(value, weights[first][key]):
                of_first = f"{weights[first][key].tolist()}, as in the first group"
                return Difference(index, key, str(value.tolist()), of_first, math.inf)
    return None


def _weights_of_ranks(run: list[Observation]) -> list[tuple[Observation, ...]]:
    """Return for each operation the weights that it showed, by rank. Collective."""
    own = [{key: value for key, value in seen.items() if key.startswith("weight")} for seen in run]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return list(zip(*of_ranks, strict=True))
