"""Predict the seconds of one optimizer step under a method, from a simulation of its tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_zeropp.config import PRESETS, ZeroPPConfig
from hf_zeropp.estimate.exchanges import MASTER_BYTES
from hf_zeropp.estimate.model_shape import slice_numel
from hf_zeropp.estimate.simulation import COMPUTE, NETWORK, Task, simulate
from hf_zeropp.estimate.step_order import step_tasks
from hf_zeropp.estimate.training_job import Job
from hf_zeropp.estimate.unit_work import METHODS, Method, work_of_method, work_of_package

SETTINGS = "these settings"
"""The method of ``Job.setup.config``, where it is none of the presets."""

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


def method_names() -> tuple[str, ...]:
    """Return the names of all methods, this package's presets last."""
    return (*METHODS, *PRESETS)


def step_time(job: Job, method: str | Method) -> StepTime:
    """Return the prediction of one method.

    Args:
        job: the settings of its setup are read for the method ``SETTINGS`` alone.
        method: of ``method_names``, or ``SETTINGS``; or one that has no name, such as some of the paper's techniques alone.
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


def tasks_of(job: Job, method: str | Method, micro_steps: int | None = None) -> list[Task]:
    """Return the tasks of so many micro-steps of an optimizer step, by default of all."""
    job, other = resolved(job, method)
    units = work_of_package(job) if other is None else work_of_method(job, other)
    overlaps = other is None and job.setup.config.overlap and job.setup.world_size > job.setup.group_size
    blocks = job.cluster.backend == "gloo" and not overlaps
    return step_tasks(units, micro_steps or job.setup.micro_steps, _optimizer_s(job, other), blocks=blocks)


def resolved(job: Job, method: str | Method) -> tuple[Job, Method | None]:
    """Return the job with the settings that a method names, and the method where it is one beside this package, else None."""
    if isinstance(method, Method):
        return job, method
    if method in PRESETS:
        return with_settings(job, {"preset": method}), None
    return job, None if method == SETTINGS else METHODS[method]


def with_settings(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return the job under other settings. How the frozen base is stored stays as it is."""
    config = ZeroPPConfig.from_dict({**settings, **job.setup.config.of_frozen})
    return dataclasses.replace(job, setup=dataclasses.replace(job.setup, config=config))


def _simulated(job: Job, method: str | Method, micro_steps: int) -> StepTime:
    tasks = tasks_of(job, method, micro_steps)
    stages = [task.stage for task in tasks]
    compute = sum(stage.latency + stage.work_s for stage in stages if stage.kind == COMPUTE)
    network = sum(seconds for stage in stages for name, seconds in stage.demands if name == NETWORK)
    return StepTime(max(span.end for span in simulate(tasks)), compute, network)


def _optimizer_s(job: Job, other: Method | None) -> float:
    """Return the seconds of the optimizer: master, gradient and states of a rank's shard are read, and written back."""
    num_ranks = job.setup.world_size
    if other is not None and (other.replicates or not other.shards):
        num_ranks = job.setup.ranks_per_node if other.replicates else 1
    numel = sum(slice_numel(unit.trainable, num_ranks) for unit in job.model.units)
    return numel * (3 * MASTER_BYTES + 2 * job.setup.state_bytes) / job.cluster.device.copy_rate
