"""The order in which a rank issues the tasks of one optimizer step: on gloo, and on accelerators.

On gloo there are no streams, and every collective that FSDP2 calls blocks the thread that computes. This package starts hops
early and finishes them late. When a forward pass begins, all stale units are encoded, and their cross hops are started. Each ends
when its unit is needed. The parts of reductions come one unit behind each other, as ``fsdp/gradients/drivers.py`` says.
gloo moves bytes in threads of its own, in the order in which hops were started. These threads take time of the processor.

On accelerators the order is that in which FSDP2's hooks give work to its streams. The names in brackets are those of
``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``:

- Forward. The host runs ahead, so the gather of unit i + 1 is issued right behind the computation of unit i. On the gather
  stream it waits until unit i - 1 was copied out [``wait_for_unshard``: ``prev_all_gather_state.event``].
- Backward. Before a unit computes, the next one's gather is issued [``_backward_prefetch``], behind the copy-out of this one.
- Reductions run on a stream of their own behind their unit's computation. One may be under way: the next unit copies its
  gradients once the last reduction has ended [``reduce_scatter_max_input_buffers``, 1 by default].
- HSDP's all-reduces follow on a third stream. The optimizer waits for everything [``finalize_backward``].

DeepSpeed prefetches no more than a bucket of ``stage3_prefetch_bucket_size`` elements, which is less than one block of a large
model. The gathers of such units come right before their computation (``UnitWork.prefetches``).

This package runs cross hops on streams beside those of node hops. Those of gathers have their own, and are called one unit ahead
[``GathersAhead.reach``]. Those of reductions run where HSDP's all-reduces do. With ``overlap=False`` both
hops run inside the gather or reduction that FSDP2 calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from hf_zeropp.estimate.simulation import WIRE, Program, Stage
from hf_zeropp.estimate.unit_work import UnitWork
from hf_zeropp.fsdp.gradients.drivers import MAX_CROSSING

MAIN, CROSS = "compute", "cross hops"
NODE = "node hops"
GATHER, REDUCE = "gathers", "reductions"
ALL_REDUCE = "all-reduces, or cross hops of reductions"


def step_program(
    units: Sequence[UnitWork], micro_steps: int, optimizer_s: float, *, is_gloo: bool, overlaps: bool = True
) -> Program:
    """Return the tasks of one optimizer step.

    Args:
        units: in the order of a forward pass.
        micro_steps: forward and backward passes.
        optimizer_s: seconds of the optimizer.
        is_gloo: whether collectives block.
        overlaps: on gloo, whether reductions run while other units compute (this package), or block (FSDP2).
    """
    order = _BlockingOrder(units, overlaps) if is_gloo else _StreamOrder(units)
    for micro_step in range(micro_steps):
        order.forward(is_first=micro_step == 0)
        order.backward(is_last=micro_step == micro_steps - 1)
    # The stream of the optimizer has waited for gloo's reductions. On accelerators they are on streams of their own.
    order.program.compute(MAIN, "optimizer", optimizer_s, "", after=order.reductions)
    return order.program


def token_program(units: Sequence[UnitWork], *, is_gloo: bool) -> Program:
    """Return the tasks of one generated token: a forward pass with fresh secondary shards."""
    order = _BlockingOrder(units, overlaps=False) if is_gloo else _StreamOrder(units)
    order.forward(is_first=False)
    return order.program


class _BlockingOrder:
    def __init__(self, units: Sequence[UnitWork], overlaps: bool) -> None:
        self._units = units
        self._overlaps = overlaps
        self.program = Program()
        self.reductions: list[int] = []

    def forward(self, *, is_first: bool) -> None:
        arrived = [self._start_ahead(unit) if is_first else None for unit in self._units]
        for unit, cross in zip(self._units, arrived, strict=True):
            stages = unit.gather_first[unit.ahead :] if is_first else unit.gather_forward
            self.program.add_all(MAIN, stages, unit.name, after=[cross])
            self.program.compute(MAIN, "forward", unit.forward_s, unit.name, after=[cross])

    def backward(self, *, is_last: bool) -> None:
        pipeline = _Pipeline(self.program)
        for unit in reversed(self._units):
            self.program.add_all(MAIN, unit.gather_backward, unit.name)
            self.program.compute(MAIN, "backward", unit.backward_s, unit.name)
            stages = (*unit.reduce_last, *unit.all_reduce_last) if is_last else unit.reduce
            if self._overlaps and stages:
                pipeline.run(unit.name, stages)
            else:
                self.program.add_all(MAIN, stages, unit.name)
        pipeline.drain()
        self.program.micro_step_ends.append(len(self.program.tasks) - 1)

    def _start_ahead(self, unit: UnitWork) -> int | None:
        """Encode a unit and start its cross hop, where that is done ahead."""
        last = None
        for stage in unit.gather_first[: unit.ahead]:
            last = self.program.add(CROSS if stage.kind == WIRE else MAIN, stage, unit.name, after=[last])
        return last


class _Pipeline:
    """Reductions under way, as ``GlooDriver`` moves them. Each is a generator that stops behind every hop that it starts."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._in_node: deque[Iterator[str]] = deque()
        self._crossing: deque[Iterator[str]] = deque()

    def run(self, unit: str, stages: Sequence[Stage]) -> None:
        """Begin a reduction, one unit ahead of the one before it."""
        self._leave_node()
        for _ in range(len(self._crossing) - MAX_CROSSING):
            self._take_on(self._crossing.popleft())
        self._take_on(self._reduction(unit, stages))

    def drain(self) -> None:
        """Finish all reductions."""
        self._leave_node()
        while self._crossing:
            self._take_on(self._crossing.popleft())

    def _leave_node(self) -> None:
        while self._in_node:
            self._take_on(self._in_node.popleft())

    def _take_on(self, reduction: Iterator[str]) -> None:
        if stream := next(reduction, None):
            (self._crossing if stream == CROSS else self._in_node).append(reduction)

    def _reduction(self, unit: str, stages: Sequence[Stage]) -> Iterator[str]:
        """Run kernels, each behind the hop before it, and start hops. Yield the stream of each hop."""
        hop: int | None = None
        for stage in stages:
            if stage.kind == WIRE:
                stream = NODE if hop is None and not stage.traffic.cross_node else CROSS
                hop = self._program.add(stream, stage, unit, after=[len(self._program.tasks) - 1])
                yield stream
            else:
                self._program.add(MAIN, stage, unit, after=[hop])


