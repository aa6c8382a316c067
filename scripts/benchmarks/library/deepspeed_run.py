"""One rank's training run under DeepSpeed's ZeRO-3, in the place of ``TrainingRun``'s under FSDP2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import torch

from library.training_run import TrainingRun


class DeepSpeedRun(TrainingRun):
    """The same model, optimizer and tokens as every ``TrainingRun``, with bf16 weights and gradients and fp32 masters."""

    def _shard(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_on_gpu:
            os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # DeepSpeed would ask MPI
        import deepspeed  # an optional dependency of this study

        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, **self.variant.deepspeed},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]
        self.model, self.optimizer, self.handle = engine, optimizer, None

    def take_step(self, micro_steps: int, after_backward: Callable[[bool], None] = lambda is_last: None) -> float:
        """Make one optimizer step, as ``TrainingRun.take_step`` does."""
        engine = self.model
        coalesces = engine.coalesce_grad_reduction() if self.variant.coalesces else contextlib.nullcontext()
        with coalesces:
            for index in range(micro_steps):
                is_last = index == micro_steps - 1
                self._read_text()
                if not self.variant.coalesces:
                    engine.set_gradient_accumulation_boundary(is_last)
                loss = engine(input_ids=self.tokens, labels=self.tokens).loss
                engine.backward(loss / micro_steps)
                after_backward(is_last)
        engine.step()
        if self.is_on_gpu:
            torch.cuda.synchronize()
        return loss.item()

    def _memory_by_kind(self) -> dict[str, int]:
        zero, params = self.model.optimizer, list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        shards = [*zero.fp32_partitioned_groups_flat, *(param.ds_tensor for param in params)]
        gradients = [zero.grad_partitions_flat_buffer, *(param.grad for param in params if param.grad is not None)]
        return {
            "parameters": _bytes(shards),
            "gradients": _bytes(gradients),
            "optimizer": _bytes(state for state in states if isinstance(state, torch.Tensor)),
            "secondary": _bytes(param.ds_secondary_tensor for param in params if param.ds_secondary_tensor is not None),
        }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
