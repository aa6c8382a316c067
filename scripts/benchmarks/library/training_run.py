"""One rank's training run in ``bench_cluster.py``: a Hugging Face model under one variant of communication.

The driver makes one ``TrainingRun`` per rank and variant, and calls its methods. Everything goes through Accelerate, as
in a user's script: the stock variants are Accelerate's own FSDP2, with its ``no_sync`` between micro-steps. The model computes on
the device of the rank's process group: a CPU with gloo, a GPU with NCCL.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.fsdp.gradients.pending import PendingGradient
from hf_zeropp.fsdp.gradients.unit_gradients import ReduceScatter
from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.fsdp.units import AllGather
from library.rounds import Measurement, timed_steps
from library.variants import LEARNING_RATE, ModelShape, Variant


def build_model(
    shape: ModelShape, seed: int = 0, checkpoint: str | None = None, device: str = "cpu"
) -> torch.nn.Module:
    """Make a Llama in fp32, the same on every rank, with random weights or with those of a file."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**dataclasses.asdict(shape), max_position_embeddings=2048))
    if checkpoint is not None:
        model.load_state_dict(torch.load(checkpoint, weights_only=True))
    return model


def windows(tokens: np.ndarray, random: np.random.Generator, batch_size: int, length: int) -> torch.Tensor:
    """Return random windows of a text: [batch_size, length]."""
    starts = random.integers(len(tokens) - length, size=batch_size)
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


def run_of(variant: Variant, *arguments: Any) -> TrainingRun:
    """Make the run of a variant. ``TrainingRun`` names the arguments."""
    if variant.deepspeed is None:
        return TrainingRun(variant, *arguments)
    from library.deepspeed_run import DeepSpeedRun

    return DeepSpeedRun(variant, *arguments)


