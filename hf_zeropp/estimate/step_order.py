"""The order in which a rank issues the tasks of one optimizer step: where collectives block, and where they run on streams.

Under gloo every collective that FSDP2 calls blocks the thread that computes, so all tasks are on one stream.

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

This package runs cross hops on streams beside those of node hops. Those of gathers have their own, and start with the forward
pass; those of reductions run where HSDP's all-reduces do. On gloo it starts hops early and finishes them late, which comes to the
same: the processor is shared then, and not a stream. With ``overlap=False`` all cross hops of gathers run when the forward pass
begins, before the model computes, and both hops of a reduction run inside the reduction that FSDP2 calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_zeropp.estimate.simulation import COMPUTE, PROCESSOR, Stage, Task
from hf_zeropp.estimate.unit_work import UnitWork

MAIN, CROSS = "compute", "cross hops"
GATHER, REDUCE = "gathers", "reductions"
ALL_REDUCE = "all-reduces, or cross hops of reductions"


def step_tasks(units: Sequence[UnitWork], micro_steps: int, optimizer_s: float, *, blocks: bool) -> list[Task]:
    """Return the tasks of one optimizer step, in the order in which a rank issues them.

    Args:
        units: in the order of a forward pass.
        micro_steps: forward and backward passes.
        optimizer_s: seconds of the optimizer.
        blocks: whether every collective blocks the computation.
    """
    order = _Order(units)
    for micro_step in range(micro_steps):
        order.forward(is_first=micro_step == 0)
        order.backward(is_last=micro_step == micro_steps - 1)
    order.compute("optimizer", optimizer_s, "", after=order.reductions)
    return [task._replace(stream=MAIN) for task in order.tasks] if blocks else order.tasks


class _Order:
    """Tasks that are added to streams. None stands for no task, of what a task waits for."""

    def __init__(self, units: Sequence[UnitWork]) -> None:
        self._units = units
        self.tasks: list[Task] = []
        self.reductions: list[int | None] = []

    def add(self, stream: str, stages: Iterable[Stage], unit: str, after: Iterable[int | None] = ()) -> int | None:
        """Add stages of a unit to a stream, the first behind ``after``, and return the index of the last; None without any."""
        last = None
        for stage in stages:
            waits = () if last is not None else tuple({index for index in after if index is not None})
            self.tasks.append(Task(stage, stream, waits, unit))
            last = len(self.tasks) - 1
        return last

    def compute(self, name: str, seconds: float, unit: str, after: Iterable[int | None] = ()) -> int | None:
        """Add a part of the model, and return its index."""
        return self.add(MAIN, [Stage(name, COMPUTE, ((PROCESSOR, seconds),))], unit, after)

    def forward(self, *, is_first: bool) -> None:
        """Add the forward pass of a micro-step."""
        copied: list[int | None] = [None, None]  # when the last two units were copied out
        ahead = [unit.ahead if is_first else 0 for unit in self._units]
        crossed = [
            self.add(CROSS if unit.overlaps else MAIN, unit.gather_first[:number], unit.name)
            for unit, number in zip(self._units, ahead, strict=True)
        ]
        for unit, number, cross in zip(self._units, ahead, crossed, strict=True):
            stages = unit.gather_first[number:] if is_first else unit.gather_forward
            gathered = self.add(_stream(unit), stages, unit.name, after=[copied[-2], cross])
            copied.append(self._copy_out(unit, gathered))
            # Without a copy the computation itself says that the stream has come this far.
            done = self.compute("forward", unit.forward_s, unit.name, after=[gathered, cross])
            copied[-1] = done if copied[-1] is None else copied[-1]

    def backward(self, *, is_last: bool) -> None:
        """Add the backward pass of a micro-step, with its reductions."""
        units = list(reversed(self._units))
        gathered: int | None = None
        reduced: int | None = None
        for unit, following in zip(units, [*units[1:], None], strict=True):
            if unit is units[0] or not unit.prefetches:
                gathered = self._gather_again(unit)
            copied = self._copy_out(unit, gathered)
            own, gathered = gathered, None
            if following is not None and following.prefetches:
                gathered = self._gather_again(following, copied)
            done = self.compute("backward", unit.backward_s, unit.name, after=[own])
            if stages := unit.reduce_last if is_last else unit.reduce:
                # The first stage copies gradients into the flat buffer. It waits for the last reduction on the compute
                # stream, and so does all computation that follows it.
                copy = self.add(MAIN, stages[:1], unit.name, after=[done, reduced])
                reduced = self.add(REDUCE, stages[1:], unit.name, after=[copy]) or copy
                across = unit.all_reduce_last if is_last else ()
                self.reductions += [reduced, self.add(ALL_REDUCE, across, unit.name, after=[reduced])]

    def _gather_again(self, unit: UnitWork, copied: int | None = None) -> int | None:
        return self.add(_stream(unit), unit.gather_backward, unit.name, after=[copied])

    def _copy_out(self, unit: UnitWork, gathered: int | None) -> int | None:
        return None if gathered is None else self.add(MAIN, unit.copies, unit.name, after=[gathered])


def _stream(unit: UnitWork) -> str:
    """Return the stream of a unit's gathers."""
    return GATHER if unit.prefetches else MAIN
