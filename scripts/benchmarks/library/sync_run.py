"""One rank of ``bench_sync.py``: training steps, each followed by feeding the weights to an inference engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_zeropp import publish_weights
from library.rounds import Measurement, timed_steps
from library.training_run import TrainingRun

Way = Literal["none", "publish_weights", "full_tensor"]
NamedWeights = Iterator[tuple[str, torch.Tensor]]


@dataclasses.dataclass
class Synced:
    """One rank's report of steps that were each followed by a sync.

    Attributes:
        measurement: of steps and syncs together.
        sync_s: seconds of each sync, from its beginning on this rank to its end on the slowest.
    """

    measurement: Measurement
    sync_s: list[float]


class SyncRun(TrainingRun):
    """A model under one variant whose weights go to an engine of its own on every rank, as in TRL's colocate mode.

    The engine is a set of bf16 tensors that the weights are copied to, which is what an engine does to load them.
    """

    _engine: dict[str, torch.Tensor] = {}

    def steps(self, num_steps: int, way: Way) -> Synced:
        """Train ``num_steps`` steps, and feed the engine behind each of them in one way, or not at all."""
        sync_s: list[float] = []

        def step() -> float:
            loss = self.take_step(1)
            begin = time.monotonic()
            if way != "none":
                self._load(self._weights(way))
                dist.barrier()
            sync_s.append(time.monotonic() - begin)
            return loss

        return Synced(timed_steps(step, num_steps, self.handle), sync_s)

    def _weights(self, way: Way) -> NamedWeights:
        return publish_weights(self.model) if way == "publish_weights" else self._as_trl_gathers()

    @torch.no_grad()
    def _as_trl_gathers(self) -> NamedWeights:
        """Yield weights as TRL's ``VLLMGeneration`` does under FSDP2: adapters merged in place, ``full_tensor`` of each."""
        if self.variant.lora:
            self.model.merge_adapter()
        for name, param in self.model.named_parameters():
            if "lora_" not in name:
                clean = name.removeprefix("base_model.model.").replace(".base_layer", "")
                yield clean, param.full_tensor() if isinstance(param, DTensor) else param
        if self.variant.lora:
            self.model.unmerge_adapter()

    def _load(self, weights: NamedWeights) -> None:
        for name, weight in weights:
            if name not in self._engine:
                self._engine = {**self._engine, name: torch.empty_like(weight, dtype=torch.bfloat16)}
            self._engine[name].copy_(weight)
