"""qgZ for FSDP2: one reduce-scatter object per unit, over the two-hop reduction.

See [Note: gradient accumulation] below, and overlap.py for reductions that run while the model computes.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from hf_zeropp import devices
from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import ReduceLayouts, TwoHopReduce
from hf_zeropp.fsdp.comm_objects import CommObject, names_unit, record_event
from hf_zeropp.fsdp.gradient_form import Form, Forms, Partial, scale_of
from hf_zeropp.fsdp.overlap import ReducePipeline
from hf_zeropp.fsdp.pending import PendingGradients
from hf_zeropp.fsdp.predictions import reduce_bytes
from hf_zeropp.fsdp.run import Run
from hf_zeropp.fsdp.units import DefaultReduceScatter, ReduceScatter, Unit
from hf_zeropp.fsdp.withheld import WithheldGradients
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.traffic import FSDP2_REDUCE, Bytes, Peers

# [Note: gradient accumulation]
# On every micro-step but the last only the node hop runs. Its sums are added to a *partial*, 1/N of the unit in fp32 (or in
# bf16, ``qgz_accumulator``), and FSDP2 receives zeros. The last micro-step adds its own sums and runs the cross hop. So
# accumulation costs no cross-node bytes and no gradient of full size.
#
# A partial is a debt: ``.grad`` is not what it seems until the cross hop has run. Three things settle it, whichever comes
# first: the last micro-step; the end of a last backward pass in which the unit took no part (a skipped layer); and
# anybody who looks at a gradient or steps an optimizer (pending.py, decisions.py), should the last micro-step never come.


NO_WIRE_FORM = (
    "These units reduce gradients in a dtype without a wire form, so FSDP2 reduces them, across nodes at every micro-step: %s. "
    "Use float32, bfloat16 or float16."
)


class AsksAboutReductions(Protocol):
    """The part of decisions.py that reductions ask."""

    def reduction_begins(self, reduce: ZeroPPReduceScatter) -> None:
        """Take note of a reduction that FSDP2 asks for."""

    def confirm_micro_step(self) -> None:
        """Make sure that all ranks run this backward pass, and take it for the same micro-step.

        Called before the host waits for a hop: a rank that runs another pass would make it wait for ever. On an accelerator
        no hop makes it wait.
        """

    def deliver(self) -> None:
        """Complete all gradients of the model."""


class ZeroPPReduceScatter(CommObject, ReduceScatter):
    """Reduces a unit's gradients in two hops, across nodes once per optimizer step.

    Args:
        unit: the unit it serves.
        run: what all units share.
        decisions: what the reductions of all units decide together, on all ranks.
        hops: the two hops; shared by all units.

    Attributes:
        pending: the gradients that wait for a result.
        withheld: what was reduced for parameters without a gradient on this rank.
    """

    def __init__(self, unit: Unit, run: Run, decisions: AsksAboutReductions, hops: TwoHopReduce) -> None:
        self.unit = unit
        self.hops = hops
        self.pending = PendingGradients(unit, decisions.deliver)
        self.withheld = WithheldGradients(unit)
        self._traffic = run.traffic
        self._warnings = run.warnings
        self._micro_steps = run.micro_steps
        self._pipeline = run.pipeline
        self._decisions = decisions
        self._behind = None if run.beside is None else run.beside.reductions
        if self._behind is not None:
            unit.reduce_behind(self.finish_behind)
        self._crossing: UnitReduction | None = None  # until FSDP2 calls ``finish_behind``
        self._fsdp2 = DefaultReduceScatter()
        self._forms = Forms(run.config)
        self._partial: Partial | None = None
        self._adds_zeros = True  # FSDP2, to ``.grad``, in the ``post_backward`` that runs
        self._num_under_way = 0  # reductions in the pipeline
        self._shown_output: torch.Tensor | None = None

    @names_unit
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce: output [S] <- op over ranks of input [W * S]; or zeros, where the result is added to ``.grad`` later."""
        self._begin()
        parts = self.unit.reduced_shards()
        missing = frozenset([one.param for one in parts if not one.has_gradient])
        self.withheld.is_complete = not missing
        if input_tensor.dtype not in FLOAT_DTYPES:
            return self._reduce_unquantized(output_tensor, input_tensor, group, op, async_op)
        # FSDP2 of torch 2.15 chooses its dtype from the gradients that there are. Where some are missing, other ranks may have
        # them, and reduce in another dtype. So that dtype is taken which all gradients together would have.
        dtype = self.unit.reduce_dtype if missing else input_tensor.dtype
        scale, divisor = scale_of(op, group.size()), self.unit.divisor_after_reduce(dtype)
        form = self._forms.of(parts, dtype, scale, divisor, quantizes=self._micro_steps.quantizes)
        # The parameters that train, their dtype, or what gradients are divided by changed between micro-steps. Sums of another
        # form cannot be added to, so they cross now. Ranks compared all of that when the forward pass began, so all do it.
        if self._partial is not None and not self._partial.form.adds_up_with(form):
            self._decisions.confirm_micro_step()
            self.deliver()
        full = self._widened(input_tensor, form, group.size())
        shows_output = self.unit.shows_reduced_output
        # A gradient hook or an all-reduce hook reads the output as soon as this call returns. Such a unit crosses
        # nodes at every micro-step and stays out of the pipeline, because zeros would be taken for its gradient.
        crosses = self._micro_steps.is_last_now or shows_output
        # FSDP2 runs an all-reduce hook, and adds the output to ``.grad``, on a stream of its own, and drops the output while
        # that stream may still read it. Kept until the unit's next reduction, its memory is not given to another reduction.
        # This line can go when torch 2.15, whose FSDP2 keeps it itself, is the oldest version.
        self._shown_output = output_tensor if shows_output else None
        reduction = UnitReduction(self, form, missing, crosses)
        if self._pipeline is not None and not shows_output:
            self._submit(reduction, full, self._pipeline)
            output_tensor.zero_()
        else:
            self._run(reduction, full, output_tensor, crosses)
        return None

    def _begin(self) -> None:
        self._crossing = None  # a pass that raised may have left one
        # The first reduction of a backward pass asks all ranks. The answer is waited for before any hop is.
        self._decisions.reduction_begins(self)
        if self._behind is not None:
            self._behind.make_room()

    def _run(self, reduction: UnitReduction, full: torch.Tensor, output: torch.Tensor, crosses: bool) -> None:
        if not devices.has_streams(full.device):
            self._decisions.confirm_micro_step()
        reduction.start(full)
        if not crosses:
            self.keep_sums(reduction)
            output.zero_()
            return
        self._adds_zeros = False
        self.send_sums(reduction)
        if self._behind is not None and not self.unit.shows_reduced_output:
            self._crossing = reduction
        else:
            self._finish_into(output, reduction)

    @names_unit
    def finish_behind(self, output: torch.Tensor) -> None:
        """Finish the cross hop, on FSDP2's stream for all-reduces, which runs behind its stream of reductions."""
        assert self._behind is not None
        reduction, self._crossing = self._crossing, None
        sent = () if reduction is None else (reduction.flight.received, *reduction.flight.sent)
        # FSDP2 goes on with the output on this stream, also where it is zeros, and drops it as soon as that is queued.
        self._behind.hold([output, *sent])
        if reduction is not None:
            self._finish_into(output, reduction)

    # Around FSDP2's post_backward.

    def before_post_backward(self) -> None:
        """FSDP2 is about to add to ``.grad``: give it plain tensors, and forget contributions to gradients that are gone."""
        self.pending.make_way(frozenset(one.param for one in self.unit.reduced_shards() if one.has_gradient))
        self._drop_unwanted()
        self.withheld.forget_unwanted()
        self._adds_zeros = True

    def after_post_backward(self) -> None:
        """FSDP2 has added zeros to ``.grad``: say that they are not the gradient."""
        if self._has_unfinished:
            self.pending.hold(adds_zeros=self._adds_zeros)
            self._empty_pending()
        else:
            self.pending.clear()

    def _empty_pending(self) -> None:
        # Results of reductions under way are added one by one. A partial is added when nobody may look at the gradients yet.
        if self._num_under_way == 0 and self._partial is not None:
            self.pending.empty()

    @property
    def owes(self) -> bool:
        """Whether a gradient that still exists lacks something that was reduced already."""
        # A backward pass that raised leaves reductions under way. If all gradients were dropped behind it, nobody wants
        # their results, and ranks need not meet for them before the next pass.
        if self._num_under_way > 0 and any(map(self.pending.waits, self.unit.params)):
            return True
        return self._partial is not None and any(
            self.pending.waits(column.param) for column in self._partial.form.columns
        )

    @property
    def _has_unfinished(self) -> bool:
        return self._partial is not None or self._num_under_way > 0

    @names_unit
    def deliver(self) -> None:
        """Run the cross hop for the partial, and complete the gradients. Collective over the cross group."""
        self.pending.release()
        self._drop_unwanted()
        partial, self._partial = self._partial, None
        if partial is not None:
            if partial.written is not None:
                torch.accelerator.current_stream().wait_event(partial.written)
            flight = self.hops.start_across(partial.sums, partial.form.layouts)
            self.add_to_grads(flight, partial.form, partial.others)
        if not self._has_unfinished:
            self.pending.clear()

    def discard(self) -> None:
        """Forget the micro-steps accumulated so far."""
        self._partial = None
        if not self._has_unfinished:
            self.pending.clear()

    # The stages of one reduction.

    def _submit(self, reduction: UnitReduction, full: torch.Tensor, pipeline: ReducePipeline) -> None:
        # The unit before this one leaves its node hop first: its wire buffers are then free for this one.
        pipeline.advance()
        reduction.start(full)
        self._num_under_way += 1
        pipeline.submit(reduction)

    def keep_sums(self, reduction: UnitReduction) -> None:
        """Finish the node hop of a micro-step that is not the last, and keep the node's sums."""
        others, earlier = self._others_of(reduction), None if self._partial is None else self._partial.sums
        sums = self.hops.accumulate(reduction.flight, reduction.form.layouts, earlier)
        self._partial = Partial(sums, reduction.form, others, record_event(sums.device))

    def send_sums(self, reduction: UnitReduction) -> None:
        """Finish the node hop of the last micro-step, and start the cross hop with all that was accumulated."""
        reduction.others = self._others_of(reduction)
        partial, self._partial = self._partial, None
        sums = None if partial is None else partial.sums
        reduction.flight = self.hops.cross_over(reduction.flight, reduction.form.layouts, sums)

    def _others_of(self, reduction: UnitReduction) -> frozenset[DTensor]:
        """Return the parameters without a gradient on this rank in the reduction, and in what was accumulated before it."""
        return reduction.others if self._partial is None else reduction.others & self._partial.others

    def add_to_grads(self, flight: Flight, form: Form, others: frozenset[DTensor]) -> None:
        """Finish the cross hop after FSDP2 took zeros for its output, and do what FSDP2 does with an output."""
        reduced = self._finish(flight, form)
        # FSDP2 divides its output after a reduction where it asked for sums. It divided zeros, and not this sum.
        self._add(form.divide(reduced), form, {column.param for column in form.columns}, others)

    def confirm_micro_step(self) -> None:
        """Make sure that all ranks run this backward pass, and take it for the same micro-step."""
        self._decisions.confirm_micro_step()

    def ended(self) -> None:
        """Note that a reduction has left the pipeline."""
        self._num_under_way -= 1
        self._empty_pending()

    # Sizes.

    def layouts(self, dtype: torch.dtype) -> ReduceLayouts:
        """Return the wire layouts for reducing the trainable parameters in ``dtype`` now."""
        shards = tuple(self.unit.param_shards(trainable_only=True))
        return self._forms.layouts(shards, dtype, quantizes=self._micro_steps.quantizes)

    def partial_bytes(self) -> int:
        """Return the bytes that this rank holds between micro-steps."""
        return 0 if self._partial is None else self._partial.sums.nbytes

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step of ``micro_steps`` backward passes."""
        if not self.unit.trainable:
            return {}
        dtype, node, cross = self.unit.reduce_dtype, self.hops.node_hop, self.hops.cross_hop
        if dtype not in FLOAT_DTYPES:  # FSDP2 reduces it
            output = sum(shard.padded_numel for shard in self.unit.param_shards(trainable_only=True)) * dtype.itemsize
            peers = Peers.of(self.unit.shard_group, self._traffic.ranks_per_node)
            return {FSDP2_REDUCE: peers.bytes_of(output).times(micro_steps)}
        layouts = self.layouts(dtype)
        # A hook that looks at the unit's gradients lets them cross at every micro-step.
        crossings = micro_steps if self.unit.shows_reduced_output else 1
        predicted = reduce_bytes(
            layouts, cross_hop=cross.peers, node_hop=node.peers, micro_steps=micro_steps, crossings=crossings
        )
        return predicted.by_name(cross_hop=cross.name, node_hop=node.name)

    def _widened(self, part: torch.Tensor, form: Form, world_size: int) -> torch.Tensor:
        """Return the flat gradient with zeros for the parameters that got no gradient in this micro-step.

        FSDP2 leaves those out. They may be others on other ranks, and then ranks would exchange pieces of different sizes.
        """
        dtype = form.layouts.node_hop.raw_dtype
        if part.numel() == world_size * form.layouts.node_hop.numel:
            return part.to(dtype)
        full = torch.zeros(world_size, form.layouts.node_hop.numel, dtype=dtype, device=part.device)
        start, slices = 0, part.view(world_size, -1)
        for column, reduced in zip(form.columns, self.unit.reduced_shards(), strict=True):
            if reduced.has_gradient:
                end = start + column.shard.padded_numel
                column.of(full).copy_(slices[:, start:end])
                start = end
        return full.view(-1)

    def _finish(self, flight: Flight, form: Form) -> torch.Tensor:
        layout = form.layouts.cross_hop
        reduced = torch.empty(layout.numel, dtype=layout.raw_dtype, device=flight.received.device)
        self.hops.finish(flight, form.layouts, reduced, form.scale)
        return reduced

    def _finish_into(self, output: torch.Tensor, reduction: UnitReduction) -> None:
        """Finish the cross hop. FSDP2 adds ``output`` to the gradients that it reduces; the others are added here."""
        form, flight = reduction.form, reduction.flight
        # FSDP2's output has room only for parameters with a gradient in this micro-step. Others may have a part in
        # the sum, from earlier micro-steps or other ranks, and FSDP2 will not add it.
        if output.numel() == form.layouts.cross_hop.numel and output.dtype == form.layouts.cross_hop.raw_dtype:
            self.hops.finish(flight, form.layouts, output, form.scale)
            return
        reduced, start = self._finish(flight, form), 0
        absent = set()
        for column, part in zip(form.columns, self.unit.reduced_shards(), strict=True):
            if part.has_gradient:
                output[start : start + column.shard.padded_numel].copy_(column.of(reduced))
                start += column.shard.padded_numel
            else:
                absent.add(column.param)
        self._add(form.divide(reduced), form, absent, reduction.others)

    def _add(self, reduced: torch.Tensor, form: Form, params: set[DTensor], others: frozenset[DTensor]) -> None:
        for column in form.columns:
            param = column.param
            if param not in params:
                continue
            # The slice is padded to equal lengths on all ranks; ``numel`` is the part that exists on this rank.
            result = column.of(reduced)[: column.shard.numel]
            if isinstance(param.grad, DTensor) and self.pending.waits(param):
                target = self.pending.plain_of(param)
                if target.device != result.device:
                    _wait_for_offloaded_gradients()
                target += result.view(target.shape).to(target)
            elif param in others:
                self.withheld.keep(param, result)
            # Otherwise the gradient was cleared since, and must not come back.

    def _drop_unwanted(self) -> None:
        """Take the contributions to gradients that were zeroed, set to None or replaced out of the partial."""
        if self._partial is None:
            return
        unwanted = [column for column in self._partial.form.columns if not self.pending.waits(column.param)]
        # After ``zero_grad`` nothing is wanted: dropping the partial frees its memory and saves the hop.
        if len(unwanted) == len(self._partial.form.columns):
            self._partial = None
            return
        slices = self._partial.sums.view(-1, self._partial.form.layouts.node_hop.numel)
        for column in unwanted:
            if column.param not in self._partial.others:
                column.of(slices).zero_()

    def _reduce_unquantized(
        self, output: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp, async_op: bool
    ) -> dist.Work | None:
        self._adds_zeros = False
        self._warnings.warn(NO_WIRE_FORM, [self.unit])
        peers = Peers.of(group, self._traffic.ranks_per_node)
        self._traffic.record(FSDP2_REDUCE, peers.bytes_of(output.nbytes))
        return self._fsdp2(output, full, group, op, async_op)


class UnitReduction:
    """One reduction of one unit, stage by stage.

    Args:
        comm: the unit's comm object.
        form: how its gradients travel.
        missing: the parameters without a gradient on this rank.
        crosses: whether the cross hop follows the node hop: on the last micro-step.
    """

    def __init__(self, comm: ZeroPPReduceScatter, form: Form, missing: frozenset[DTensor], crosses: bool) -> None:
        self.form = form
        self.others = missing  # and later, without those that got one in an earlier micro-step
        self.flight: Flight  # set by ``start``
        self.unit = comm.unit
        self._comm = comm
        self._crosses = crosses

    @property
    def has_node_hop(self) -> bool:
        """Whether anything moves within the node."""
        return self._comm.hops.node_hop.size > 1

    def start(self, full: torch.Tensor) -> None:
        """Start the node hop of the flat gradient [W * S]."""
        self.flight = self._comm.hops.start(full, self.form.layouts)

    @names_unit
    def leave_node(self) -> bool:
        """Finish the node hop. Return whether the cross hop was started."""
        is_crossing = False
        try:
            self._comm.confirm_micro_step()
            if self._crosses:
                self._comm.send_sums(self)
                is_crossing = True
            else:
                self._comm.keep_sums(self)
        finally:
            # One that raised has left the pipeline as well, and must not count as under way for ever.
            if not is_crossing:
                self._comm.ended()
        return is_crossing

    @names_unit
    def arrive(self) -> None:
        """Finish the cross hop and add the result to ``.grad``."""
        try:
            self._comm.add_to_grads(self.flight, self.form, self.others)
        finally:
            self._comm.ended()


def _wait_for_offloaded_gradients() -> None:
    # FSDP2 copies gradients to the CPU without waiting, and waits for them at the end of the backward pass itself. This
    # happens only with CPU offload, for units that took no part in the last micro-step.
    torch.accelerator.synchronize()
