"""One rank's training run for the benchmarks: a Hugging Face model under one variant of FSDP2 communication.

The driver (bench_cluster.py) makes one `TrainingRun` per rank and variant and calls its methods. Everything goes
through Accelerate, as a user's script does: the stock variants are Accelerate's own FSDP2, with its `no_sync` between
micro-steps.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from cluster_node import link_bytes
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.fsdp.units import AllGather, ReduceScatter, find_units

OFF = {"qwz_bits": None, "hpz_size": None, "qgz_bits": None, "qgz_intra_bits": None}
DELTA = {"qwz_mode": "delta", "qwz_bits": 4}
EXACT_SUMS = {"qgz_hadamard": True, "qgz_error_feedback": "full"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the ranks communicate.

    zeropp: settings, or None for the stock engine.
    fp32_reduce: gradients are reduced in fp32 instead of bf16.
    hsdp: shard within the node, replicate over nodes (what Transformers recommends between nodes).
    silent: no collective at all: what is left is the computation, and FSDP2's own copies.
    lora: a frozen bf16 base with LoRA adapters on its linear layers, instead of a model that trains as a whole.
    """

    name: str
    zeropp: dict[str, Any] | None = None
    fp32_reduce: bool = False
    hsdp: bool = False
    silent: bool = False
    lora: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("compute", silent=True),
        Variant("stock"),
        Variant("stock-fp32", fp32_reduce=True),
        Variant("hsdp", hsdp=True),
        Variant("qwz", OFF | {"qwz_bits": 8}),
        Variant("hpz", OFF | {"hpz_size": "node"}),
        Variant("qgz", OFF | {"qgz_bits": 4, "qgz_intra_bits": 8}),
        Variant("all", {}),
        # Lower bits and what makes up for them: see scripts/results/half_model.md.
        Variant("paper", {"preset": "paper"}),
        Variant("half-values", DELTA),
        Variant("half", DELTA | EXACT_SUMS),
        Variant("half-hpz-8", DELTA | EXACT_SUMS | {"hpz_bits": 8}),
        Variant("three-eighths-values", DELTA | {"qwz_bits": 2}),
        Variant("three-eighths", DELTA | EXACT_SUMS | {"qwz_bits": 2}),
        # What each part of the implementation buys: see scripts/results/overlap.md.
        Variant("blocking", {"overlap": False}),
        Variant("sockets", {"shared_memory": False}),
        Variant("blocking-sockets", {"overlap": False, "shared_memory": False}),
        *(Variant(f"chunks-{count}", {"qgz_chunks": count}) for count in (2, 4, 8)),
        *(Variant(f"blocking-chunks-{count}", {"overlap": False, "qgz_chunks": count}) for count in (2, 4, 8)),
        Variant("lora-stock", lora=True),
        Variant("lora-16", {}, lora=True),
        Variant("lora-8", {"frozen_bits": 8}, lora=True),
        Variant("lora-4", {"frozen_bits": 4}, lora=True),
    )
}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A Llama-style model with random weights; the defaults make 21.4 M parameters."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    vocab_size: int = 2048

    def build(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**dataclasses.asdict(self), max_position_embeddings=2048))


@dataclasses.dataclass
class Measurement:
    """What one rank saw of one measurement.

    step_ends: seconds on the machine's monotonic clock at which steps ended; the first is the start.
    link: bytes this rank's node sent and received over its link in all timed steps.
    counted: cross-node bytes that entered this node by our own accounting, None where it does not run.
    """

    step_ends: list[float]
    link: dict[str, int]
    counted: int | None
    loss: float


