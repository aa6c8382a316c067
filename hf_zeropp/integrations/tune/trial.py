"""One rank of a trial: it counts the script's optimizer steps, measures them, reports, and ends.

``hf_zeropp.run`` begins the trial before the script. All that it needs are hooks: of optimizers, where a step counts that changes
sharded parameters, and of ``torch.autograd.backward``, which is called with the loss whichever way a script is written. After the
last step the ranks exchange what each has measured, so that the tuners of all nodes know the same and decide alike. Then the
process ends at once: nothing behind the step runs, no block that cleans up and no checkpoint.
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_zeropp import devices
from hf_zeropp.apply import get_handle
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.units import DefaultAllGather, DefaultReduceScatter, find_sharded_modules
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.integrations.tune import ENV_TRIAL
from hf_zeropp.integrations.tune.traces import Traces

MESSAGES = "messages"
"""The file in a trial's folder to which ranks write lines of JSON: "step" and its number, "report" and what all ranks have
measured, "failed" and why, "ended" and the steps of sharded models and of others. The tuner keeps it locked while it lives."""
SKIPPED_STEPS = 3
"""Steps that are not measured: the first makes optimizer states, and whole weights cross where changes of them follow."""
MIN_STEPS = 2 * SKIPPED_STEPS
_GRACE_S = 0.3
"""Seconds between the last collective and the end, so that its last bytes have left all ranks."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A trial as a tuner orders it. It travels as JSON in the environment.

    Attributes:
        folder: for this trial alone, on this node.
        steps: optimizer steps.
        settings: those that go over all others. None stands for stock.
    """

    folder: str
    steps: int
    settings: dict[str, Any] | None


def try_out(script: Callable[[], None]) -> None:
    """Run a script as the trial that the environment orders. The process ends after the last step of the trial."""
    trial = Trial(Order(**json.loads(os.environ[ENV_TRIAL])))
    try:
        script()
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            trial.tell("failed", _in_a_line(error))
            raise
    trial.tell("ended", [trial.steps, trial.unsharded_steps])


class Trial:
    """Counts and measures the steps of this process.

    Attributes:
        steps: optimizer steps of sharded models so far.
        unsharded_steps: those of optimizers without a sharded parameter.
    """

    def __init__(self, order: Order) -> None:
        self.steps = self.unsharded_steps = 0
        self._order = order
        self._in_python = False
        self._config: ZeroPPConfig | None = None
        self._losses: list[torch.Tensor] = []
        self._figures: list[torch.Tensor] = []  # of each step: its losses, or the square of its gradients' norm
        self._have_losses = True
        self._has_gradients = False
        self._marks: list[Any] = []
        self._handles: list[ZeroPPHandle] = []
        self._collectives: dict[tuple[int, ...], int] = defaultdict(int)
        self._learning_rates: dict[torch.optim.Optimizer, float] = {}
        self._messages = os.open(os.path.join(order.folder, MESSAGES), os.O_WRONLY | os.O_APPEND)
        threading.Thread(target=self._end_with_the_tuner, daemon=True).start()
        self._traces = Traces(Path(order.folder))
        self._traces.watch()
        self._traces.note_saves()
        if order.settings is None:
            self._count_collectives()
        else:
            self._put_over_all_settings(order.settings)
        self._listen_to_backward()
        register_optimizer_step_pre_hook(self._step_begins)
        register_optimizer_step_post_hook(self._step_ends)

    def tell(self, kind: str, what: Any) -> None:
        """Send the tuner a message."""
        os.write(self._messages, (json.dumps([kind, what]) + "\n").encode())

    def _end_with_the_tuner(self) -> None:
        # The lock is free when the tuner has ended, in whatever way, and no rank must outlive it.
        fcntl.flock(self._messages, fcntl.LOCK_SH)
        os._exit(1)

    def _put_over_all_settings(self, settings: dict[str, Any]) -> None:
        """Let these settings go over those of the environment, of files and of the script."""
        original = ZeroPPConfig.resolve
        ours: list[ZeroPPConfig] = []

        def resolve(given: Any) -> ZeroPPConfig:
            self._in_python |= given is not None and not any(given is one for one in ours)
            self._config = dataclasses.replace(original(given), **settings)
            ours.append(self._config)
            return self._config

        setattr(ZeroPPConfig, "resolve", staticmethod(resolve))  # noqa: B010 - mypy refuses another kind of method

    def _listen_to_backward(self) -> None:
        original = torch.autograd.backward

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
            # Checkpointed layers call it too, with gradients.
            if grad_tensors is None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._losses.append(loss.detach().float().reshape(()))
            self._has_gradients = True
            original(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def _count_collectives(self) -> None:
        """Count what FSDP2's own gathers and reductions receive."""
        gather, reduce = DefaultAllGather.__call__, DefaultReduceScatter.__call__

        def count(slice_of_rank: torch.Tensor, group: dist.ProcessGroup, times: int) -> None:
            if self.steps >= SKIPPED_STEPS:
                self._collectives[tuple(dist.get_process_group_ranks(group))] += times * slice_of_rank.nbytes

        def counted_gather(
            self: Any, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any
        ) -> Any:
            count(input_tensor, group, 1)
            return gather(self, output_tensor, input_tensor, group, *args, **kwargs)

        def counted_reduce(
            self: Any, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # gloo reduces the whole tensor on all ranks and drops the rest, so its ring goes round twice.
            count(output_tensor, group, 2 if dist.get_backend(group) == "gloo" else 1)
            return reduce(self, output_tensor, input_tensor, group, *args, **kwargs)

        setattr(DefaultAllGather, "__call__", counted_gather)  # noqa: B010
        setattr(DefaultReduceScatter, "__call__", counted_reduce)  # noqa: B010

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the learning rate at its peak: how many weights a step changes depends on it, and most runs begin with less."""
        # PyTorch makes an optimizer's states by a step without gradients, before it loads them. Later an optimizer may step
        # behind another one, which has taken note of the gradients.
        if not (self._has_gradients or self.steps) or not _is_sharded(optimizer):
            return
        self._traces.is_training = True
        for group in optimizer.param_groups:
            if float(group.get("initial_lr", 0)) > float(group["lr"]):
                group["lr"] = group["initial_lr"]
        if rates := [float(group["lr"]) for group in optimizer.param_groups if float(group["lr"]) > 0]:
            self._learning_rates[optimizer] = min(rates)

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Several optimizers that step after one backward pass, or within it, make one step.
        if not self._has_gradients:
            return
        if not _is_sharded(optimizer):
            self.unsharded_steps += 1
            if not self.steps:  # a probe that each rank trains by itself
                self._losses.clear()
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._has_gradients = False
        self._have_losses &= bool(self._losses)
        self._figures.append(torch.stack(self._losses).sum() if self._losses else _square_of_gradients(params))
        self._losses.clear()
        self._mark(params[0].device)
        self.steps += 1
        self.tell("step", self.steps)
        if self.steps == 1:
            _forget_peak(params[0].device)
        if self.steps == SKIPPED_STEPS:
            found: list[Any] = find_sharded_modules()
            self._handles = [handle for handle in map(get_handle, found) if handle is not None]
            for handle in self._handles:
                handle.traffic.reset()
        if self.steps == self._order.steps:
            self._report_and_end(params[0].device)

    def _mark(self, device: torch.device) -> None:
        """Note the time. On a device with streams the host is ahead, so the stream notes it."""
        if devices.has_streams(device):
            event = torch.Event(device, enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _report_and_end(self, device: torch.device) -> NoReturn:
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, self._report(device))
        self.tell("report", reports)
        dist.barrier()
        time.sleep(_GRACE_S)
        for child in psutil.Process().children(recursive=True):  # workers that load data
            with suppress(psutil.Error):
                child.kill()
        os._exit(0)

    def _report(self, device: torch.device) -> dict[str, Any]:
        if devices.has_streams(device):
            torch.accelerator.synchronize()
        marks = itertools.pairwise(self._marks[SKIPPED_STEPS - 1 :])
        measured = self._order.steps - SKIPPED_STEPS
        traffics = [handle.traffic for handle in self._handles]
        trained = max(self._handles, key=lambda handle: handle.traffic.trainable_bytes, default=None)
        return {
            "seconds": [_seconds_between(begin, end) for begin, end in marks],
            "figures": [float(figure) for figure in self._figures],
            "have_losses": self._have_losses,
            "memory": _peak(device),
            "cross_node": sum(one.cross_node_bytes for one in traffics) / measured if traffics else None,
            "intra_node": sum(one.intra_node_bytes for one in traffics) / measured if traffics else None,
            "micro_steps": max((one.micro_steps / measured for one in traffics), default=None),
            "collectives": [[ranks, bytes_ / measured] for ranks, bytes_ in self._collectives.items()],
            "learning_rate": min(self._learning_rates.values(), default=0.0),
            "config": trained and self._config and self._config.to_dict(),
            "num_nodes": trained and trained.topology.num_nodes,
            "ranks_per_node": trained and trained.traffic.ranks_per_node,
            "in_python": self._in_python,
            "on_accelerator": devices.has_streams(device),
        }


def _seconds_between(begin: Any, end: Any) -> float:
    return begin.elapsed_time(end) / 1e3 if isinstance(begin, torch.Event) else end - begin


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def _square_of_gradients(params: list[torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of the squared norm of the gradients."""
    gradients = [param.grad for param in params if param.grad is not None]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
    return sum((one.float().square().sum() for one in local), torch.zeros((), device=params[0].device))


def _forget_peak(device: torch.device) -> None:
    """Let the peak of memory begin here: that of loading a model is none of a step's."""
    if devices.has_streams(device):
        torch.accelerator.reset_peak_memory_stats()
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak(device: torch.device) -> int:
    """Return the most bytes that this rank has held: of tensors on an accelerator, else of the whole process."""
    if devices.has_streams(device):
        return torch.accelerator.max_memory_allocated()
    with suppress(OSError, StopIteration, ValueError), open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, SystemExit) else f"{type(error).__name__}: {text}"[:500]
