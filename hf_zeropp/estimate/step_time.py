"""Predict the seconds of one optimizer step: its tasks in the order in which a rank issues them are simulated.

The order says where collectives block, and where they run on streams.

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

import dataclasses
from collections.abc import Iterable, Sequence

from hf_zeropp.estimate.exchanges import MASTER_BYTES
from hf_zeropp.estimate.model_shape import slice_numel
from hf_zeropp.estimate.simulation import NETWORK, PROCESSOR, Stage, Task, simulate
from hf_zeropp.estimate.training_job import Job
from hf_zeropp.estimate.unit_work import Method, UnitWork, work_of_method, work_of_package

MAIN, CROSS = "compute", "cross hops"
GATHER, REDUCE = "gathers", "reductions"
ALL_REDUCE = "all-reduces, or cross hops of reductions"

SIMULATED_MICRO_STEPS = 3
"""Micro-steps that are simulated, at most: the first, the last, and one for all that lie between them and are alike."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The prediction of one optimizer step.

    Attributes:
        step_s: seconds.
        compute_s: seconds in which a rank computes the model and the optimizer.
        network_s: seconds for which the bytes alone keep the network busy.
    """

    step_s: float
    compute_s: float
    network_s: float

    @property
    def exposed(self) -> float:
        """The share of the step in which a rank does not compute: waiting, encoding, decoding and copying."""
        return max(0.0, 1 - self.compute_s / self.step_s)

    def tokens_per_s(self, job: Job) -> float:
        """Return tokens per second of all ranks."""
        return job.tokens * job.setup.micro_steps * job.cluster.world_size / self.step_s

    def mfu(self, job: Job) -> float:
        """Return the operations of the model over those that the device could have made at its peak."""
        return job.model_flops / (self.step_s * job.cluster.device.peak_flops)


def step_time(job: Job, method: Method | None) -> StepTime:
    """Return the prediction of one method.

    Args:
        job: the settings of its setup are read for this package alone.
        method: one beside this package; None for this package.
    """
    micro_steps = job.setup.micro_steps
    few = _simulated(job, method, min(micro_steps, SIMULATED_MICRO_STEPS))
    if micro_steps <= SIMULATED_MICRO_STEPS:
        return few
    fewer = _simulated(job, method, SIMULATED_MICRO_STEPS - 1)
    # All micro-steps between the first and the last are alike, so each adds what one of them adds.
    left = micro_steps - SIMULATED_MICRO_STEPS
    pairs = zip(dataclasses.astuple(few), dataclasses.astuple(fewer), strict=True)
    return StepTime(*(three + left * (three - two) for three, two in pairs))


def tasks_of(job: Job, method: Method | None, micro_steps: int) -> list[Task]:
    """Return the tasks of so many micro-steps of an optimizer step; ``method`` is as in ``step_time``."""
    units = work_of_package(job) if method is None else work_of_method(job, method)
    overlaps = method is None and job.setup.config.overlap and job.setup.world_size > job.setup.group_size
    return step_tasks(units, micro_steps, _optimizer_s(job, method), blocks=job.setup.on_cpu and not overlaps)


def _simulated(job: Job, method: Method | None, micro_steps: int) -> StepTime:
    tasks = tasks_of(job, method, micro_steps)
    stages = [task.stage for task in tasks]
    compute = sum(stage.work_s for stage in stages if stage.computes)
    network = sum(seconds for stage in stages for name, seconds in stage.demands if name == NETWORK)
    return StepTime(max(simulate(tasks)), compute, network)


def _optimizer_s(job: Job, method: Method | None) -> float:
    """Return the seconds of the optimizer: master, gradient and states of a rank's shard are read, and written back."""
    num_ranks = job.setup.world_size
    if method is not None and (method.replicates or not method.shards):
        num_ranks = job.setup.ranks_per_node if method.replicates else 1
    numel = sum(slice_numel(unit.trainable, num_ranks) for unit in job.model.units)
    return numel * (3 * MASTER_BYTES + 2 * job.setup.state_bytes) / job.cluster.device.copy_rate


# ---- The order of tasks.


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
    order.compute("optimizer", optimizer_s, after=order.reductions)
    return [task._replace(stream=MAIN) for task in order.tasks] if blocks else order.tasks


class _Order:
    """Tasks that are added to streams. None stands for no task, of what a task waits for."""

    def __init__(self, units: Sequence[UnitWork]) -> None:
        self._units = units
        self.tasks: list[Task] = []
        self.reductions: list[int | None] = []

    def add(self, stream: str, stages: Iterable[Stage], after: Iterable[int | None] = ()) -> int | None:
        """Add stages to a stream, the first behind ``after``, and return the index of the last; None without any."""
        last = None
        for stage in stages:
            waits = () if last is not None else tuple({index for index in after if index is not None})
            self.tasks.append(Task(stage, stream, waits))
            last = len(self.tasks) - 1
        return last

    def compute(self, name: str, seconds: float, after: Iterable[int | None] = ()) -> int | None:
        """Add a part of the model, and return its index."""
        return self.add(MAIN, [Stage(name, ((PROCESSOR, seconds),), computes=True)], after)

    def forward(self, *, is_first: bool) -> None:
        """Add the forward pass of a micro-step."""
        copied: list[int | None] = [None, None]  # when the last two units were copied out
        crossed = [
            self.add(CROSS if unit.overlaps else MAIN, unit.crossing if is_first else ()) for unit in self._units
        ]
        for unit, cross in zip(self._units, crossed, strict=True):
            stages = unit.gather if is_first else unit.gather_later
            gathered = self.add(_stream(unit), stages, after=[copied[-2], cross])
            copied.append(self._copy_out(unit, gathered))
            # Without a copy the computation itself says that the stream has come this far.
            done = self.compute("forward", unit.forward_s, after=[gathered, cross])
            copied[-1] = done if copied[-1] is None else copied[-1]

    def backward(self, *, is_last: bool) -> None:
        """Add the backward pass of a micro-step, with its reductions."""
        units = list(reversed(self._units))
        gathered: int | None = None
        reduced: int | None = None
        for number, (unit, following) in enumerate(zip(units, [*units[1:], None], strict=True)):
            if number == 0 or not unit.prefetches:
                gathered = self.add(_stream(unit), unit.gather_backward)
            copied = self._copy_out(unit, gathered)
            own, gathered = gathered, None
            if following is not None and following.prefetches:
                gathered = self.add(_stream(following), following.gather_backward, after=[copied])
            done = self.compute("backward", unit.backward_s, after=[own])
            if stages := unit.reduce_last if is_last else unit.reduce:
                # The first stage copies gradients into the flat buffer. It waits for the last reduction on the compute
                # stream, and so does all computation that follows it.
                copy = self.add(MAIN, stages[:1], after=[done, reduced])
                reduced = self.add(REDUCE, stages[1:], after=[copy]) or copy
                across = unit.all_reduce_last if is_last else ()
                self.reductions += [reduced, self.add(ALL_REDUCE, across, after=[reduced])]

    def _copy_out(self, unit: UnitWork, gathered: int | None) -> int | None:
        return None if gathered is None else self.add(MAIN, unit.copies, after=[gathered])


def _stream(unit: UnitWork) -> str:
    """Return the stream of a unit's gathers."""
    return GATHER if unit.prefetches else MAIN