class TrainingRun:
    """A model, an optimizer and a way to communicate, on one rank."""

    def __init__(self, variant: Variant, shape: ModelShape, batch_size: int, seq_len: int) -> None:
        self.variant = variant
        self.plugin = ZeroPPPlugin(
            zeropp=False if variant.zeropp is None else variant.zeropp,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
            mixed_precision_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32 if variant.fp32_reduce else torch.bfloat16,
                output_dtype=torch.bfloat16,
            ),
        )
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="bf16", fsdp_plugin=self.plugin, parallelism_config=_parallelism(variant)
        )
        model = _with_lora(shape.build()) if variant.lora else shape.build()
        trainable = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-4, foreach=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if variant.silent:
            _silence(self.model)
        torch.manual_seed(dist.get_rank())
        self.tokens = torch.randint(shape.vocab_size, (batch_size, seq_len))
        self.handle = self.plugin.handle_of(self.model)

    def measure(self, steps: int, micro_steps: int) -> Measurement:
        """Time steps one by one and read the link's counters around them all."""
        dist.barrier()
        if self.handle:
            self.handle.traffic.reset()
        before = link_bytes()
        dist.barrier()
        ends = [time.monotonic()]
        for _ in range(steps):
            loss = self._step(micro_steps)
            ends.append(time.monotonic())
        dist.barrier()
        link = {way: count - before[way] for way, count in link_bytes().items()}
        counted = self.handle.traffic.cross_node_bytes if self.handle else None
        return Measurement(ends, link, counted, loss)

    def memory(self, micro_steps: int) -> dict[str, int]:
        """Bytes this rank holds, by kind, before the optimizer step; `peak` is the most between micro-steps."""
        peak = partial = 0

        def look() -> None:
            nonlocal peak, partial
            peak = max(peak, _live_tensor_bytes() - self._peers_bytes())
            partial = max(partial, self.handle.partial_bytes() if self.handle else 0)

        kinds: dict[str, int] = {}
        self._step(micro_steps, after_micro_step=look, before_update=lambda: kinds.update(self._memory_by_kind()))
        return kinds | {"partial": partial, "peak": peak}

    def profile(self, steps: int, micro_steps: int) -> dict[str, Any]:
        """Where a step's wall time goes on this rank. See profiling.py."""
        from profiling import Profile

        self._step(micro_steps)
        dist.barrier()
        with Profile() as profile:
            for _ in range(steps):
                self._step(micro_steps)
        return profile.summary(steps)

    def _step(self, micro_steps: int, after_micro_step=None, before_update=None) -> float:
        self.accelerator.gradient_accumulation_steps = micro_steps
        for _ in range(micro_steps):
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
                self.accelerator.backward(loss)
                if after_micro_step:
                    after_micro_step()
                if before_update and self.accelerator.sync_gradients:
                    before_update()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return loss.item()

    def _peers_bytes(self) -> int:
        """What other ranks of the node hold, in memory that this rank maps too."""
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
            "residual": self.handle.residual_bytes() if self.handle else 0,
        }


def _parallelism(variant: Variant) -> ParallelismConfig | None:
    if not variant.hsdp:
        return None
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return ParallelismConfig(dp_replicate_size=dist.get_world_size() // ranks_per_node, dp_shard_size=ranks_per_node)


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _live_tensor_bytes() -> int:
    """Bytes of all storages that some tensor of this process, or its gradient, refers to."""
    gc.collect()
    sizes: dict[int, int] = {}
    for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]:
        for held in (tensor, tensor.grad if tensor.is_leaf else None):
            if held is not None and held.device.type == "cpu":
                storage = (held._local_tensor if isinstance(held, DTensor) else held).untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class _SilentAllGather(AllGather):
    """Fills the output with copies of this rank's shard: the computation goes on, nothing is sent."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        for rank, part in enumerate(output_tensor.view(group.size(), -1)):
            if rank != group.rank():  # FSDP2 has put this rank's own part in place
                part.copy_(input_tensor)


class _SilentReduceScatter(ReduceScatter):
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])


def _with_lora(base: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base.to(torch.bfloat16), LoraConfig(r=8, target_modules="all-linear"))


def _silence(model: torch.nn.Module) -> None:
    for unit in find_units(model):
        unit.set_all_gather(_SilentAllGather())
        unit.set_reduce_scatter(_SilentReduceScatter())
