"""``apply_zeropp(model, config)``: the only place that installs anything on a model, and the handle it returns."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from hf_zeropp import devices
from hf_zeropp.announcement import log_active, log_inactive
from hf_zeropp.comm.agreement import Channel
from hf_zeropp.comm.gloo_exit import give_gloo_time_at_exit
from hf_zeropp.comm.hop import Hop, WireBuffers
from hf_zeropp.comm.node_memory import NodeMemory
from hf_zeropp.comm.topology import ShardGroups, get_topology, new_cpu_group
from hf_zeropp.comm.two_hops import TwoHopGather, TwoHopReduce
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.frozen.modules import dense_numel
from hf_zeropp.fsdp.all_gather import MIXED_DTYPES, ZeroPPAllGather
from hf_zeropp.fsdp.beside import HopsBeside
from hf_zeropp.fsdp.comm_objects import CommObject, CountedAllGather, CountedWeightGather, UnitWarnings, WeightGather
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.freshness import Freshness
from hf_zeropp.fsdp.frozen_copies import compare_frozen
from hf_zeropp.fsdp.frozen_gather import FrozenGather, install_frozen_gathers, refuse_thawed_before_forwards
from hf_zeropp.fsdp.hooks import hook_loading, hook_passes, listen_to_optimizers
from hf_zeropp.fsdp.micro_steps import MicroSteps
from hf_zeropp.fsdp.overlap import ReducePipeline
from hf_zeropp.fsdp.predictions import leaves_gathers_to_fsdp2
from hf_zeropp.fsdp.reduce_scatter import NO_WIRE_FORM, ZeroPPReduceScatter
from hf_zeropp.fsdp.secondary_check import SecondaryCheck
from hf_zeropp.fsdp.units import Unit, find_units, without_compile_wrapper
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.plan import Plan, agree, check_all_served, require_process_group
from hf_zeropp.traffic import (
    GATHER_CROSS,
    GATHER_NODE,
    GATHER_RESYNC,
    REDUCE_CROSS,
    REDUCE_NODE,
    Bytes,
    Traffic,
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
            ``distributed_config`` do so), or over a part of it beside other parallelism.
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
            check_all_served(model, [*handle.gathers, *handle.fsdp2_gathers])
        return handle.check_same_config(ZeroPPConfig.resolve(config))
    require_process_group()
    # ``torch.compile`` wraps the model in a module of its own. The handle is kept on the module inside, so that a call
    # with the compiled model and a call with the plain one find the same handle.
    model = without_compile_wrapper(model)
    # Errors of one rank must be raised before the next line: the handle makes process groups, which every rank has to
    # make too. A rank that had already given up would leave the others waiting in there.
    plan, shard_groups = agree(model, config, mesh)
    handle = ZeroPPHandle(model, ZeroPPConfig(**dict(plan.settings)), plan, shard_groups)
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


class ZeroPPHandle:
    """ZeRO++ on one model.

    Attributes:
        config: the settings in force.
        topology: this rank's nodes and groups.
        traffic: bytes counted since the last ``traffic.reset()``.
        shares_memory: whether the ranks of a node read secondary shards in each other's memory (on CPU).
        is_active: False with one node only, and with ``ZEROPP_ENABLED=0``: FSDP2's own collectives stay.
    """

    def __init__(self, model: nn.Module, config: ZeroPPConfig, plan: Plan, shard_groups: ShardGroups) -> None:
        self.config = config
        self._hpz_size = plan.hpz_size
        self._is_enabled = plan.is_enabled
        units = find_units(model)
        self._shard_groups = shard_groups
        self.topology = get_topology(plan.shard_ranks_per_node, units[0].device_type, shard_groups)
        # Units over the whole shard group get the two hops. The plan allows one other kind: frozen units that are sharded
        # over a node. FSDP2's own gather of those never leaves the node, so it is only counted, and not replaced.
        ranks = list(self.topology.ranks)
        self.units = [unit for unit in units if dist.get_process_group_ranks(unit.shard_group) == ranks]
        self.frozen_units = [unit for unit in units if unit not in self.units]
        self.traffic = _new_traffic(model, self.units, self.frozen_units, plan.ranks_per_node, self.topology.num_nodes)
        self.gathers: list[ZeroPPAllGather] = []
        self.fsdp2_gathers: list[CountedAllGather | CountedWeightGather] = []
        self.reduces: list[ZeroPPReduceScatter] = []
        # On backends with streams FSDP2 overlaps collectives with compute, and ``beside`` overlaps the two hops.
        self._overlaps = config.overlap and not devices.has_streams(self.topology.mesh.device_type)
        self._beside = HopsBeside.of(self.topology.mesh.device_type) if config.overlap else None
        self.shares_memory = False
        self._warnings = UnitWarnings()
        self._micro_steps = MicroSteps(config.quantizes_gradients)
        self._decisions: Decisions | None = None
        if not self.is_active:
            log_inactive(self.topology, is_enabled=plan.is_enabled)
            return
        # One pool serves all hops of the model: few units are under way at a time, and a pool per unit would hold a
        # buffer for each of them.
        buffers = WireBuffers()
        gathers = self._install_gathers(plan, buffers)
        if self.frozen_units:
            frozen = install_frozen_gathers(model, self.frozen_units, self.traffic)
            compare_frozen(model, frozen, self.topology)
            self.fsdp2_gathers += frozen
            if not self.units:
                refuse_thawed_before_forwards(model, frozen)
        if self.units:
            self._decisions = self._install_reduces(plan, gathers, buffers)
            # The hooks come after the comm objects. From here on a forward pass runs agreements on all of them.
            hook_passes(model, self._decisions)
            self._follow_weights(model)
            self._warn_of_fallbacks()
        log_active(config, self.traffic, self.predict(), num_units=len(units))

    @property
    def is_active(self) -> bool:
        """Whether there is more than one node, and the switch is not off."""
        return self._is_enabled and self.topology.num_nodes > 1

    def invalidate(self) -> None:
        """Gather across nodes again at the next forward pass.

        Weights that lie on the CPU need no such call: whatever changes them is seen. On accelerators call it after writes that
        move no version counter: through ``param.data``, raw pointers or a kernel of your own, with ``torch._foreach_*``
        operations on parameters, and after ``torch.distributed.checkpoint.load`` into them. One rank may call it alone.
        """
        for gather in self._weight_gathers:
            # This only sets a mark, and runs no collective. Ranks exchange their marks when the next forward pass
            # begins, which is why one rank may call it alone.
            gather.expire()

    def reshard(self) -> None:
        """Reshard the units that a forward pass left unsharded, such as FSDP2's root unit.

        Call it before PyTorch loads a full state dict: it would take the unsharded parameters for shards.
        """
        for unit in self.units:
            if unit.is_unsharded:
                unit.reshard()

    def set_last_micro_step(self, is_last: bool | Callable[[], bool]) -> None:
        """Tell whether the coming backward passes end an accumulation; or give a function that tells it each time."""
        self._micro_steps.ask_is_last = is_last if callable(is_last) else lambda: is_last

    def set_progress(self, fraction: float) -> None:
        """Tell how much of training is done, 0 to 1, for ``qgz_until``. Call it between steps, on all ranks."""
        # Partial sums of quantized and of unquantized gradients do not add up. While there are any, the change waits for the
        # next step.
        quantizes = self.config.quantizes_gradients and fraction < self.config.qgz_until
        self._micro_steps.set_quantizes(quantizes, is_accumulating=self.partial_bytes() > 0)

    def save_state(self, folder: str | os.PathLike[str], index: int = 0) -> None:
        """Let this run go on from a checkpoint as a run that is resumed from it does. Nothing is written to ``folder``.

        Accelerate's and the Trainer's checkpoints do it. Call it on all ranks.
        """
        # A resumed run starts from the masters, and sends whole weights first. This run must do the same at its next
        # forward pass, or its secondary shards would keep the rounding of earlier deltas, and the two runs would
        # differ.
        for gather in self.gathers:
            gather.resync()

    def load_state(self, folder: str | os.PathLike[str], index: int = 0) -> None:
        """Go on from a checkpoint whose weights were just loaded. Call it on all ranks; ``index`` tells models apart."""
        # Weights were usually loaded just before. On accelerators a load that writes through pointers moves no
        # version counter.
        self.invalidate()
        # Earlier versions wrote one file per rank: residuals of error feedback, and a count of random numbers.
        path = Path(folder, f"zeropp_{index}_rank_{self.topology.rank}.safetensors")
        if self.topology.rank == 0 and path.exists():  # one rank says it for all
            logger.warning(
                "%s holds residuals of error feedback, which this version does not have: they are left out, and the first "
                "steps differ a little from those of the run that saved them. The files zeropp_* can be deleted.",
                path.parent,
            )

    def discard_accumulated(self) -> None:
        """Forget micro-steps accumulated so far (``zero_grad`` does it too)."""
        for reduce in self.reduces:
            reduce.discard()

    def predict(self, micro_steps: int = 1) -> dict[str, Bytes]:
        """Bytes this rank receives in one step of ``micro_steps`` micro-steps, per collective."""
        counts: dict[str, Bytes] = {}
        # A unit has one comm object per direction: its gather is in the first list or in the third, never in both.
        comms: list[CommObject] = [*self.gathers, *self.reduces, *self.fsdp2_gathers]
        for comm in comms:
            for name, count in comm.predict(micro_steps).items():
                counts.setdefault(name, Bytes()).add(count)
        return counts

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Bring all weights up to date, and let no forward pass inside cross nodes again. Enter it on all ranks."""
        # No trainable unit is over the world, or there is one node: no gather crosses nodes, and there is nothing to
        # agree on.
        if self._decisions is None:
            yield
            return
        with self._decisions.generating():
            yield

    def lockstep_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that must run the same forward passes while no weight changes; None for the whole world."""
        # Ranks must run the same forwards wherever their gathers meet. Without secondary shards, or for a unit that
        # stays FSDP2's own, that is the world.
        in_groups = bool(self.gathers) and all(gather.stays_in_group for gather in self.gathers)
        # Other parallelism exchanges activations in every forward pass, in groups of its own.
        if not self.is_active or not (in_groups or not self.units) or not self.topology.spans_world:
            return None
        # Two kinds of gathers meet in groups of two sizes: frozen units over the node, secondary copies over
        # ``hpz_size`` ranks. One size divides the other (``resolve_hpz_size``), so the larger group contains the
        # smaller.
        size = max(self.topology.ranks_per_node, self._hpz_size or 1)
        return get_topology(size, self.topology.mesh.device_type, self._shard_groups).node_group

    def secondary_bytes(self) -> int:
        """Bytes this rank holds in secondary shards."""
        return sum(gather.secondary_bytes() for gather in self.gathers)

    def partial_bytes(self) -> int:
        """Bytes this rank holds in accumulated partial gradients."""
        return sum(reduce.partial_bytes() for reduce in self.reduces)

    def check_same_config(self, config: ZeroPPConfig) -> ZeroPPHandle:
        """Return this handle.

        Raises:
            ValueError: ``config`` is not the one in force.
        """
        if config != self.config:
            raise ValueError(
                f"This model already runs ZeRO++ with {self.config}; it cannot change to {config}. Shard it anew."
            )
        return self

    @property
    def _weight_gathers(self) -> list[WeightGather]:
        """The gathers of all units over the world, whoever carries them out."""
        return [comm for comm in (*self.gathers, *self.fsdp2_gathers) if isinstance(comm, WeightGather)]

    def _install_gathers(self, plan: Plan, buffers: WireBuffers) -> list[WeightGather]:
        keeps_secondary = plan.hpz_size is not None
        # Nothing is quantized and nothing is kept here, so the gather stays FSDP2's own. It is wrapped all the same:
        # its bytes are counted, and a unit that stayed unsharded is gathered anew when its weights change.
        if leaves_gathers_to_fsdp2(self.config, plan.hpz_size, self.topology.world_size):
            for unit in self.units:
                self._count(unit, CountedWeightGather(unit, Freshness(unit), self.traffic))
            return self._weight_gathers
        gather = self._two_hop_gather(plan, buffers)
        check = None
        if plan.checks_secondaries and self.units:
            check = SecondaryCheck.of(gather.node_hop.size if keeps_secondary else None, self.units[0].shard_group)
        for unit in self.units:
            comm = ZeroPPAllGather(
                unit,
                gather,
                self.config,
                self.traffic,
                self._warnings,
                keeps_secondary=keeps_secondary,
                lands_at_once=not self._overlaps,
                check=check,
                beside=self._beside,
            )
            unit.set_all_gather(comm)
            self.gathers.append(comm)
        return self._weight_gathers

    def _two_hop_gather(self, plan: Plan, buffers: WireBuffers) -> TwoHopGather:
        # The groups of gathers follow ``hpz_size``, the number of ranks that share a copy, and may differ from the true
        # nodes. The groups of reductions do not: their node hop is meant for the fast links, whatever the copies are.
        size = plan.hpz_size or plan.shard_ranks_per_node
        groups = get_topology(size, self.topology.mesh.device_type, self._shard_groups)
        cross = Hop(GATHER_CROSS, groups.cross_group, self.traffic, is_async=self._overlaps)
        # The node hop is waited for at once, since FSDP2 needs the weights that it delivers now.
        node = Hop(GATHER_NODE, groups.node_group, self.traffic)
        # The same group under another name: a table then tells resyncs, which should be rare.
        resync = Hop(GATHER_RESYNC, groups.cross_group, self.traffic, is_async=self._overlaps)
        is_cpu = not devices.has_streams(self.topology.mesh.device_type)
        may_share = self.config.shared_memory and plan.hpz_size is not None and is_cpu
        # It is equal on all ranks, since the settings and the device are. ``connect`` is a collective, so a rank that
        # skipped it alone would leave its node waiting. Without hpZ nothing is kept that peers could read later.
        memory = NodeMemory.connect(node.group) if may_share else None
        self.shares_memory = memory is not None
        return TwoHopGather(cross, node, buffers, memory, resync)

    def _install_reduces(self, plan: Plan, gathers: list[WeightGather], buffers: WireBuffers) -> Decisions:
        node = Hop(REDUCE_NODE, self.topology.node_group, self.traffic, is_async=self._overlaps)
        is_async = self._overlaps or self._beside is not None  # FSDP2 goes on before the hop has ended
        cross = Hop(REDUCE_CROSS, self.topology.cross_group, self.traffic, is_async=is_async)
        hops = TwoHopReduce(node, cross, buffers, getattr(torch, self.config.qgz_accumulator))
        # On streams FSDP2 overlaps reductions by itself. On gloo a collective blocks the only thread.
        pipeline = ReducePipeline() if self._overlaps else None
        # Agreements have a group of their own, so that no hop can come between, and on the CPU, so that no stream waits.
        channel = Channel(new_cpu_group(self._shard_groups))
        # Programs that make many models, such as hyperparameter searches, would collect threads otherwise.
        weakref.finalize(self, channel.close).atexit = False
        # Sizes of changed words are exchanged for all units together, so these are started ahead in any case.
        ahead, steps = self._overlaps or self.config.sends_changes, self._micro_steps
        frozen = [gather for gather in self.fsdp2_gathers if isinstance(gather, FrozenGather)]
        decisions = Decisions(
            gathers,
            frozen,
            steps,
            pipeline,
            self.traffic,
            channel,
            self._beside,
            starts_ahead=ahead,
            checks=plan.checks_secondaries,
        )
        for unit in self.units:
            comm = ZeroPPReduceScatter(
                unit, hops, self.config, self.traffic, self._warnings, steps, pipeline, decisions, self._beside
            )
            unit.set_reduce_scatter(comm)
            # FSDP2 adds the output of a reduction to ``.grad``. Where that stands for a result still to come, ``.grad`` must be
            # a plain tensor while FSDP2 adds, and marked as pending before anybody else can look at it.
            unit.wrap_post_backward(comm.before_post_backward, comm.after_post_backward)
            self.reduces.append(comm)
        # Reductions ask the decisions, which complete reductions. One has to be told of the other after both exist.
        decisions.reduces = self.reduces
        return decisions

    def _count(self, unit: Unit, comm: CountedAllGather | CountedWeightGather) -> None:
        """Leave the gathers of ``unit`` to FSDP2, and count them."""
        unit.set_all_gather(comm)
        self.fsdp2_gathers.append(comm)

    def _warn_of_fallbacks(self) -> None:
        """Name the units that stay with FSDP2's collectives, in one warning. Units that change later are named then."""
        mixed = [gather.unit for gather in self.gathers if gather.unit.param_dtype not in FLOAT_DTYPES]
        self._warnings.warn(MIXED_DTYPES, mixed)
        trained = [reduce.unit for reduce in self.reduces if reduce.unit.trains]
        self._warnings.warn(NO_WIRE_FORM, [unit for unit in trained if unit.reduce_dtype not in FLOAT_DTYPES])

    def _follow_weights(self, model: nn.Module) -> None:
        """Learn of loaded weights and of optimizers' steps, as long as the handle lives."""
        # The hooks hang on the model's modules, and the handle holds these modules. A hook that held the handle would
        # close a circle, and gathered weights would wait for the garbage collector after the model was dropped.
        this = weakref.ref(self)

        def invalidate() -> None:
            if (handle := this()) is not None:
                handle.invalidate()

        hook_loading(model, invalidate)
        listen_to_optimizers(self)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Complete the gradients that the optimizer is about to read, and note that it may change weights."""
        # The hook sees every optimizer of the process. That of another model, or of a critic, must not expire these
        # weights.
        held = _params_of(optimizer)
        if self._decisions is not None and any(reduce.unit.has_param_of(held) for reduce in self.reduces):
            if self._decisions.is_generating:
                raise RuntimeError(
                    f"An optimizer steps inside generation_mode (rank {dist.get_rank()}), where weights must not change. Leave "
                    "the `with generation_mode(...)` block first."
                )
            # This is collective, and for all gradients of the model: the step reads ``.grad`` as it is, and a step on
            # gradients without the micro-steps that wait in partial sums would lose them in silence.
            self._decisions.before_optimizer_step()
        for gather in self._weight_gathers:
            if gather.unit.has_param_of(held):
                # A write up to now was no optimizer's. With deltas that matters: after a step a delta is enough,
                # after any other write whole weights must cross.
                gather.freshness.before_step(has_closure=has_closure)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, and note that the optimizer changed the weights of the units whose parameters it holds."""
        held = _params_of(optimizer)
        if any(reduce.unit.has_param_of(held) for reduce in self.reduces):  # one of another model does not count
            self.traffic.end_optimizer_step()
            self._micro_steps.end_step(self.config.qgz_until)
        for gather in self._weight_gathers:
            if gather.unit.has_param_of(held):
                gather.freshness.after_step()


def _params_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _new_traffic(
    model: nn.Module, units: list[Unit], frozen_units: list[Unit], ranks_per_node: int, num_nodes: int
) -> Traffic:
    model_bytes = sum(sum(param.numel() for param in unit.params) * unit.param_dtype.itemsize for unit in units)
    # M is the model as ZeRO-3 would send it, so packed frozen weights count as the bf16 weights that they stand for.
    frozen = [param for unit in frozen_units for param in unit.params]
    model_bytes += dense_numel(model, frozen) * torch.bfloat16.itemsize
    trainable_bytes = sum(sum(param.numel() for param in unit.trainable) * unit.reduce_dtype.itemsize for unit in units)
    return Traffic(ranks_per_node, num_nodes, model_bytes, trainable_bytes)
