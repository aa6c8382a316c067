"""FSDP2 comm objects: one all-gather and one reduce-scatter per unit, over the two-hop collectives.

[Note: when a secondary shard is stale]
A secondary shard is a copy of the weights. It serves until they change, which we learn from three signals:
1. the stamp (identity and version counters of the unit's sharded parameters) differs from the one taken at hop 1;
2. an optimizer stepped (a global post-hook): optimizers may write through data pointers, which moves no counter;
3. somebody said so: ``load_state_dict`` hooks, or ``handle.invalidate()`` after writes through ``.data``.
The signals are local, and they decide which collectives run. Ranks agree on them because a program changes weights on
all ranks or on none, as every operation on a DTensor must; a change made on one rank alone would hang.
A forward between ``backward()`` and ``optimizer.step()`` refills the copy with weights that are about to change:
signal 2 covers it.

[Note: gradient accumulation]
On every micro-step but the last only hop 1 runs; its sums go to a partial of 1/N of the unit in fp32 and FSDP2
receives zeros, which it adds up. The last micro-step adds its own sums and runs hop 2. A unit that takes no part in
the last micro-step (a skipped layer) would keep its partial for ever, so partials that remain at the end of a last
micro-step's backward pass are flushed then.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from hf_zeropp.collectives import Flight, ReduceLayouts, Secondary, TwoHopGather, TwoHopReduce
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.format import FLOAT_DTYPES, Segment, WireLayout
from hf_zeropp.overlap import GatherAhead, ReduceJob, ReducePipeline
from hf_zeropp.traffic import ENGINE_GATHER, ENGINE_REDUCE, Bytes, Peers, Traffic
from hf_zeropp.units import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ParamShard,
    ReduceScatter,
    Unit,
    WeightStamp,
    current_backward,
    queue_after_backward,
)

logger = logging.getLogger(__name__)


def wire_layout(shards: Sequence[ParamShard], bits: int | None, block: int, raw_dtype: torch.dtype) -> WireLayout:
    """Layout of a unit's flat shard: matrices in ``bits``, 1-D parameters (norms, biases) unquantized."""
    segments = [Segment(shard.padded_numel, bits if shard.ndim > 1 else None) for shard in shards]
    return WireLayout(segments, block, raw_dtype)


