"""qgZ for FSDP2: one reduce-scatter object per unit, over the two-hop reduction.

[Note: gradient accumulation]
On every micro-step but the last only hop 1 runs; its sums go to a partial of 1/N of the unit in fp32 and FSDP2
receives zeros, which it adds up. The last micro-step adds its own sums and runs hop 2. A unit that takes no part in
the last micro-step (a skipped layer) would keep its partial for ever, so partials that remain at the end of a last
micro-step's backward pass are flushed then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import Feedback, ReduceLayouts, TwoHopReduce
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.comm_object import CommObject, reduce_layouts, warn_once
from hf_zeropp.fsdp.error_feedback import LossScale, Residual
from hf_zeropp.fsdp.overlap import ReduceJob, ReducePipeline
from hf_zeropp.fsdp.units import DefaultReduceScatter, ReduceScatter, Unit, current_backward, queue_after_backward
from hf_zeropp.ops.format import FLOAT_DTYPES, Segment, WireLayout
from hf_zeropp.traffic import ENGINE_REDUCE, Bytes, Peers, Traffic, total


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
        self.residual = Residual(config, clock.loss_scale)
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
        self._drop_abandoned()
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
        feedback = self._feedback(layouts, flights[0].received.device)
        return self.reduce.cross_over(flights, layouts, partial, feedback)

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
        feedback = self._feedback(layouts, partial.device)
        self.add_to_grads(self.reduce.start_across(partial, layouts, feedback), layouts, self._partial_scale)

    def layouts(self, dtype: torch.dtype) -> ReduceLayouts:
        shards = self.unit.param_shards(trainable_only=True)
        key = (dtype, self._clock.quantizes, tuple(shards))
        if key not in self._layouts:
            self._layouts[key] = reduce_layouts(self._config, shards, dtype, quantizes=self._clock.quantizes)
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
        counts = {cross.name: total(cross.peers.bytes_of(chunk.cross.nbytes) for chunk in chunks)}
        if node.size > 1:
            received = total(node.peers.bytes_of(cross.size * chunk.node.nbytes) for chunk in chunks)
            counts[node.name] = received.times(micro_steps)
        return counts

    def _feedback(self, layouts: ReduceLayouts, device: torch.device) -> list[Feedback] | None:
        """For the hop 2 that begins now."""
        return self.residual.feedback(self.reduce.chunks(layouts), self.reduce.cross.size, device)

    def _drop_abandoned(self) -> None:
        """``zero_grad`` between micro-steps means to start over: FSDP2's zeros are gone, so the partial goes too."""
        if all(param.grad is None for param in self.unit.trainable):
            self._partial = None
            self.residual.drop_if_unused()

    def _reduce_part(self, output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, scale: float) -> None:
        """Some parameters of the unit got no gradient, and FSDP2 does not say which: no layout, no quantization.

        Exact, both hops at once, so nothing is left to accumulate; what other micro-steps accumulated is flushed.
        """
        warn_once(
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
        warn_once(
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

    Attributes:
        quantizes: whether gradients are quantized now; the same for all micro-steps of a step.
        loss_scale: that of the backward pass under way.
        ask_loss_scale: tells it; asked once per backward pass.
    """

    def __init__(self, quantizes: bool, traffic: Traffic, pipeline: ReducePipeline | None) -> None:
        self.quantizes = self._wants_quantizes = quantizes
        self.is_last_micro_step: Callable[[], bool] = lambda: True
        self.loss_scale = LossScale()
        self.ask_loss_scale: Callable[[], float] = lambda: 1.0
        self.reduces: list[ZeroPPReduceScatter] = []
        self.pipeline = pipeline
        self._traffic = traffic
        self._backward = -1  # the backward pass at whose end a flush is queued

    def set_quantizes(self, quantizes: bool) -> None:
        """From the next step on: partial sums are of gradients encoded one way, rotated or not."""
        self._wants_quantizes = quantizes
        self._settle()

    def tick(self, reduce: ZeroPPReduceScatter) -> None:
        """Called by every reduction: counts micro-steps, and queues one flush behind each backward pass."""
        if reduce is self._first_trainable():
            self._traffic.micro_steps += 1
        if self._backward != current_backward():
            self._backward = current_backward()
            self.loss_scale.value = self.ask_loss_scale()
            self._settle()
            queue_after_backward(self._flush)

    def forget_aborted_backward(self) -> None:
        """Called outside of backward passes: what is still under way belongs to one that raised."""
        if self.pipeline and current_backward() == -1:
            self.pipeline.discard()

    def _settle(self) -> None:
        if not any(reduce.has_partial for reduce in self.reduces):
            self.quantizes = self._wants_quantizes

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
