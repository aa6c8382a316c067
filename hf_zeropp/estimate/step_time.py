"""Predict the seconds of one optimizer step, or of one generated token, under a method: from a simulation of its tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hf_zeropp.config import PRESETS, ZeroPPConfig
from hf_zeropp.estimate.memory_and_bytes import HALF_BYTES, MASTER_BYTES
from hf_zeropp.estimate.model_shape import slice_numel
from hf_zeropp.estimate.simulation import COMPUTE, NETWORK, Program, Task, simulate
from hf_zeropp.estimate.step_order import step_program, token_program
from hf_zeropp.estimate.training_job import Job
from hf_zeropp.estimate.unit_work import METHODS, Method, UnitWork, setup_of, work_of_method, work_of_package

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

    Raises:
        ValueError: no method has the name.
    """
    micro_steps = job.setup.micro_steps
    program = program_of(job, method, min(micro_steps, SIMULATED_MICRO_STEPS))
    spans = simulate(program.tasks)
    step_s = max((span.end for span in spans), default=0.0)
    compute_s, network_s = _work(program.tasks)
    if micro_steps > SIMULATED_MICRO_STEPS:
        # All micro-steps between the first and the last are alike, so each adds what the second one adds.
        first, second = program.micro_step_ends[:2]
        left = micro_steps - SIMULATED_MICRO_STEPS
        more_compute_s, more_network_s = _work(program.tasks[first + 1 : second + 1])
        step_s += left * (spans[second].end - spans[first].end)
        compute_s, network_s = compute_s + left * more_compute_s, network_s + left * more_network_s
    return StepTime(step_s, compute_s, network_s)


def program_of(job: Job, method: str | Method, micro_steps: int | None = None) -> Program:
    """Return the tasks of so many micro-steps of an optimizer step, by default of all."""
    job, other = resolved(job, method)
    return step_program(
        _work_of(job, other),
        micro_steps or job.setup.micro_steps,
        _optimizer_s(job, other),
        is_gloo=job.cluster.backend == "gloo",
        overlaps=other is None and job.setup.config.overlap and job.setup.num_nodes > 1,
    )


def token_s(job: Job, method: str) -> float:
    """Return the seconds of one generated token, once the weights have crossed nodes. All ranks take part in its forward pass.

    Args:
        job: its tokens are the sequences of one rank.
        method: as for ``step_time``.
    """
    job, other = resolved(job, method)
    units = [_token_work(unit, job) for unit in _work_of(job, other)]
    program = token_program(units, is_gloo=job.cluster.backend == "gloo")
    return max(span.end for span in simulate(program.tasks))


def resolved(job: Job, method: str | Method) -> tuple[Job, Method | None]:
    """Return the job with the settings that a method names, and the method where it is one beside this package, else None.

    Raises:
        ValueError: no method has the name.
    """
    if isinstance(method, Method):
        return job, method
    if method in METHODS:
        return job, METHODS[method]
    if method in PRESETS:
        return with_settings(job, {"preset": method}), None
    if method == SETTINGS:
        return job, None
    raise ValueError(f"expected a method of {', '.join((*method_names(), SETTINGS))}, got {method!r}")


def with_settings(job: Job, settings: Mapping[str, Any]) -> Job:
    """Return the job under other settings. How the frozen base is stored stays as it is."""
    config = ZeroPPConfig.from_dict({**settings, **job.setup.config.of_frozen})
    return dataclasses.replace(job, setup=dataclasses.replace(job.setup, config=config))


def _work_of(job: Job, other: Method | None) -> list[UnitWork]:
    return work_of_package(job) if other is None else work_of_method(job, other)


def _token_work(unit: UnitWork, job: Job) -> UnitWork:
    # A token reads each weight of a unit once, and few sequences at a time do not keep the arithmetic busy.
    flops_s = unit.forward_s
    per_weight = 2 * job.model.active * job.tokens / job.cluster.device.flops
    numel = flops_s / per_weight if per_weight else 0.0
    forward_s = max(flops_s, HALF_BYTES * numel / job.cluster.device.copy_rate)
    # Weights do not change, so a gather costs what it costs in a backward pass: within the node where there is a secondary
    # shard. Units that are not resharded after a forward pass stay gathered between the tokens.
    stays = not unit.gather_backward
    return dataclasses.replace(
        unit, forward_s=forward_s, gather_forward=unit.gather_backward, copies=() if stays else unit.copies
    )


def _optimizer_s(job: Job, other: Method | None) -> float:
    """Return the seconds of the optimizer: master, gradient and states of a rank's shard are read, and written back."""
    device = job.cluster.device
    setup = job.setup if other is None else setup_of(job.setup, other)
    # The ranks of a replica hold all of the model together, and those of DDP each by itself.
    copies = setup.replicas if other is None or other.shards else setup.world_size
    if device.step_overhead is not None:
        return copies * device.step_overhead
    numel = sum(slice_numel(unit.trainable, setup.world_size) for unit in job.model.units) * copies // setup.replicas
    return numel * (3 * MASTER_BYTES + 2 * job.setup.state_bytes) / device.copy_rate


def _work(tasks: Sequence[Task]) -> tuple[float, float]:
    """Return the seconds of computation and of the network's work in tasks, whenever they run."""
    compute = sum(task.seconds_alone for task in tasks if task.kind == COMPUTE)
    network = sum(seconds for task in tasks for name, seconds in task.demands if name == NETWORK)
    return compute, network