class TrainingRun:
    """A model, an optimizer and a way to communicate, on one rank.

    Args:
        variant: how ranks communicate.
        shape: the model's sizes.
        batch_size: sequences per micro-step.
        seq_len: tokens of a sequence.
        learning_rate: of AdamW. The bytes of changed words (variant ``exact``) depend on it.
        text: a file of tokens to train on. Without one every micro-step sees the same random tokens, others on every rank.
        checkpoint: a file of weights; None begins from random ones.
    """

    def __init__(
        self,
        variant: Variant,
        shape: ModelShape,
        batch_size: int,
        seq_len: int,
        learning_rate: float = LEARNING_RATE,
        text: str | None = None,
        checkpoint: str | None = None,
    ) -> None:
        self.variant = variant
        self.is_on_gpu = dist.get_backend() == "nccl"
        model = build_model(shape, checkpoint=checkpoint, device="cuda" if self.is_on_gpu else "cpu")
        model = with_lora(model) if variant.lora else model
        trainable = (param for param in model.parameters() if param.requires_grad)
        self._shard(model, torch.optim.AdamW(trainable, lr=learning_rate, foreach=True))
        if self.is_on_gpu:
            torch.cuda.empty_cache()  # the whole model was there, and ranks of other variants need the memory
        torch.manual_seed(dist.get_rank())
        self.tokens = torch.randint(shape.vocab_size, (batch_size, seq_len)).to("cuda" if self.is_on_gpu else "cpu")
        self._text = None if text is None else np.load(text, mmap_mode="r")
        self._random = np.random.default_rng(dist.get_rank())

    def _shard(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let Accelerate shard the model, and keep what training takes: ``model``, ``optimizer`` and ``handle``."""
        variant = self.variant
        self.plugin = ZeroPPPlugin(
            zeropp=False if variant.zeropp is None else variant.zeropp,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,  # every rank makes the same random weights; none reads a checkpoint
            mixed_precision_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32 if variant.fp32_reduce else torch.bfloat16,
                output_dtype=torch.bfloat16,
            ),
        )
        if variant.gathers_in_node:  # FSDP2 takes a number of ranks as well, and Accelerate hands it over
            self.plugin.reshard_after_forward = int(os.environ["LOCAL_WORLD_SIZE"])
        self.accelerator = Accelerator(
            cpu=not self.is_on_gpu,
            mixed_precision="bf16",
            fsdp_plugin=self.plugin,
            parallelism_config=_parallelism(variant),
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if variant.silent:
            _silence(self.model)
        if variant.keeps_weights:
            self.model.set_reshard_after_forward(False)
        self.handle = self.plugin.handle_of(self.model)

    def measure(self, steps: int, micro_steps: int) -> Measurement:
        """Time ``steps`` steps of ``micro_steps`` micro-steps one by one, and count the bytes of them all."""
        return timed_steps(lambda: self.take_step(micro_steps), steps, self.handle)

    def predicted_bytes(self, micro_steps: int) -> int | None:
        """Return the bytes that are predicted to enter this node in a step; None where this package does not run."""
        if self.handle is None:
            return None
        predicted = self.handle.predict(micro_steps).values()
        return self.handle.traffic.ranks_per_node * sum(count.cross_node for count in predicted)

    def memory(self, micro_steps: int) -> dict[str, int]:
        """Run one step, and return the bytes that this rank holds by kind, as they are before the optimizer step.

        ``peak`` is the most that all live tensors held at the end of a micro-step; on a GPU it is the most that was allocated.
        """
        # PyTorch keeps no high-water mark of memory on CPU, so live tensors are summed up, between micro-steps.
        peak = partial = 0
        if self.is_on_gpu:
            torch.cuda.reset_peak_memory_stats()

        def look(is_last: bool) -> None:
            nonlocal peak, partial
            peak = max(peak, self._peak_bytes())
            partial = max(partial, self.handle.partial_bytes() if self.handle else 0)
            if is_last:  # to look at gradients of earlier micro-steps would complete them
                kinds.update(self._memory_by_kind())

        kinds: dict[str, int] = {}
        self.take_step(micro_steps, look)
        peak = max(peak, self._peak_bytes()) if self.is_on_gpu else peak
        return kinds | {"partial": partial, "peak": peak}

    def take_step(self, micro_steps: int, after_backward: Callable[[bool], None] = lambda is_last: None) -> float:
        """Make one optimizer step, and return the loss of its last micro-step.

        ``after_backward`` is called behind each backward pass, with whether it was the last.
        """
        # Accelerate reads it in every ``accumulate``, so one prepared model can be measured with all accumulations.
        self.accelerator.gradient_accumulation_steps = micro_steps
        self.accelerator.step = 0  # it counts micro-steps, and steps before may have had another number of them
        for index in range(micro_steps):
            is_last = index == micro_steps - 1
            if self.variant.keeps_weights:
                self.model.set_reshard_after_backward(is_last)
            self._read_text()
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
                self.accelerator.backward(loss)
                after_backward(is_last)
                # Accelerate's ``step`` and ``zero_grad`` do nothing before the last micro-step.
                self.optimizer.step()
                self.optimizer.zero_grad()
        if self.is_on_gpu:
            torch.cuda.synchronize()  # the step is over when the GPU has made it
        return loss.item()

    def _read_text(self) -> None:
        if self._text is not None:
            self.tokens = windows(self._text, self._random, *self.tokens.shape).to(self.tokens.device)

    def trace(self, folder: str, micro_steps: int) -> None:
        """Run one step on all ranks, which rank 0 records into ``folder``, for https://ui.perfetto.dev."""
        if dist.get_rank() > 0:
            self.take_step(micro_steps)
            return
        with torch.profiler.profile() as profiler:
            self.take_step(micro_steps)
        profiler.export_chrome_trace(os.path.join(folder, f"trace_{self.variant.name}.json.gz"))

    def _peak_bytes(self) -> int:
        if self.is_on_gpu:
            return torch.cuda.max_memory_allocated()
        return _live_tensor_bytes() - self._peers_bytes()

    def _peers_bytes(self) -> int:
        """Return the bytes of the other ranks' secondary shards, where they lie in memory that this rank maps too."""
        if self.handle is None or not self.handle.shares_memory:
            return 0
        return (self.handle.topology.ranks_per_node - 1) * self.handle.secondary_bytes()

    def _memory_by_kind(self) -> dict[str, int]:
        params = list(self.model.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": sum(map(_local_bytes, params)),
            "gradients": sum(_local_bytes(param.grad) for param in params if param.grad is not None),
            "optimizer": sum(_local_bytes(state) for state in states if isinstance(state, torch.Tensor)),
            "secondary": self.handle.secondary_bytes() if self.handle else 0,
        }


def _parallelism(variant: Variant) -> ParallelismConfig | None:
    if variant.replicas == 1:
        return None
    num_nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    replicas = num_nodes if variant.replicas == "nodes" else variant.replicas
    return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=dist.get_world_size() // replicas)


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _live_tensor_bytes() -> int:
    """Return the bytes of all storages to which a tensor of this process, or its gradient, refers.

    PyTorch counts allocations on GPUs only, and the process's own memory includes what the allocator keeps for reuse.
    So the tensors are found through the garbage collector, and each storage is counted once, by its address.
    """
    gc.collect()
    sizes: dict[int, int] = {}
    for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]:
        for held in (tensor, tensor.grad if tensor.is_leaf else None):
            local = held._local_tensor if isinstance(held, DTensor) else held
            # A gradient whose reduction goes on is a tensor without memory.
            if local is not None and local.device.type == "cpu" and not isinstance(local, PendingGradient):
                sizes[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(sizes.values())


class _SilentAllGather(AllGather):
    """Fills the output with copies of this rank's shard, so that the computation goes on and nothing is sent."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        for rank, part in enumerate(output_tensor.view(group.size(), -1)):
            if rank != group.rank():  # FSDP2 has put this rank's own part in place
                part.copy_(input_tensor)


class _SilentReduceScatter(ReduceScatter):
    """Returns the first rank's part of this rank's own gradients."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])


def with_lora(base: torch.nn.Module, rank: int = 8) -> torch.nn.Module:
    """Freeze a base under LoRA adapters on all linear layers. It gets bf16 weights, unless it is quantized."""
    from peft import LoraConfig, get_peft_model

    base = base if hasattr(base, "hf_quantizer") else base.to(torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear"))


def _silence(model: torch.nn.Module) -> None:
    for unit in find_units(model):
        unit.set_all_gather(_SilentAllGather())
        unit.gradients.reduce_through(_SilentReduceScatter())
