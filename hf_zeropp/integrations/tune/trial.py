"""One rank of a trial: it counts the script's optimizer steps, measures them, reports, and ends.

``hf_zeropp.run`` begins the trial before the script. All that it needs are hooks: of optimizers, where a step counts that changes
sharded parameters, and of ``torch.autograd.backward``, which is called with the loss whichever way a script is written. After the
last step the ranks exchange what each has measured, so that the tuners of all nodes know the same and decide alike. Then the
process ends at once: nothing behind the step runs, no block that cleans up and no checkpoint.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import psutil
import torch
import torch.distributed as dist
import transformers.trainer
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import TrainerCallback, TrainerControl

from hf_zeropp import devices
from hf_zeropp.apply import get_handle
from hf_zeropp.comm.exchange import exchange
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.fsdp.collective_watch import CollectiveWatch
from hf_zeropp.fsdp.units import find_sharded_modules
from hf_zeropp.handle import ZeroPPHandle
from hf_zeropp.integrations.tune import ENV_TRIAL
from hf_zeropp.integrations.tune.candidates import Candidate
from hf_zeropp.integrations.tune.traces import trace
from hf_zeropp.traffic import Bytes, total

MESSAGES = "messages"
"""The file in a trial's folder to which ranks write lines of JSON: "step" and its number, "report" and what all ranks have
measured, "failed" and why, "ended" and the steps of sharded models and of others. The tuner keeps it locked while it lives."""
SKIPPED_STEPS = 3
"""Steps that are not measured: the first makes optimizer states, and whole weights cross where changes of them follow."""
MIN_STEPS = 2 * SKIPPED_STEPS
Mark: TypeAlias = float | torch.Event
"""A moment: seconds of the host, or an event of a device."""
_GRACE_S = 0.3
"""Seconds between the last collective and the end, so that its last bytes have left all ranks."""


def try_out(script: Callable[[], None]) -> None:
    """Run a script as the trial that the environment orders. The process ends after the last step of the trial."""
    order = json.loads(os.environ[ENV_TRIAL])
    trial = Trial(Path(order["folder"]), order["steps"], Candidate(**order["candidate"]))
    try:
        script()
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            trial.tell("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
            raise
    trial.tell("ended", [trial.steps, trial.unsharded_steps])


class _StepsAlone(TrainerCallback):
    """Lets a Trainer neither save nor evaluate between the steps that are measured. A checkpoint may go to the Hub."""

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Take back what the callbacks before this one ask for."""
        control.should_save = control.should_evaluate = False


class Received(CollectiveWatch):
    """Adds up what this rank receives in collectives that are not of this package: on stock FSDP2, in all of them."""

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__(ranks_per_node)
        self._bytes = Bytes()

    def count(self, kind: str, received: Bytes) -> None:
        """Add a collective of whatever kind."""
        self._bytes.add(received)

    def of_node(self) -> dict[str, float]:
        """Return the bytes of a node, if all of its ranks receive as this one."""
        return _of_node(self._bytes, self._ranks_per_node)


