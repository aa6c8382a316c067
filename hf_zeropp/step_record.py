"""Records of optimizer steps, written to files where the environment asks for it, as ``hf-zeropp tune`` does.

``ZEROPP_RECORD`` names a folder. Every rank appends a line of JSON to a file of its own there at the end of each optimizer step,
under ZeRO++ and on stock FSDP2 alike: seconds since the step before, bytes, the mean loss of the micro-steps, the lowest learning
rate, and the settings in force. Public hooks of PyTorch see the steps, and the losses that models return.
"""

from __future__ import annotations

import functools
import json
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_zeropp import devices
from hf_zeropp.config import ENV_RECORD

if TYPE_CHECKING:
    from hf_zeropp.handle import ZeroPPHandle


def record_steps(handle: ZeroPPHandle | None = None) -> None:
    """Record the optimizer steps of this process from now on, if ``ZEROPP_RECORD`` is set; else do nothing.

    Args:
        handle: whose bytes are recorded too; None on stock FSDP2. Each call adds one.
    """
    if folder := os.environ.get(ENV_RECORD):
        record = _record(Path(folder))
        if handle is not None:
            record.handles.add(handle)


def read_records(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of each rank in a folder; the last one of a file counts if it is whole, since a rank may be writing it."""
    return [
        [json.loads(line) for line in file.read_text().split("\n")[:-1]] for file in sorted(folder.glob("rank_*.jsonl"))
    ]


@functools.cache
def _record(folder: Path) -> _StepRecord:
    """Return the record of this process, which begins with the first call."""
    return _StepRecord(folder)


class _StepRecord:
    """Writes a line for each step.

    Args:
        folder: that exists.

    Attributes:
        handles: of the models that run under ZeRO++.
    """

    def __init__(self, folder: Path) -> None:
        self.handles: weakref.WeakSet[ZeroPPHandle] = weakref.WeakSet()
        self._folder = folder
        self._losses: list[Tensor] = []
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None
        self._since_s = time.perf_counter()
        self._bytes = 0.0
        register_module_forward_hook(self._forward_ended)
        register_optimizer_step_post_hook(self._step_ended)

    def _forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the loss that a sharded model returns in training, as those of Transformers do."""
        loss = getattr(output, "loss", None) if isinstance(module, FSDPModule) and torch.is_grad_enabled() else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().float())

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(isinstance(param, DTensor) for param in params):
            return
        # A training step may have several optimizers. The first that steps ends it.
        stepping = self._stepping and self._stepping()
        if stepping is None:
            self._stepping = weakref.ref(optimizer)
        elif stepping is not optimizer:
            return
        if devices.has_streams(params[0].device):
            torch.get_device_module(params[0].device.type).synchronize()
        self._write(min(float(group["lr"]) for group in optimizer.param_groups))

    def _write(self, rate: float) -> None:
        active = [handle for handle in self.handles if handle.is_active]
        received = sum(handle.traffic.cross_node_bytes for handle in active)
        losses = [loss.item() for loss in self._losses]
        now_s = time.perf_counter()
        line = {
            "seconds": now_s - self._since_s,
            "received": received - self._bytes,
            "zero3": sum(handle.traffic.zero3_bytes_per_step() for handle in active),
            "loss": sum(losses) / len(losses) if losses else None,
            "rate": rate,
            "settings": active[0].config.to_dict() if active else None,
        }
        with open(self._folder / f"rank_{dist.get_rank()}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        self._losses.clear()
        self._bytes = received
        self._since_s = time.perf_counter()
