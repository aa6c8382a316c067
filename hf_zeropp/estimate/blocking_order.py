"""One optimizer step on CPU: gloo has no streams, and every collective that FSDP2 calls blocks the thread that computes.

This package starts hops early and finishes them late (``fsdp/overlap.py``):

- When a forward pass begins, all stale units are encoded, and their cross hops are started. Each ends when its unit is needed.
- A unit's reduction has three stages, each one unit behind the one before it: encode and start the node hop; sum, encode and
  start the cross hop; finish. At most ``MAX_CROSSING`` cross hops are under way when the next reduction starts. With one rank per
  node there is no node hop, and the cross hop starts at once.

gloo moves bytes in threads of its own, in the order in which hops were started. These threads take time of the processor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hf_zeropp.estimate.program import Program
from hf_zeropp.estimate.stages import WIRE, Stage
from hf_zeropp.estimate.unit_work import UnitWork
from hf_zeropp.fsdp.overlap import MAX_CROSSING

MAIN, CROSS, NODE = "compute", "cross hops", "node hops"


def blocking_step(units: Sequence[UnitWork], micro_steps: int, optimizer_s: float, *, overlaps: bool) -> Program:
    """Return the tasks of one optimizer step.

    Args:
        units: in the order of a forward pass.
        micro_steps: forward and backward passes.
        optimizer_s: seconds of the optimizer.
        overlaps: whether reductions run while other units compute (this package), or block (FSDP2).
    """
    order = _BlockingOrder(units, overlaps)
    for micro_step in range(micro_steps):
        order.forward(is_first=micro_step == 0)
        order.backward(is_last=micro_step == micro_steps - 1)
    order.program.compute(MAIN, "optimizer", optimizer_s, "")
    return order.program


def blocking_tokens(units: Sequence[UnitWork]) -> Program:
    """Return the tasks of one generated token: a forward pass with fresh secondary shards."""
    order = _BlockingOrder(units, overlaps=False)
    order.forward(is_first=False)
    return order.program


class _BlockingOrder:
    def __init__(self, units: Sequence[UnitWork], overlaps: bool) -> None:
        self._units = units
        self._overlaps = overlaps
        self.program = Program()

    def forward(self, *, is_first: bool) -> None:
        arrived = [self._start_ahead(unit) if is_first else None for unit in self._units]
        for unit, cross in zip(self._units, arrived, strict=True):
            stages = unit.gather_first[unit.ahead :] if is_first else unit.gather_forward
            for stage in stages:
                self.program.add(MAIN, stage, unit.name, after=[cross])
            self.program.compute(MAIN, "forward", unit.forward_s, unit.name, after=[cross])

    def backward(self, *, is_last: bool) -> None:
        pipeline = _Pipeline(self.program)
        for unit in reversed(self._units):
            self.program.add_all(MAIN, unit.gather_backward, unit.name)
            self.program.compute(MAIN, "backward", unit.backward_s, unit.name)
            stages = (*unit.reduce_last, *unit.all_reduce_last) if is_last else unit.reduce
            if self._overlaps and stages:
                pipeline.advance()
                pipeline.submit(unit.name, stages)
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
    """Reductions under way, as ``ReducePipeline`` moves them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._in_node: deque[tuple[str, list[Stage], int | None]] = deque()
        self._crossing: deque[tuple[str, list[Stage], int | None]] = deque()

    def advance(self) -> None:
        self._leave_node()
        while len(self._crossing) > MAX_CROSSING:
            self._arrive()

    def submit(self, unit: str, stages: Sequence[Stage]) -> None:
        hops = [stage for stage in stages if stage.kind == WIRE]
        if hops and hops[0].traffic.cross_node:
            self._crossing.append((unit, *self._run(unit, list(stages), None, CROSS)))
        else:
            self._in_node.append((unit, *self._run(unit, list(stages), None, NODE)))

    def drain(self) -> None:
        self._leave_node()
        while self._crossing:
            self._arrive()

    def _leave_node(self) -> None:
        while self._in_node:
            unit, stages, hop = self._in_node.popleft()
            left, crossing = self._run(unit, stages, hop, CROSS)
            if crossing is not None:
                self._crossing.append((unit, left, crossing))

    def _arrive(self) -> None:
        unit, stages, hop = self._crossing.popleft()
        self._run(unit, stages, hop, CROSS)

    def _run(self, unit: str, stages: list[Stage], hop: int | None, stream: str) -> tuple[list[Stage], int | None]:
        """Run kernels up to the next hop and start that on its stream. Return the stages behind it, and the hop."""
        while stages:
            stage, *stages = stages
            if stage.kind == WIRE:
                return stages, self._program.add(stream, stage, unit, after=[len(self._program.tasks) - 1])
            self._program.add(MAIN, stage, unit, after=[hop])
        return [], None
