"""One rank of ``bench_generation.py``: greedy tokens from a sharded Hugging Face model."""

from __future__ import annotations

import time

import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from library.rounds import Measurement, timed
from library.training_run import TrainingRun
from library.variants import ModelShape, Variant


class GenerationRun(TrainingRun):
    """A model under one variant that generates instead of training. Every token takes a forward pass of all ranks.

    Args:
        variant: how ranks communicate.
        shape: the model's sizes.
        batch_size: prompts of this rank.
        prompt_len: tokens of a prompt.
    """

    def __init__(self, variant: Variant, shape: ModelShape, batch_size: int, prompt_len: int) -> None:
        super().__init__(variant, shape, batch_size, prompt_len)
        self.model.eval()
        if variant.lora and not self.handle:
            # PEFT's ``generate`` calls the base model, so FSDP2's hooks on the root do not run. Users of plain FSDP2
            # must register the method like this; the package does it for them.
            register_fsdp_forward_method(self.model, "generate")

    @torch.no_grad()
    def generate(self, num_tokens: int) -> Measurement:
        """Generate ``num_tokens`` tokens per prompt. ``step_ends`` holds when each of them was there."""

        def generate(ends: list[float]) -> float:
            self.model.generate(
                self.tokens,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                synced_gpus=True,
                pad_token_id=0,
                streamer=_Clock(ends),
            )
            return float("nan")

        return timed(generate, self.handle)


class _Clock:
    """A streamer that notes when each token came. Transformers hands it the prompt first."""

    def __init__(self, ends: list[float]) -> None:
        self._ends = ends
        self._saw_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._saw_prompt:
            self._ends.append(time.monotonic())
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing is left to do after the last token."""
