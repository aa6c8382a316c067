"""The handle: what a training loop tells a model that runs under ZeRO++, and what it can ask it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist

from hf_zeropp import devices
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.comm_objects import CommObject
from hf_zeropp.fsdp.decisions import Decisions
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
from hf_zeropp.fsdp.meshes import has_other_parallelism
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.fsdp.weights.gather import WeightGather
from hf_zeropp.traffic import Bytes


class ZeroPPHandle:
    """ZeRO++ on one model.

    Args:
        run: what all units share.
        units: those over the shard group.
        frozen_units: those over a node.
        decisions: what ranks decide together about ``units``. None where FSDP2's own collectives stay, and where there is no
            such unit.
        by_fsdp2: units of experts that FSDP2 gathers and reduces itself, because each lies within a node.
        counted: what counts the bytes of ``frozen_units`` and ``by_fsdp2``; nothing where FSDP2's own collectives stay.

    Attributes:
        config: the settings in force, with what ``"auto"`` stands for on this device.
        topology: this rank's nodes and groups.
        traffic: bytes counted since the last ``traffic.reset()``.
        units, frozen_units: as above.
        gathers: the two-hop gathers of ``units``; empty where FSDP2 gathers them.
        reduces: the two-hop reductions of ``units``.
    """

    def __init__(
        self,
        run: ModelRun,
        units: Sequence[Unit],
        frozen_units: Sequence[Unit],
        decisions: Decisions | None = None,
        by_fsdp2: Sequence[Unit] = (),
        counted: Sequence[CommObject] = (),
    ) -> None:
        self.config = run.config
        self.topology = run.mesh.topology
        self.traffic = run.traffic
        self.units = list(units)
        self.frozen_units = list(frozen_units)
        self.gathers: list[WeightGather] = []
        self.reduces: list[ZeroPPReduceScatter] = []
        self._run = run
        self._by_fsdp2 = list(by_fsdp2)
        self._decisions = decisions
        self._comms: list[CommObject] = [*counted]
        if decisions is not None:
            self.gathers += [gather for gather in decisions.weights.gathers if gather.has_hops]
            self.reduces += decisions.gradients.reduces
            self._comms += [*decisions.weights.gathers, *decisions.gradients.reduces]

    @property
    def is_active(self) -> bool:
        """Whether collectives were replaced. They are not with one node only, and with ``ZEROPP_ENABLED=0``."""
        return bool(self._comms)

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of a node read secondary shards in each other's memory (on CPU)."""
        return any(gather.hops.shares_memory for gather in self.gathers)

    def serves(self, unit: Unit) -> bool:
        """Return whether the unit was there when the handle was made."""
        return unit.all_gather in self._comms or unit.all_gather in [each.all_gather for each in self._by_fsdp2]

    def invalidate(self) -> None:
        """Gather across nodes again at the next forward pass. One rank may call it alone.

        Call it after a checkpoint was loaded in place (Accelerate's and the Trainer's do it), and after writes that move no
        version counter: through ``param.data``, NumPy, raw pointers or a kernel of your own, and with ``torch._foreach_*``
        operations on parameters. Without it all ranks raise an error later, except for units that hold tensors with a gather of
        their own.
        """
        if self._decisions is not None:
            self._decisions.weights.invalidate()

    def reshard(self) -> None:
        """Reshard the units that a forward pass left unsharded, such as FSDP2's root unit.

        Call it before PyTorch loads a full state dict: it would take the unsharded parameters for shards.
        """
        for unit in (*self.units, *self._by_fsdp2):
            if unit.is_unsharded:
                unit.reshard()

    def set_last_micro_step(self, is_last: bool | Callable[[], bool]) -> None:
        """Tell whether the coming backward passes end an accumulation; or give a function that tells it each time."""
        self._run.micro_steps.ask_is_last = is_last if callable(is_last) else lambda: is_last

    def set_progress(self, fraction: float) -> None:
        """Tell how much of training is done, 0 to 1, for ``qgz_until``. Call it between steps, on all ranks."""
        # Partial sums of quantized and of unquantized gradients do not add up. While there are any, the change waits for the
        # next step.
        # A Trainer that resumes a training which had ended makes a step beyond it, at a fraction of 1.
        is_before = fraction < self.config.qgz_until or self.config.qgz_until == 1
        quantizes = self.config.quantizes_gradients and is_before
        is_accumulating = any(reduce.partial_bytes() for reduce in self.reduces)
        self._run.micro_steps.set_quantizes(quantizes, is_accumulating=is_accumulating)

    def save_state(self) -> None:
        """Let this run go on from a checkpoint, which was just saved, as a run that is resumed from it does.

        Accelerate's and the Trainer's checkpoints do it. Call it on all ranks. Nothing is written.
        """
        # A resumed run starts from the masters, and sends whole weights first. This run must do the same at its next
        # forward pass, or its secondary shards would keep the rounding of earlier deltas, and the two runs would
        # differ.
        for gather in self.gathers:
            gather.resync()

    def deliver(self) -> None:
        """Complete gradients whose last micro-step did not come. Call it on all ranks, outside of a backward pass.

        An optimizer's step does so by itself. Code that reads, clips or scales gradients before it needs this, unless the last
        backward pass was told to be the last micro-step.

        Raises:
            DisagreementError: on every rank, if ranks did not reduce the same gradients.
        """
        if self._decisions is not None:
            self._decisions.gradients.deliver()

    def discard_accumulated(self) -> None:
        """Forget micro-steps accumulated so far (``zero_grad`` does it too with ``qgz_accumulate="node"``)."""
        for reduce in self.reduces:
            reduce.discard()

    def predict(self, micro_steps: int = 1) -> dict[str, Bytes]:
        """Bytes this rank receives in one step of ``micro_steps`` micro-steps, per collective."""
        counts: dict[str, Bytes] = {}
        for comm in self._comms:
            for name, count in comm.predict(micro_steps).items():
                counts.setdefault(name, Bytes()).add(count)
        return counts

    def generating(self) -> AbstractContextManager[None]:
        """Bring all weights up to date, and let no forward pass inside cross nodes again. Enter it on all ranks."""
        # No trainable unit is over the world, or there is one node: no gather crosses nodes, and there is nothing to
        # agree on.
        return contextlib.nullcontext() if self._decisions is None else self._decisions.weights.generating()

    def lockstep_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that must run the same forward passes while no weight changes; None for the whole world."""
        # Ranks must run the same forwards wherever their gathers meet. Without secondary shards, or for a unit that
        # stays FSDP2's own, that is the world.
        in_groups = bool(self.gathers) and all(gather.stays_in_group for gather in self.gathers)
        # Other parallelism exchanges activations in every forward pass, in groups of its own.
        is_in_parallel = len(self._run.mesh.groups.data_parallel) > 1 or any(
            has_other_parallelism(unit) for unit in (*self.units, *self._by_fsdp2)
        )
        # Replicas on the same nodes as each other have nodes of fewer ranks than the frozen units that they share.
        is_apart = self.topology.ranks_per_node != self.traffic.ranks_per_node
        if not self.is_active or not (in_groups or not self.units) or is_in_parallel or is_apart:
            return None
        # Two kinds of gathers meet in groups of two sizes: frozen units over the node, secondary shards over
        # ``hpz_size`` ranks. One size divides the other (``resolve_hpz_size``), so the larger group contains the
        # smaller.
        return self._run.mesh.topology_of(max(self.topology.ranks_per_node, self._run.mesh.hpz_size or 1)).node_group

    def secondary_bytes(self) -> int:
        """Bytes this rank holds in secondary shards."""
        return sum(gather.secondary_bytes() for gather in self.gathers)

    def partial_bytes(self) -> int:
        """Bytes this rank holds in accumulated gradients: partial sums of its node, or its own at full size."""
        return sum(reduce.partial_bytes() + reduce.unit.gradients.unreduced_bytes() for reduce in self.reduces)

    def check_same_config(self, config: ZeroPPConfig) -> ZeroPPHandle:
        """Return this handle.

        Raises:
            ValueError: ``config`` is not the one in force.
        """
        resolved = config.resolve_node_bits(
            on_cpu=not devices.has_streams(self._run.mesh.device_type),
            copies_span_nodes=(self._run.mesh.hpz_size or 0) > self.topology.ranks_per_node,
        )
        if resolved != self.config:
            raise ValueError(
                f"This model already runs ZeRO++ with {self.config}; it cannot change to {config}. Shard it anew."
            )
        return self
