"""qgZ for FSDP2: the reduction of one unit's gradients, from FSDP2's call to ``.grad``.

``ZeroPPReduceScatter._reduce`` is a reduction from top to bottom. It stops where a hop is under way, and drivers.py says for how
long. See also [Note: gradient accumulation] below.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.two_hops import ReduceLayouts, TwoHopReduce
from hf_zeropp.devices import current_stream, in_turn_with
from hf_zeropp.dtensors import local_tensor_of
from hf_zeropp.fsdp.comm_objects import CommObject, naming
from hf_zeropp.fsdp.gradients.drivers import BLOCKING, StreamDriver, UnderWay
from hf_zeropp.fsdp.gradients.pending import PendingGradients
from hf_zeropp.fsdp.gradients.unit_gradients import DefaultReduceScatter, ReducedShard, ReduceScatter
from hf_zeropp.fsdp.layouts import reduce_layouts
from hf_zeropp.fsdp.model_run import ModelRun
from hf_zeropp.fsdp.param_shard import ParamShard
from hf_zeropp.fsdp.predictions import reduce_bytes, reductions_per_step
from hf_zeropp.fsdp.units import Unit
from hf_zeropp.ops.format import FLOAT_DTYPES
from hf_zeropp.traffic import FSDP2_REDUCE, REDUCE_REPLICAS, Bytes, Peers

# [Note: gradient accumulation]
# On every micro-step but the last only the node hop runs. Its sums are added to a *partial*, 1/N of the unit in fp32 (or in
# bf16, ``qgz_accumulator``), and FSDP2 receives zeros. The last micro-step adds its own sums and runs the cross hop. So
# accumulation costs no cross-node bytes and no gradient of full size. Where gradients stay on the rank (``qgz_accumulate``)
# FSDP2 keeps them at full size until the last micro-step, as under ``no_sync``, and calls no reduction before.
#
# A partial is a debt: ``.grad`` is not what it seems until the cross hop has run. Three things settle it, whichever comes
# first: the last micro-step; the end of a last backward pass in which the unit took no part (a skipped layer); and an optimizer's
# step or ``handle.deliver()`` (gradient_decisions.py), should the last micro-step never come. Until then ``.grad`` is pending
# (pending.py).

NO_WIRE_FORM = (
    "These units reduce gradients in a dtype without a wire form, so FSDP2 reduces them, across nodes at every micro-step: %s. "
    "Use float32, bfloat16 or float16."
)


# Which parameters train may change between steps. Forms are made anew then, and their layouts are found here.
_cached_layouts = functools.lru_cache(maxsize=4096)(reduce_layouts)


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """How a unit's gradients travel in one reduction.

    Attributes:
        layouts: the wire layouts of both hops.
        parts: the parameters in a slice, in order.
        scale: the factor that the reduction applies to the sum over ranks.
        divisor: by what FSDP2 divides its output after the reduction.
    """

    layouts: ReduceLayouts
    parts: tuple[ReducedShard, ...]
    scale: float
    divisor: float

    def adds_up_with(self, other: Form) -> bool:
        """Return whether sums of both forms are sums of the same things."""
        if self is other:
            return True
        has_same_params = [id(one.param) for one in self.parts] == [id(one.param) for one in other.parts]
        own, others = (self.layouts, self.scale, self.divisor), (other.layouts, other.scale, other.divisor)
        return has_same_params and own == others


@dataclasses.dataclass
class Partial:
    """Gradients of earlier micro-steps, summed within the node.

    Attributes:
        sums: fp32 [Y, S]; bf16 with ``qgz_accumulator="bfloat16"``.
        form: how they travel.
        stream: FSDP2's reduce-scatter stream, which wrote them and gets their memory back. The next reduction runs there too, and
            a delivery for an optimizer's step on another one. None on CPU.
    """

    sums: torch.Tensor
    form: Form
    stream: torch.Stream | None


class AsksAboutReductions(Protocol):
    """The part of gradient_decisions.py that reductions ask."""

    def reduction_begins(self, reduce: ZeroPPReduceScatter) -> None:
        """Take note of a reduction that FSDP2 asks for."""

    def confirm_micro_step(self) -> None:
        """Make sure that all ranks run this backward pass, and take it for the same micro-step."""


class ZeroPPReduceScatter(CommObject, ReduceScatter):
    """Reduces a unit's gradients in two hops, across nodes once per optimizer step.

    Args:
        unit: the unit it serves.
        run: what all units share.
        decisions: what the reductions of all units decide together, on all ranks.
        hops: the two hops; shared by all units.

    Attributes:
        pending: the gradients that wait for a result.
    """

    def __init__(self, unit: Unit, run: ModelRun, decisions: AsksAboutReductions, hops: TwoHopReduce) -> None:
        self.unit = unit
        self.hops = hops
        self.pending = PendingGradients()
        self._run = run
        self._decisions = decisions
        if isinstance(run.driver, StreamDriver):
            unit.gradients.reduce_behind(functools.partial(self._run_rest, run.driver))
        self._fsdp2 = DefaultReduceScatter()
        self._form: Form | None = None  # of the reduction before; kept as long as nothing of it changes
        self._form_key: tuple[object, ...] = ()
        self._partial: Partial | None = None
        self._num_late = 0  # reductions under way whose output was zeros
        self._shown_output: torch.Tensor | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce: output [S] <- op over ranks of input [W * S]; or zeros, where the result is added to ``.grad`` later."""
        # The first reduction of a backward pass asks all ranks. The host waits for their answer before it waits for a hop.
        self._decisions.reduction_begins(self)
        self._run.driver.make_room()
        parts = self.unit.gradients.reduced_shards()
        if input_tensor.dtype not in FLOAT_DTYPES:
            return self._reduce_by_fsdp2(output_tensor, input_tensor, group, op, async_op)
        dtype = input_tensor.dtype
        scale, divisor = scale_of(op, group.size()), self.unit.gradients.divisor_after_reduce(dtype)
        # FSDP2 asks for the mean over a shard group, unless the user has set by what gradients are divided in all.
        if self.unit.gradients.divide_factor is None:
            scale /= self.hops.num_replicas
        form = self._form_of(parts, dtype, scale, divisor)
        # The parameters that train, their dtype, or what gradients are divided by changed between micro-steps. Sums of another
        # form cannot be added to, so they cross now. Ranks compared all of that when the forward pass began, so all do it.
        if self._partial is not None and not self._partial.form.adds_up_with(form):
            self._decisions.confirm_micro_step()
            self.deliver()
        # A gradient hook or an all-reduce hook reads the output as soon as this call returns. Such a unit crosses
        # nodes at every micro-step and is not late, because zeros would be taken for its gradient.
        shows_output = self.unit.gradients.are_looked_at
        driver = BLOCKING if shows_output else self._run.driver
        crosses = self._run.micro_steps.is_last_now or shows_output
        # ``_run_rest`` holds the output until FSDP2 has used it. An all-reduce hook of the user's runs in place of it: then the
        # output is kept here until the unit's next reduction. Since torch 2.15 FSDP2 keeps it itself.
        self._shown_output = output_tensor if self.unit.gradients.have_all_reduce_hook else None
        output = None if driver.is_late or not crosses else output_tensor
        if output is None:
            output_tensor.zero_()
        driver.run(self._reduce(input_tensor, form, crosses, output))
        self.pending.make_way((part.param for part in parts), for_zeros=output is None)
        return None

    def _run_rest(self, driver: StreamDriver, output: torch.Tensor) -> None:
        """Run the rest of the reduction of ``output``, on FSDP2's stream for all-reduces."""
        # FSDP2 adds the output to a gradient that exists on this stream, and a gradient hook may free both.
        grads = [param.grad for param in self.unit.trainable] if self.unit.gradients.are_looked_at else []
        driver.run_rest([output, *(local_tensor_of(grad) for grad in grads if isinstance(grad, DTensor))])

    def _form_of(self, parts: tuple[ReducedShard, ...], dtype: torch.dtype, scale: float, divisor: float) -> Form:
        """Return the form of a reduction in ``dtype`` of ``parts``: the sum over ranks, times ``scale``, over ``divisor``."""
        key = (dtype, scale, divisor, self._run.micro_steps.quantizes)
        if self._form is None or self._form.parts is not parts or self._form_key != key:
            self._form = Form(self._layouts(tuple(part.shard for part in parts), dtype), parts, scale, divisor)
            self._form_key = key
        return self._form

    def _reduce(
        self,
        flat: torch.Tensor,
        form: Form,
        crosses: bool,
        output: torch.Tensor | None,
    ) -> Generator[UnderWay]:
        """One reduction, from the flat gradient to ``.grad``. It stops where a hop is under way.

        A suspended generator keeps its variables. So each is deleted as soon as its memory is no longer needed.

        Args:
            flat: this rank's gradients of all slices [W * S].
            form: how they travel.
            crosses: whether the cross hop follows the node hop: on the last micro-step.
            output: FSDP2's output, which it adds to ``.grad``; None where it was given zeros.
        """
        hops, layouts = self.hops, form.layouts
        with self._under_way(is_late=output is None):
            # Encode, and send every rank of the node its part.
            flight = hops.start_node_hop(flat, layouts)
            del flat
            if hops.has_node_hop:
                yield UnderWay(flight, crosses=False)

            # Sum over the node, and over the micro-steps before this one. Until the last one the sums stay here.
            sums = None if self._partial is None else self._partial.sums
            if not crosses:
                sums = hops.accumulate(flight, layouts, sums)
                self._partial = Partial(sums, form, current_stream(sums.device))
                return

            # Encode the sums, and send every node its part.
            self._partial = None
            flight = hops.start_cross_hop(layouts, sums, flight)
            del sums
            yield UnderWay(flight, crosses=True)
            for index in range(len(hops.hops_of_replicas(layouts))):
                flight = hops.start_replica_hop(index, flight, layouts)
                yield UnderWay(flight, crosses=True)

            # Sum over nodes, and bring the result into ``.grad``.
            self._finish(flight, form, output)

    def _finish(self, flight: Flight, form: Form, output: torch.Tensor | None = None) -> None:
        """Finish the cross hop, and bring the sum over nodes into ``.grad``, which sums enter here and nowhere else.

        FSDP2 divides its output, if it asked for sums, and adds it to ``.grad``. Where FSDP2 was given zeros, this does the same.

        Args:
            flight: the cross hop.
            form: how the gradients travel.
            output: FSDP2's output; None where it was given zeros.
        """
        layout = form.layouts.cross_hop
        if output is not None:
            self.hops.finish(flight, form.layouts, output, form.scale)
            return
        # ``handle.deliver`` may be called in inference mode, and training adds to the gradient later.
        with torch.inference_mode(False):
            reduced = torch.empty(layout.numel, dtype=layout.raw_dtype, device=flight.received.device)
        self.hops.finish(flight, form.layouts, reduced, form.scale)
        if form.divisor != 1:
            reduced.div_(form.divisor)
        for part in form.parts:
            if self.pending.waits(part.param):  # otherwise the gradient was cleared since, and must not come back
                # The slice is padded to equal lengths on all ranks; ``numel`` is the part that exists on this rank.
                self.pending.add(part.param, part.of(reduced)[: part.shard.numel])

    @contextmanager
    def _under_way(self, *, is_late: bool) -> Iterator[None]:
        """Name the unit where a hop fails, and count a reduction whose output was zeros until it has ended or raised."""
        self._num_late += is_late
        try:
            with naming(self.unit):
                yield
        finally:
            self._num_late -= is_late

    def _reduce_by_fsdp2(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool,
    ) -> dist.Work | None:
        self.pending.make_way((part.param for part in self.unit.gradients.reduced_shards()), for_zeros=False)
        self._run.warn(NO_WIRE_FORM, [self.unit])
        peers = Peers.of(group, self._run.traffic.ranks_per_node)
        self._run.traffic.record(FSDP2_REDUCE, peers.bytes_of(output.nbytes))
        work = self._fsdp2(output, flat, group, op, async_op)
        if self.hops.replicas is None:
            return work
        # FSDP2 knows the shard group alone (``UnitGradients.take_over_replicas``), and averages over no replicas.
        if work is not None:
            work.wait()
        with naming(self.unit):
            self.hops.replicas.all_reduce(output).land(self.hops.buffers)
        if self.unit.gradients.divide_factor is None:
            output.div_(self.hops.num_replicas)
        return None

    # Around FSDP2's post_backward.

    def after_post_backward(self) -> None:
        """FSDP2 has added its output to ``.grad``: where something is missing in it, let ``.grad`` say so."""
        self.pending.close()
        self._clear_if_settled()

    @property
    def owes(self) -> bool:
        """Whether a gradient that still exists lacks something that was reduced already."""
        # A backward pass that raised leaves reductions under way. If all gradients were dropped since, their
        # results are not wanted, and ranks need not meet for them before the next pass.
        if self._num_late > 0 and any(map(self.pending.waits, self.unit.params)):
            return True
        return self._partial is not None and any(self.pending.waits(part.param) for part in self._partial.form.parts)

    def _clear_if_settled(self) -> None:
        if self._partial is None and self._num_late == 0:
            self.pending.clear()

    def deliver(self) -> None:
        """Run the cross hop for the partial, if there is one, and complete the gradients. Collective over the cross group."""
        with naming(self.unit), in_turn_with(None if self._partial is None else self._partial.stream):
            self.drop_unwanted()
            partial, self._partial = self._partial, None
            if partial is not None:
                flight = self.hops.start_cross_hop(partial.form.layouts, partial.sums)
                for index in range(len(self.hops.hops_of_replicas(partial.form.layouts))):
                    flight = self.hops.start_replica_hop(index, flight, partial.form.layouts)
                self._finish(flight, partial.form)
        self._clear_if_settled()

    def discard(self) -> None:
        """Forget the micro-steps accumulated so far."""
        self._partial = None
        if self._run.config.accumulates_on_rank:
            self.unit.gradients.drop_unreduced()
        self._clear_if_settled()

    def drop_unwanted(self) -> None:
        """Take the contributions to gradients that were zeroed, set to None or replaced out of the partial."""
        if self._partial is None:
            return
        form = self._partial.form
        unwanted = [part for part in form.parts if not self.pending.waits(part.param)]
        # After ``zero_grad`` nothing is wanted: dropping the partial frees its memory and saves the hop.
        if len(unwanted) == len(form.parts):
            self._partial = None
            return
        slices = self._partial.sums.view(-1, form.layouts.node_hop.numel)
        for part in unwanted:
            part.of(slices).zero_()

    # Sizes.

    def _layouts(self, shards: tuple[ParamShard, ...], dtype: torch.dtype) -> ReduceLayouts:
        """Return the wire layouts for reducing ``shards`` in ``dtype`` now."""
        return _cached_layouts(self._run.config, shards, dtype, quantizes=self._run.micro_steps.quantizes)

    def partial_bytes(self) -> int:
        """Return the bytes that this rank holds between micro-steps."""
        return 0 if self._partial is None else self._partial.sums.nbytes

    def predict(self, micro_steps: int) -> dict[str, Bytes]:
        """Return the bytes of one optimizer step of ``micro_steps`` backward passes."""
        if not self.unit.trains:
            return {}
        micro_steps = reductions_per_step(micro_steps, accumulates_on_rank=self._run.config.accumulates_on_rank)
        dtype, node, cross = self.unit.gradients.dtype, self.hops.node_hop, self.hops.cross_hop
        shards = tuple(self.unit.gradients.param_shards())
        if dtype not in FLOAT_DTYPES:  # FSDP2 reduces it
            output = sum(shard.padded_numel for shard in shards) * dtype.itemsize
            peers = Peers.of(self.unit.shard_group, self._run.traffic.ranks_per_node)
            own = {FSDP2_REDUCE: peers.bytes_of(output).times(micro_steps)}
            if (replicas := self.hops.replicas) is None:
                return own
            return own | {REDUCE_REPLICAS: replicas.peers.bytes_in_all_reduce(output).times(micro_steps)}
        layouts = self._layouts(shards, dtype)
        # A hook that looks at the unit's gradients lets them cross at every micro-step.
        crossings = micro_steps if self.unit.gradients.are_looked_at else 1
        rounds, replicas = [hop.peers for hop in self.hops.replica_hops], self.hops.replicas
        predicted = reduce_bytes(
            layouts,
            cross_hop=cross.peers,
            node_hop=node.peers,
            micro_steps=micro_steps,
            crossings=crossings,
            replica_hops=layouts.replica_bytes(rounds, None if replicas is None else replicas.peers),
        )
        return predicted.by_name(cross_hop=cross.name, node_hop=node.name)


def scale_of(op: ReduceOp | ReduceOp.RedOpType, world_size: int) -> float:
    """Return the factor that a reduce op applies to the sum over ranks.

    Raises:
        ValueError: the op is neither a sum, nor a mean, nor a pre-multiplied sum.
    """
    # A ReduceOp carries the factor of a pre-multiplied sum where only its pickled state shows it.
    # (`type`, not `isinstance`: ReduceOp claims its own enum members as instances.)
    state: Any = cast(Any, op).__getstate__() if type(op) is ReduceOp else (op, None)
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