class CommObject(ABC):
    """What comm objects have in common besides the call itself: memory, for FSDP2, and a prediction of their bytes."""

    unit: Unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` forward and backward passes, per collective."""


class CountedAllGather(CommObject, AllGather):
    """FSDP2's own gather of a unit, with its bytes counted under ``name``."""

    def __init__(self, unit: Unit, traffic: Traffic, name: str = ENGINE_GATHER) -> None:
        self.unit = unit
        self.name = name
        self._traffic = traffic
        self._engine = DefaultAllGather()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._traffic.record(self.name, self._peers().bytes_in_ring(input_tensor.nbytes))
        with self._traffic.timer.measure(input_tensor.device):
            return self._engine(output_tensor, input_tensor, group, async_op)

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` forward and backward passes."""
        if self.unit.shard_group.size() == 1:
            return {}
        return {
            self.name: self._peers().bytes_in_ring(self.unit.shard_bytes()).times(gathers_of(self.unit, micro_steps))
        }

    def _peers(self) -> Peers:
        return Peers.of(self.unit.shard_group, self._traffic.ranks_per_node)


def gathers_of(unit: Unit, micro_steps: int) -> int:
    """How often FSDP2 gathers a unit in ``micro_steps`` forward and backward passes."""
    return micro_steps * (2 if unit.reshards_after_forward else 1)


class ZeroPPAllGather(CommObject, AllGather):
    """qwZ and hpZ: gathers a unit's weights in wire form and keeps the secondary shard between weight changes.

    Args:
        unit: the unit it serves.
        gather: the two hops; shared by all units.
        ahead: starts hop 1 of other units early, shared by all; None where streams do that.
        keep_secondary: hpZ on.
    """

    def __init__(
        self,
        unit: Unit,
        gather: TwoHopGather,
        config: ZeroPPConfig,
        traffic: Traffic,
        *,
        ahead: GatherAhead | None,
        keep_secondary: bool,
    ) -> None:
        self.unit = unit
        self._gather = gather
        self._bits = config.qwz_bits
        self._block = config.weight_block
        self._traffic = traffic
        self._ahead = ahead
        self._keep_secondary = keep_secondary
        self._engine = CountedAllGather(unit, traffic)
        self._layouts: dict[torch.dtype, WireLayout] = {}
        self._secondary: Secondary | None = None
        self._stamp: WeightStamp | None = None
        self._flight: Flight | None = None  # hop 1 under way
        self._hop1_done: torch.Event | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """output [W * S] <- every rank's input [S] in rank order, as the wire form decodes it (also its own)."""
        if input_tensor.dtype not in FLOAT_DTYPES:
            return self._gather_unquantized(output_tensor, input_tensor, group, async_op)
        layout = self.layout(input_tensor.dtype)
        if self._keep_secondary:
            self._gather.decode(self._fresh_secondary(input_tensor, layout), layout, output_tensor)
        else:
            self._stamp = self.unit.stamp()
            self._gather(output_tensor, input_tensor, layout)
        return None

    @property
    def is_fresh(self) -> bool:
        """Whether what was gathered last is still the unit's weights. See [Note: when a secondary shard is stale]."""
        return self._stamp is not None and self._stamp.matches(self.unit.params)

    def expire(self) -> None:
        """Gather across nodes again at the next use. The buffer is kept and overwritten."""
        self._stamp = None

    def start_ahead(self) -> None:
        """Start hop 1 now, if it is due and its input can be had without FSDP2."""
        dtype = self.unit.param_dtype
        if self._keep_secondary and not self.is_fresh and dtype in FLOAT_DTYPES and self.unit.has_plain_shards:
            self._start(self.unit.flat_shard(dtype), self.layout(dtype))

    @property
    def stays_in_group(self) -> bool:
        """Whether a gather of a fresh unit stays among the ranks that share a secondary copy."""
        return self._keep_secondary and self.unit.param_dtype in FLOAT_DTYPES

    def secondary_bytes(self) -> int:
        """Bytes this rank holds between gathers for hpZ."""
        return 0 if self._secondary is None else self._secondary.own.numel()

    def layout(self, dtype: torch.dtype) -> WireLayout:
        if dtype not in self._layouts:
            self._layouts[dtype] = wire_layout(self.unit.param_shards(), self._bits, self._block, dtype)
        return self._layouts[dtype]

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` forward and backward passes."""
        if self.unit.param_dtype not in FLOAT_DTYPES:
            return self._engine.predict(micro_steps)
        gathers = gathers_of(self.unit, micro_steps)
        num_bytes = self.layout(self.unit.param_dtype).nbytes
        cross, node = self._gather.cross, self._gather.node
        counts = {}
        if not self._keep_secondary:
            counts[cross.name] = cross.peers.bytes_of(num_bytes).times(gathers)
        elif self.unit.trainable:  # frozen weights crossed before this step
            counts[cross.name] = cross.peers.bytes_of(num_bytes)
        if node.size > 1:
            counts[node.name] = node.peers.bytes_of(num_bytes * cross.size).times(gathers)
        return counts

    def _fresh_secondary(self, shard: torch.Tensor, layout: WireLayout) -> Secondary:
        """The secondary shard, gathered across nodes if it is stale, and this stream ordered behind its arrival."""
        if not self.is_fresh:
            self._start(shard, layout)
            if self._ahead is not None:
                self._ahead.start_from(self)
        if self._flight is not None:
            self._land()
            self._hop1_done = _record_event(shard.device)
        elif self._hop1_done is not None:
            torch.accelerator.current_stream().wait_event(self._hop1_done)
        assert self._secondary is not None
        return self._secondary

    def _start(self, shard: torch.Tensor, layout: WireLayout) -> None:
        if self._flight is not None:  # started ahead, and the weights changed since
            self._land()
        if self._secondary is None or self._secondary.own.numel() != self._gather.cross.size * layout.nbytes:
            self._secondary = self._gather.new_secondary(layout, shard.device)
        self._stamp = self.unit.stamp()
        self._flight = self._gather.start(shard, layout, self._secondary)

    def _land(self) -> None:
        assert self._flight is not None and self._secondary is not None
        self._gather.land(self._flight, self._secondary)
        self._flight = None

    def _gather_unquantized(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        _warn_once(
            self,
            "The unit %s mixes dtypes (or holds one that is no float of 16 or 32 bits): its weights are gathered by "
            "FSDP2, unquantized and across nodes. Give its parameters one dtype, or set mixed_precision.",
            self.unit.name,
        )
        return self._engine(output, shard, group, async_op)


class ZeroPPReduceScatter(CommObject, ReduceScatter):
    """qgZ: reduces a unit's gradients in two hops, across nodes once per optimizer step.

    Args:
        unit: the unit it serves.
        reduce: the two hops; shared by all units.
        clock: tells the last micro-step, and whether gradients are quantized now; shared by all units.
    """

    def __init__(
        self, unit: Unit, reduce: TwoHopReduce, config: ZeroPPConfig, traffic: Traffic, clock: ReduceClock
    ) -> None:
        self.unit = unit
        self.reduce = reduce
        self._config = config
        self._traffic = traffic
        self._clock = clock
        self._engine = DefaultReduceScatter()
        self._layouts: dict[object, ReduceLayouts] = {}
        self._partial: torch.Tensor | None = None
        self._partial_layouts: ReduceLayouts | None = None
        self._partial_scale = 1.0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """output [S] <- op over ranks of input [W * S]; or zeros, where the result is added to ``.grad`` later."""
        self._clock.tick(self)
        if input_tensor.dtype not in FLOAT_DTYPES:
            return self._reduce_unquantized(output_tensor, input_tensor, group, op, async_op)
        scale = _scale_of(op, group.size())
        self._drop_abandoned_partial()
        layouts = self.layouts(input_tensor.dtype)
        if input_tensor.numel() != group.size() * layouts.node.numel:
            self._reduce_part(output_tensor, input_tensor, group, scale)
            return None
        is_last = self._clock.is_last_micro_step()
        if self._clock.pipeline is not None and not self.unit.shows_reduced_output:
            self._clock.pipeline.advance()
            flights = self.reduce.start(input_tensor, layouts)
            self._clock.pipeline.submit(ReduceJob(self, layouts, scale, is_last, flights))
            output_tensor.zero_()
            return None
        flights = self.reduce.start(input_tensor, layouts)
        if is_last:
            self.reduce.finish(self.cross_over(flights, layouts), layouts, output_tensor, scale)
        else:
            self.accumulate(flights, layouts, scale)
            output_tensor.zero_()
        return None

    def accumulate(self, flights: list[Flight], layouts: ReduceLayouts, scale: float) -> None:
        """Hop 1 has ended on a micro-step that is not the last: keep the node's sums."""
        self._partial = self.reduce.accumulate(flights, layouts, self._partial)
        self._partial_layouts, self._partial_scale = layouts, scale

    def cross_over(self, flights: list[Flight], layouts: ReduceLayouts) -> list[Flight]:
        """Hop 1 has ended on the last micro-step: start hop 2 with all that was accumulated."""
        partial, self._partial = self._partial, None
        return self.reduce.cross_over(flights, layouts, partial)

    def add_to_grads(self, flights: list[Flight], layouts: ReduceLayouts, scale: float) -> None:
        """Hop 2 has ended after FSDP2 took zeros for its output: do what FSDP2 does with an output."""
        reduced = torch.empty(layouts.cross.numel, dtype=layouts.cross.raw_dtype, device=flights[0].received.device)
        self.reduce.finish(flights, layouts, reduced, scale)
        self.unit.divide_after_reduce(reduced)
        offset = 0
        for shard, param in zip(self.unit.param_shards(trainable_only=True), self.unit.trainable, strict=True):
            if isinstance(param.grad, DTensor):
                grad = param.grad._local_tensor
                grad += reduced[offset : offset + shard.numel].view(grad.shape).to(grad.dtype)
            offset += shard.padded_numel

    def flush(self) -> None:
        """Run hop 2 for a partial that no reduction of the last micro-step took."""
        partial, self._partial = self._partial, None
        layouts = self._partial_layouts
        assert partial is not None and layouts is not None
        self.add_to_grads(self.reduce.start_across(partial, layouts), layouts, self._partial_scale)

    def layouts(self, dtype: torch.dtype) -> ReduceLayouts:
        shards = self.unit.param_shards(trainable_only=True)
        key = (dtype, self._clock.quantizes, tuple(shards))
        if key not in self._layouts:
            on = self._clock.quantizes
            node_bits = self._config.qgz_intra_bits if on else None
            cross_bits = self._config.qgz_bits if on else None
            self._layouts[key] = ReduceLayouts(
                node=wire_layout(shards, node_bits, self._config.grad_block, dtype),
                cross=wire_layout(shards, cross_bits, self._config.grad_block, dtype),
            )
        return self._layouts[key]

    @property
    def has_partial(self) -> bool:
        return self._partial is not None

    def partial_bytes(self) -> int:
        """Bytes this rank holds between micro-steps."""
        return 0 if self._partial is None else self._partial.nbytes

    def discard(self) -> None:
        self._partial = None

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Bytes of one training step of ``micro_steps`` backward passes."""
        if not self.unit.trainable:
            return {}
        node, cross = self.reduce.node, self.reduce.cross
        layouts = self.layouts(self.unit.reduce_dtype)
        chunks = self.reduce.chunks(layouts)
        counts = {cross.name: cross.peers.bytes_of(sum(chunk.cross.nbytes for chunk in chunks))}
        if node.size > 1:
            node_bytes = cross.size * sum(chunk.node.nbytes for chunk in chunks)
            counts[node.name] = node.peers.bytes_of(node_bytes).times(micro_steps)
        return counts

    def _drop_abandoned_partial(self) -> None:
        """``zero_grad`` between micro-steps means to start over: FSDP2's zeros are gone, so the partial goes too."""
        if self._partial is not None and all(param.grad is None for param in self.unit.trainable):
            self._partial = None

    def _reduce_part(self, output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Some parameters of the unit got no gradient, and FSDP2 does not say which: no layout, no quantization.

        Exact, both hops at once, so nothing is left to accumulate; what other micro-steps accumulated is flushed.
        """
        _warn_once(
            self,
            "Only %d of the %d gradient elements of unit %s arrived (parameters without gradient): they are reduced "
            "unquantized, at every micro-step. If that is meant, freeze those parameters or shard them apart.",
            part.numel() // group.size(),
            sum(shard.padded_numel for shard in self.unit.param_shards(trainable_only=True)),
            self.unit.name,
        )
        layout = WireLayout([Segment(part.numel() // group.size(), None)], self._config.grad_block, part.dtype)
        layouts = ReduceLayouts(layout, layout)
        self.reduce(output, part, layouts, scale=scale)

    def _reduce_unquantized(
        self, output: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp, async_op: bool
    ) -> dist.Work | None:
        _warn_once(
            self,
            "Unit %s reduces gradients in %s, for which there is no wire form: FSDP2 reduces them, across nodes at "
            "every micro-step. Use float32, bfloat16 or float16.",
            self.unit.name,
            full.dtype,
        )
        peers = Peers.of(group, self._traffic.ranks_per_node)
        self._traffic.record(ENGINE_REDUCE, peers.bytes_of(output.nbytes))
        return self._engine(output, full, group, op, async_op)


class ReduceClock:
    """What all reductions of a model share: the micro-step, whether gradients are quantized now, and the flush.

    Args:
        pipeline: where reductions overlap with compute; None where streams do that.
    """

    def __init__(self, quantizes: bool, traffic: Traffic, pipeline: ReducePipeline | None) -> None:
        self.quantizes = quantizes
        self.is_last_micro_step: Callable[[], bool] = lambda: True
        self.reduces: list[ZeroPPReduceScatter] = []
        self.pipeline = pipeline
        self._traffic = traffic
        self._backward = -1  # the backward pass at whose end a flush is queued

    def tick(self, reduce: ZeroPPReduceScatter) -> None:
        """Called by every reduction: counts micro-steps, and queues one flush behind each backward pass."""
        if reduce is self._first_trainable():
            self._traffic.micro_steps += 1
        if self._backward != current_backward():
            self._backward = current_backward()
            queue_after_backward(self._flush)

    def forget_aborted_backward(self) -> None:
        """Called outside of backward passes: what is still under way belongs to one that raised."""
        if self.pipeline and current_backward() == -1:
            self.pipeline.discard()

    def _first_trainable(self) -> ZeroPPReduceScatter | None:
        return next((reduce for reduce in self.reduces if reduce.unit.trainable), None)

    def _flush(self) -> None:
        if self.pipeline is not None:
            self.pipeline.drain()
        if self.is_last_micro_step():
            for reduce in self.reduces:
                if reduce.has_partial:
                    reduce.flush()


def _scale_of(op: ReduceOp | ReduceOp.RedOpType, world_size: int) -> float:
    """The factor a reduce op applies to the sum.

    Raises:
        ValueError: the op is neither a sum, nor a mean, nor a pre-multiplied sum.
    """
    # A ReduceOp carries the factor of a pre-multiplied sum where only its pickled state shows it.
    # (`type`, not `isinstance`: ReduceOp claims its own enum members as instances.)
    state: Any = (op if type(op) is ReduceOp else ReduceOp(cast(ReduceOp.RedOpType, op))).__getstate__()
    kind, factor = state
    if kind == ReduceOp.SUM:
        return 1.0
    if kind == ReduceOp.AVG:
        return 1.0 / world_size
    if kind == ReduceOp.PREMUL_SUM:
        return float(factor)
    raise ValueError(
        f"Gradients can be reduced by SUM, AVG or a pre-multiplied sum, got {kind} on rank {dist.get_rank()}."
    )


def _record_event(device: torch.device) -> torch.Event | None:
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event


_warned: set[tuple[type, str, str]] = set()


def _warn_once(comm: CommObject, message: str, *args: object) -> None:
    key = (type(comm), message, comm.unit.name)
    if key not in _warned:
        _warned.add(key)
        logger.warning(message, *args)
