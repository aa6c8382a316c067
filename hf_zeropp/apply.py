"""``apply_zeropp(model, config)``: the only place that installs anything on a model."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_zeropp.comm.gloo_exit import give_gloo_time_at_exit
from hf_zeropp.comm.hop import Hop, WireBuffers
from hf_zeropp.comm.node_memory import NodeMemory
from hf_zeropp.comm.topology import Topology, get_topology
from hf_zeropp.comm.two_hops import TwoHopGather, TwoHopReduce
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.frozen.modules import dense_numel
from hf_zeropp.fsdp.all_gather import ZeroPPAllGather
from hf_zeropp.fsdp.comm_object import CommObject, CountedAllGather
from hf_zeropp.fsdp.overlap import GatherAhead, ReducePipeline
from hf_zeropp.fsdp.reduce_scatter import ReduceClock, ZeroPPReduceScatter
from hf_zeropp.fsdp.residual_state import load_residuals, save_residuals, state_file
from hf_zeropp.fsdp.secondary_check import SecondaryCheck
from hf_zeropp.fsdp.units import Unit, find_units, without_compile_wrapper
from hf_zeropp.plan import Plan, agree, require_process_group
from hf_zeropp.traffic import (
    ENGINE_GATHER,
    GATHER_CROSS,
    GATHER_FROZEN,
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


def apply_zeropp(
    model: nn.Module, config: ZeroPPConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None
) -> ZeroPPHandle:
    """Run a sharded model's weight gathers and gradient reductions as ZeRO++ does. Idempotent.

    Args:
        model: sharded by ``fully_shard`` over the whole world (Accelerate's FSDP2 and Transformers'
            ``distributed_config`` do so).
        config: the settings, a mapping or file of them, or None for the environment.

    Returns:
        The handle. A loop of your own calls ``set_last_micro_step`` (accumulation), ``set_progress`` (``qgz_until``),
        ``set_loss_scale`` (error feedback with fp16), ``save_state`` and ``load_state`` (exact resume with deltas or error
        feedback), ``invalidate`` (after writes that nothing shows); ``traffic`` counts bytes.

    Raises:
        ValueError: on every rank, when on any rank the model is not sharded over the whole world, the settings do not
            fit the world, or ranks differ in settings.
    """
    if (handle := get_handle(model)) is not None:
        return handle.check_same_config(ZeroPPConfig.resolve(config))
    require_process_group()
    model = without_compile_wrapper(model)
    plan = agree(model, config)
    handle = ZeroPPHandle(model, ZeroPPConfig(**dict(plan.settings)), plan)
    setattr(model, _HANDLE, handle)
    give_gloo_time_at_exit()
    return handle


def get_handle(model: nn.Module) -> ZeroPPHandle | None:
    """The handle of a model ``apply_zeropp`` was called with, or None."""
    return vars(without_compile_wrapper(model)).get(_HANDLE)


class ZeroPPHandle:
    """ZeRO++ on one model.

    Attributes:
        config: the settings in force.
        topology: this rank's nodes and groups.
        traffic: bytes counted since the last ``traffic.reset()``.
        shares_memory: whether the ranks of a node read secondary shards in each other's memory (on CPU).
        is_active: False with one node only, where FSDP2's own collectives stay.
    """

    def __init__(self, model: nn.Module, config: ZeroPPConfig, plan: Plan) -> None:
        self.config = config
        self._hpz_size = plan.hpz_size
        units = find_units(model)
        self.topology = get_topology(plan.ranks_per_node, units[0].device_type)
        self.units = [unit for unit in units if unit.shard_group.size() == self.topology.world_size]
        self.frozen_units = [unit for unit in units if unit not in self.units]
        self.traffic = _new_traffic(self.units, self.frozen_units, self.topology)
        self.gathers: list[ZeroPPAllGather] = []
        self.reduces: list[ZeroPPReduceScatter] = []
        self.engine_gathers: list[CountedAllGather] = []
        # Where there are streams, FSDP2's overlap and ours must not be added to each other.
        self._overlaps = config.overlap and self.topology.mesh.device_type == "cpu"
        self.shares_memory = False
        pipeline = ReducePipeline() if self._overlaps else None
        self._clock = ReduceClock(config.quantizes_gradients, self.traffic, pipeline)
        if not self.is_active:
            logger.info(
                "One node only (%d ranks): nothing crosses nodes, so FSDP2's own collectives stay.",
                self.topology.world_size,
            )
            return
        buffers = WireBuffers()
        self._install_gathers(plan, buffers)
        self._install_reduces(buffers)
        self._count_engine_gathers(self.frozen_units, GATHER_FROZEN)  # within the node
        self._watch_weights(model)

    @property
    def is_active(self) -> bool:
        return self.topology.num_nodes > 1

    def invalidate(self) -> None:
        """Gather across nodes again at the next use. Call it on all ranks after weights changed behind autograd's
        back: through ``param.data``, raw pointers, or a kernel of your own."""
        for gather in self.gathers:
            gather.expire()

    def reshard(self) -> None:
        """Drop what stayed unsharded after a forward (FSDP2's root): torch's full-state load mistakes it for shards."""
        for unit in self.units:
            if unit.is_unsharded:
                unit.reshard()

    def set_last_micro_step(self, is_last: bool | Callable[[], bool]) -> None:
        """Tell whether the coming backward passes end an accumulation; or give a function that tells it each time."""
        self._clock.is_last_micro_step = is_last if callable(is_last) else lambda: is_last

    def set_progress(self, fraction: float) -> None:
        """Tell how much of training is done, 0 to 1, for ``qgz_until``. Call it between steps, on all ranks."""
        self._clock.set_quantizes(self.config.quantizes_gradients and fraction < self.config.qgz_until)

    def set_loss_scale(self, scale: float | Callable[[], float]) -> None:
        """Tell the factor that losses are multiplied with (fp16), or give a function that tells it: what error feedback
        kept is of gradients with that factor. A GradScaler's is ``scaler.get_scale``. Asked once per backward pass (on a GPU
        the host waits for it)."""
        self._clock.ask_loss_scale = scale if callable(scale) else lambda: scale

    def save_state(self, folder: str | os.PathLike[str], index: int = 0) -> None:
        """Write this rank's part of what an exact resume needs besides weights and optimizer states (run_state.py).

        Accelerate's and the Trainer's checkpoints do it. Call it on all ranks; ``index`` tells models apart.
        """
        for gather in self.gathers:
            gather.resync()
        if self.config.error_feedback_decay is not None:
            path = state_file(folder, self.topology.rank, index)
            save_residuals(path, self.reduces, self.topology)

    def load_state(self, folder: str | os.PathLike[str], index: int = 0) -> None:
        """Go on from what ``save_state`` wrote; from residuals of zero where that does not fit, with a log line."""
        self.invalidate()
        path = state_file(folder, self.topology.rank, index)
        if self.config.error_feedback_decay is not None:
            load_residuals(path, self.reduces, self.topology)
        elif path.exists():
            logger.warning("%s is left out: error feedback, which it belongs to, is off.", path.name)

    def discard_accumulated(self) -> None:
        """Forget micro-steps accumulated so far (``zero_grad`` does it too)."""
        for reduce in self.reduces:
            reduce.discard()

    def predict(self, micro_steps: int = 1) -> dict[str, Bytes]:
        """Bytes this rank receives in one step of ``micro_steps`` micro-steps, per collective. After a first forward."""
        counts: dict[str, Bytes] = {}
        comms: list[CommObject] = [*self.gathers, *self.reduces, *self.engine_gathers]
        for comm in comms:
            for name, count in comm.predict(micro_steps).items():
                counts.setdefault(name, Bytes()).add(count)
        return counts

    def start_stale_gathers(self) -> None:
        """Start hop 1 of every unit whose secondary shard is stale. Call it on all ranks."""
        for gather in self.gathers:
            gather.start_ahead()

    def lockstep_group(self) -> dist.ProcessGroup | None:
        """The ranks that must run the same forwards while no weight changes; None for all."""
        in_groups = bool(self.gathers) and all(gather.stays_in_group for gather in self.gathers)
        if not self.is_active or not (in_groups or not self.units):
            return None
        size = max(self.topology.ranks_per_node, self._hpz_size or 1)
        return get_topology(size, self.topology.mesh.device_type).node_group

    def secondary_bytes(self) -> int:
        """Bytes this rank holds in secondary shards."""
        return sum(gather.secondary_bytes() for gather in self.gathers)

    def residual_bytes(self) -> int:
        """Bytes this rank holds for error feedback."""
        return sum(reduce.residual.nbytes() for reduce in self.reduces)

    def partial_bytes(self) -> int:
        """Bytes this rank holds in accumulated partial gradients."""
        return sum(reduce.partial_bytes() for reduce in self.reduces)

    def check_same_config(self, config: ZeroPPConfig) -> ZeroPPHandle:
        if config != self.config:
            raise ValueError(
                f"This model already runs ZeRO++ with {self.config}; it cannot change to {config}. Shard it anew."
            )
        return self

    def _install_gathers(self, plan: Plan, buffers: WireBuffers) -> None:
        keep_secondary = plan.hpz_size is not None
        if self.config.qwz_bits is None and plan.hpz_size in (None, self.topology.world_size):
            self._count_engine_gathers(self.units, ENGINE_GATHER)  # nothing to quantize and nothing to keep
            return
        groups = get_topology(plan.hpz_size or plan.ranks_per_node, self.topology.mesh.device_type)
        cross = Hop(GATHER_CROSS, groups.cross_group, self.traffic, is_async=self._overlaps)
        node = Hop(GATHER_NODE, groups.node_group, self.traffic)
        may_share = self.config.shared_memory and keep_secondary and self.topology.mesh.device_type == "cpu"
        memory = NodeMemory.connect(node.group) if may_share else None
        self.shares_memory = memory is not None
        resync = Hop(GATHER_RESYNC, groups.cross_group, self.traffic, is_async=self._overlaps)
        gather = TwoHopGather(cross, node, buffers, memory, resync)
        check = SecondaryCheck(node.size) if plan.checks_secondaries and keep_secondary else None
        if plan.checks_secondaries and check is None:
            logger.warning(
                "ZEROPP_CHECK=1 compares the nodes' copies of the weights; with hpz_size=None there are none."
            )
        ahead = GatherAhead() if self._overlaps and keep_secondary else None
        for unit in self.units:
            comm = ZeroPPAllGather(
                unit, gather, self.config, self.traffic, ahead=ahead, keep_secondary=keep_secondary, check=check
            )
            unit.set_all_gather(comm)
            self.gathers.append(comm)

    def _install_reduces(self, buffers: WireBuffers) -> None:
        is_async = self._overlaps or self.config.qgz_chunks > 1  # chunks overlap with each other on any backend
        node = Hop(REDUCE_NODE, self.topology.node_group, self.traffic, is_async=is_async)
        cross = Hop(REDUCE_CROSS, self.topology.cross_group, self.traffic, is_async=is_async)
        reduce = TwoHopReduce(node, cross, buffers, self.config.qgz_chunks)
        for unit in self.units:
            comm = ZeroPPReduceScatter(unit, reduce, self.config, self.traffic, self._clock)
            unit.set_reduce_scatter(comm)
            self.reduces.append(comm)
        self._clock.reduces = self.reduces

    def _count_engine_gathers(self, units: list[Unit], name: str) -> None:
        """These units' gathers stay FSDP2's."""
        for unit in units:
            comm = CountedAllGather(unit, self.traffic, name)
            unit.set_all_gather(comm)
            self.engine_gathers.append(comm)

    def _watch_weights(self, model: nn.Module) -> None:
        """The guards of [Note: when a secondary shard is stale] that version counters cannot give."""
        this = weakref.ref(self)

        def after_load(module: nn.Module, incompatible_keys: Any) -> None:
            if (handle := this()) is not None:
                handle.invalidate()

        _live_handles.add(self)
        _watch_optimizers()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_load_state_dict_post_hook(after_load)
        model.register_forward_pre_hook(_forget_aborted_backward(self._clock), prepend=True)
        for gather in self.gathers:
            for module in gather.unit.modules:
                module.register_forward_pre_hook(_reshard_if_stale(gather), prepend=True)

    def _before_optimizer_step(self) -> None:
        for gather in self.gathers:
            gather.before_optimizer_step()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for reduce in self.reduces:
            if any(id(param) in stepped for param in reduce.unit.trainable):
                reduce.residual.after_optimizer_step()
        if any(id(param) in stepped for unit in self.units for param in unit.trainable):
            self.traffic.steps += 1
        for gather in self.gathers:
            if gather.unit.trainable:
                gather.after_optimizer_step()


_live_handles: weakref.WeakSet[ZeroPPHandle] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Once per process: hooks per handle would have to be removed with it, and a handle may die while hooks run."""

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for handle in _live_handles:
            handle._before_optimizer_step()

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for handle in _live_handles:
            handle._after_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def _reshard_if_stale(gather: ZeroPPAllGather) -> Callable[[nn.Module, Any], None]:
    """A unit that stays unsharded after forward (FSDP2's root) would compute with weights that changed meanwhile."""

    @torch.compiler.disable
    def before_forward(module: nn.Module, args: Any) -> None:
        if gather.unit.is_unsharded and not gather.is_fresh:
            gather.unit.reshard()

    return before_forward


def _forget_aborted_backward(clock: ReduceClock) -> Callable[[nn.Module, Any], None]:
    """A backward pass that raised leaves reductions under way, which must not reach the gradients of the next."""

    @torch.compiler.disable
    def before_forward(module: nn.Module, args: Any) -> None:
        clock.forget_aborted_backward()

    return before_forward


def _new_traffic(units: list[Unit], frozen_units: list[Unit], topology: Topology) -> Traffic:
    model_bytes = sum(param.numel() * unit.param_dtype.itemsize for unit in units for param in unit.params)
    frozen_modules = {module for unit in frozen_units for module in unit.modules}
    model_bytes += sum(dense_numel(module) for module in frozen_modules) * torch.bfloat16.itemsize
    trainable_bytes = sum(param.numel() * unit.reduce_dtype.itemsize for unit in units for param in unit.trainable)
    return Traffic(topology.ranks_per_node, topology.num_nodes, model_bytes, trainable_bytes)