class _StreamOrder:
    def __init__(self, units: Sequence[UnitWork]) -> None:
        self._units = units
        self._due = [unit for unit in units if unit.ahead]
        self.program = Program()
        self.reductions: list[int] = []

    def forward(self, *, is_first: bool) -> None:
        copied: list[int | None] = [None, None]  # when the last two units were copied out
        crossed: list[int | None] = []  # when the units that are due were brought up to date
        gathered: int | None = None
        num_reached = 0
        for unit in self._units:
            waits, stages = [copied[-2]], unit.gather_forward
            if is_first:
                if unit.ahead:
                    num_reached += 1
                    crossed += [self._cross(due, gathered) for due in self._due[len(crossed) : num_reached + 1]]
                    waits.append(crossed[num_reached - 1])
                stages = unit.gather_first[unit.ahead :]
            gathered = self.program.add_all(_stream(unit), stages, unit.name, after=waits)
            copied.append(self._copy_out(unit, gathered))
            # Without a copy the computation itself says that the stream has come this far.
            done = self.program.compute(MAIN, "forward", unit.forward_s, unit.name, after=[gathered])
            copied[-1] = done if copied[-1] is None else copied[-1]

    def backward(self, *, is_last: bool) -> None:
        units = list(reversed(self._units))
        gathered: int | None = None
        reduced: int | None = None
        done = 0
        for index, unit in enumerate(units):
            if index == 0 or not unit.prefetches:
                gathered = self._gather_again(unit)
            copied = self._copy_out(unit, gathered)
            own, gathered = gathered, None
            if index + 1 < len(units) and units[index + 1].prefetches:
                gathered = self._gather_again(units[index + 1], copied)
            done = self.program.compute(MAIN, "backward", unit.backward_s, unit.name, after=[own])
            if stages := unit.reduce_last if is_last else unit.reduce:
                reduced = self._reduce(unit, stages, done, reduced, is_last)
        self.program.micro_step_ends.append(done)

    def _cross(self, unit: UnitWork, gathered: int | None) -> int | None:
        return self.program.add_all(CROSS, unit.gather_first[: unit.ahead], unit.name, after=[gathered])

    def _gather_again(self, unit: UnitWork, copied: int | None = None) -> int | None:
        return self.program.add_all(_stream(unit), unit.gather_backward, unit.name, after=[copied])

    def _copy_out(self, unit: UnitWork, gathered: int | None) -> int | None:
        return None if gathered is None else self.program.add_all(MAIN, unit.copies, unit.name, after=[gathered])

    def _reduce(self, unit: UnitWork, stages: Sequence, done: int, last: int | None, is_last: bool) -> int | None:
        # The first stage copies gradients into the flat buffer. It waits for the last reduction on the compute stream,
        # and so does all computation that follows it.
        copy, *rest = stages
        copied = self.program.add(MAIN, copy, unit.name, after=[done, last])
        reduced = self.program.add_all(REDUCE, rest, unit.name, after=[copied])
        ended = copied if reduced is None else reduced
        self.reductions.append(ended)
        if is_last and unit.all_reduce_last:
            across = self.program.add_all(ALL_REDUCE, unit.all_reduce_last, unit.name, after=[ended])
            assert across is not None
            self.reductions.append(across)
        return ended


def _stream(unit: UnitWork) -> str:
    """Return the stream of a unit's gathers."""
    return GATHER if unit.prefetches else MAIN
