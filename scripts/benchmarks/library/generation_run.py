"""One rank of the generation benchmark (bench_generation.py): greedy tokens from a sharded Hugging Face model."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from cluster_node import link_bytes
from torch.distributed.fsdp import register_fsdp_forward_method
from training_run import Measurement, ModelShape, TrainingRun, Variant


class GenerationRun(TrainingRun):
    """A model under one variant that generates instead of training. Each token takes a forward pass of all ranks."""

    def __init__(self, variant: Variant, shape: ModelShape, batch_size: int, prompt_len: int) -> None:
        super().__init__(variant, shape, batch_size, prompt_len)
        self.model.eval()
        if variant.lora and not self.handle:  # PEFT's `generate` passes FSDP2's root by: what a user must do about it
            register_fsdp_forward_method(self.model, "generate")

    @torch.no_grad()
    def generate(self, num_tokens: int) -> Measurement:
        """`step_ends` holds the start and, per token, when it was there."""
        ends: list[float] = []
        dist.barrier()
        if self.handle:
            self.handle.traffic.reset()
        before = link_bytes()
        dist.barrier()
        ends.append(time.monotonic())
        self.model.generate(
            self.tokens,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            synced_gpus=True,
            pad_token_id=0,
            streamer=_Clock(ends),
        )
        dist.barrier()
        link = {way: count - before[way] for way, count in link_bytes().items()}
        counted = self.handle.traffic.cross_node_bytes if self.handle else None
        return Measurement(ends, link, counted, loss=float("nan"))


class _Clock:
    """A streamer that notes when each token came. The first call brings the prompt."""

    def __init__(self, ends: list[float]) -> None:
        self._ends = ends
        self._saw_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._saw_prompt:
            self._ends.append(time.monotonic())
        self._saw_prompt = True

    def end(self) -> None:
        pass