class Trial:
    """Counts and measures the steps of this process.

    Args:
        folder: for this trial alone, on this node.
        steps: optimizer steps.
        candidate: what is tried.

    Attributes:
        steps: optimizer steps of sharded models so far.
        unsharded_steps: those of optimizers without a sharded parameter.
    """

    def __init__(self, folder: Path, steps: int, candidate: Candidate) -> None:
        self.steps = self.unsharded_steps = 0
        self._last_step = steps
        self._in_python = False
        self._config: ZeroPPConfig | None = None
        self._losses: list[torch.Tensor] = []
        self._losses_of_steps: list[torch.Tensor] = []
        self._has_gradients = False
        self._marks: list[Mark] = []
        self._handles: list[ZeroPPHandle] = []
        self._received = Received(candidate.ranks_per_node) if candidate.ranks_per_node else None
        self._learning_rates: dict[torch.optim.Optimizer, float] = {}
        self._messages = os.open(folder / MESSAGES, os.O_WRONLY | os.O_APPEND)
        threading.Thread(target=self._end_with_the_tuner, daemon=True).start()
        trace(folder)
        cast(list[type[TrainerCallback]], transformers.trainer.DEFAULT_CALLBACKS).append(_StepsAlone)
        if candidate.settings is not None:
            self._put_over_all_settings(candidate)
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

    def _put_over_all_settings(self, candidate: Candidate) -> None:
        """Let the candidate's settings go over those of the environment, of files and of the script."""
        original = ZeroPPConfig.resolve
        ours: list[ZeroPPConfig] = []

        def resolve(given: Any) -> ZeroPPConfig:
            self._in_python |= given is not None and not any(given is one for one in ours)
            self._config = candidate.over(original(given))
            ours.append(self._config)
            return self._config

        setattr(ZeroPPConfig, "resolve", staticmethod(resolve))  # noqa: B010 - mypy refuses another kind of method

    def _listen_to_backward(self) -> None:
        original = torch.autograd.backward

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            # Checkpointed layers call it too, with gradients.
            if grad_tensors is None:
                losses = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                self._losses += [loss.detach().float().reshape(()) for loss in losses if loss.numel() == 1]
            self._has_gradients = True
            original(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the learning rate at its peak: how many weights a step changes depends on it, and most runs begin with less."""
        # PyTorch makes an optimizer's states by a step without gradients, before it loads them. Later an optimizer may step
        # behind another one, which has taken note of the gradients.
        if not (self._has_gradients or self.steps) or not _is_sharded(optimizer):
            return
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
        if not self._losses:
            raise ValueError("no backward pass of a step began with a scalar, so there are no losses to compare")
        self._has_gradients = False
        self._losses_of_steps.append(torch.stack(self._losses).sum())
        device = self._losses[0].device
        self._losses.clear()
        self._marks.append(_mark(device))
        self.steps += 1
        self.tell("step", self.steps)
        self._begin_to_count(device)
        if self.steps == self._last_step:
            self._report_and_end(device)

    def _begin_to_count(self, device: torch.device) -> None:
        """Count from the step on that fits. All steps of stock receive the same, so one is watched that is not measured."""
        if self.steps == 1:  # the memory of loading a model is none of a step's
            _forget_peak(device)
        if self.steps == SKIPPED_STEPS - 1 and self._received is not None:
            self._received.turn_on()
        if self.steps == SKIPPED_STEPS:
            if self._received is not None:
                self._received.turn_off()
            found: list[Any] = find_sharded_modules()
            self._handles = [handle for handle in map(get_handle, found) if handle is not None]
            for handle in self._handles:
                handle.traffic.reset()

    def _report_and_end(self, device: torch.device) -> NoReturn:
        self.tell("report", exchange(self._report(device)))
        dist.barrier()
        time.sleep(_GRACE_S)
        for child in psutil.Process().children(recursive=True):  # workers that load data
            with suppress(psutil.Error):
                child.kill()
        os._exit(0)

    def _report(self, device: torch.device) -> dict[str, Any]:
        if devices.has_streams(device):  # events have no times before the device has passed them
            torch.accelerator.synchronize()
        marks = itertools.pairwise(self._marks[SKIPPED_STEPS - 1 :])
        report = {
            "seconds": [_seconds_between(begin, end) for begin, end in marks],
            "losses": [float(loss) for loss in self._losses_of_steps],
            "memory": _peak(device),
            "learning_rate": min(self._learning_rates.values(), default=0.0),
            "in_python": self._in_python,
            "bytes": self._received and self._received.of_node(),
            "config": None,
        }
        return report | self._of_zeropp(self._config) if self._config and self._handles else report

    def _of_zeropp(self, config: ZeroPPConfig) -> dict[str, Any]:
        """Return what ZeRO++ knows of the measured steps, from the handle of the largest model that is trained."""
        largest = max(self._handles, key=lambda handle: handle.traffic.trainable_bytes)
        traffic = largest.traffic
        counts = [count for handle in self._handles for count in handle.traffic.counts.values()]
        measured = self._last_step - SKIPPED_STEPS
        return {
            "config": config.to_dict(),
            "in_force": largest.config.to_dict(),
            "bytes": _of_node(total([*counts, *traffic.others.values()]), traffic.ranks_per_node / measured),
            "micro_steps": traffic.micro_steps / measured,
            "ranks_per_node": traffic.ranks_per_node,
            "num_nodes": traffic.num_nodes,
            "nodes_of_a_replica": largest.topology.num_nodes,
        }


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def _of_node(received: Bytes, factor: float) -> dict[str, float]:
    """Return the bytes that the ranks of a node receive, from each other and from other nodes, if all receive as this one."""
    return {"intra_node": factor * received.intra_node, "cross_node": factor * received.cross_node}


def _mark(device: torch.device) -> Mark:
    """Return this moment. On a device it is an event among the device's work, so that the host need not wait for that work."""
    if not devices.has_streams(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _seconds_between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin


def _forget_peak(device: torch.device) -> None:
    if devices.has_streams(device):
        torch.accelerator.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # some containers do not allow it
            Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int:
    """Return the most bytes that this rank has held: of tensors on an accelerator, else of the process; 0 if unknown."""
    if devices.has_streams(device):
        return torch.accelerator.max_memory_allocated()
    with suppress(OSError, StopIteration), open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    return 0
