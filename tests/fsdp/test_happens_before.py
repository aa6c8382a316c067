"""On GPUs no two streams touch the same memory unordered: every way through a step, under the happens-before checker.

One process stands for 2 nodes of 8 ranks. ``tests/helpers/happens_before`` says what is looked at, and what is not.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn as nn
from frozen_runs import tiny_llama, with_adapter
from happens_before import Checker, checked_world
from harness import run_ranks
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from toy import EXACT, POLICIES, TinyLM, backward, loss_of, loss_without_head, make_lm, shard, tokens_of

from hf_zeropp import ZeroPPHandle, apply_zeropp, generation_mode, quantize_frozen
from hf_zeropp.comm.hop import Flight
from hf_zeropp.comm.topology import get_topology
from hf_zeropp.frozen.units import frozen_parameters, shard_frozen
from hf_zeropp.fsdp import all_gather

NUM_RANKS, RANKS_PER_NODE = 16, 8
DELTA = {"qwz_mode": "delta", "qwz_bits": 4}
FEEDBACK = {"qgz_error_feedback": "full"}
CHUNKS = {"qgz_chunks": 3, "grad_block": 32}


class Training(NamedTuple):
    """A model under ZeRO++, and its optimizer."""

    model: TinyLM
    handle: ZeroPPHandle
    optimizer: torch.optim.Optimizer

    def step(self, micro_steps: int = 1, loss: Callable[..., torch.Tensor] = loss_of) -> None:
        for micro_step in range(micro_steps):
            self.handle.set_last_micro_step(micro_step == micro_steps - 1)
            # A loss is not read: the host would wait for the GPU, and hide races.
            loss(self.model, tokens_of(0, micro_step)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def training(policy: str = "bf16", prepare: Callable[[TinyLM], Any] = lambda model: None, **settings: Any) -> Training:
    model = make_lm(depth=3)
    prepare(model)
    shard(model, POLICIES[policy])
    handle = apply_zeropp(model, {"ranks_per_node": RANKS_PER_NODE} | settings)
    return Training(model, handle, torch.optim.AdamW(model.parameters(), lr=1e-2))


def steps(policy: str = "bf16", **settings: Any) -> None:
    """Run steps of one micro-step and of two."""
    train = training(policy, **settings)
    for micro_steps in (1, 2, 1):
        train.step(micro_steps)


# ------------------------------------------------------------------------------------------------- ways through a step


def skipped_layers() -> None:
    train = training()
    for path in ([0, 2], [1], [0, 1, 2, 1]):
        train.model.path = path
        train.step(2)


def a_head_without_gradients() -> None:
    train = training()
    train.step(1, loss_without_head)
    train.step(2, loss_without_head)


def activation_checkpointing() -> None:
    train = training(prepare=lambda model: [checkpoint(block) for block in model.blocks])
    train.step(2)
    train.step()


def prefetching() -> None:
    train = training()
    first, second, third = train.model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    train.step(2)
    train.step()


def unshard_by_hand() -> None:
    train = training()
    train.step()
    for block in train.model.blocks:
        block.unshard()
    train.step()
    handles = [block.unshard(async_op=True) for block in train.model.blocks]
    for handle in handles:
        handle.wait()
    train.step()


def unsharding_asynchronously() -> None:
    train = training()
    train.model._set_unshard_async_op(True)
    train.step(2)
    train.step()


def generation(**settings: Any) -> None:
    train = training(**settings)
    for memory_budget in (None, "1MB"):
        train.step()
        with torch.no_grad(), generation_mode(train.model, memory_budget):
            for step in range(3):
                train.model(tokens_of(0, step))
    train.step()


def evaluation() -> None:
    train = training()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            train.model(tokens_of(0))
        loss_of(train.model, tokens_of(0)).backward()
        with mode():
            train.model(tokens_of(0, 1))
        train.step()


def no_sync() -> None:
    train = training()
    for _ in range(2):
        train.model.set_requires_gradient_sync(False)
        loss_of(train.model, tokens_of(0)).backward()
        train.model.set_requires_gradient_sync(True)
        train.step()


def optimizer_in_backward() -> None:
    train = training()
    for param in train.model.parameters():
        optimizer = torch.optim.SGD([param], lr=1e-2)

        def step(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for step in range(3):
        loss_of(train.model, tokens_of(0, step)).backward()


def two_models() -> None:
    actor, critic = training(**DELTA), training()
    for _ in range(2):
        actor.step(2)
        with torch.no_grad():
            critic.model(tokens_of(0))
        critic.step()


def looks_at_gradients() -> None:
    train = training()
    for _ in range(2):
        train.handle.set_last_micro_step(False)
        loss_of(train.model, tokens_of(0)).backward()
        nn.utils.clip_grad_norm_(train.model.parameters(), 1.0)
        train.step()


def stays_unsharded() -> None:
    model = make_lm(depth=3)
    shard(model, POLICIES["bf16"], reshard_after_forward=False)
    handle = apply_zeropp(model, {"ranks_per_node": RANKS_PER_NODE})
    Training(model, handle, torch.optim.AdamW(model.parameters())).step(2)
    Training(model, handle, torch.optim.AdamW(model.parameters())).step()


def two_reduce_inputs() -> None:
    train = training()
    if hasattr(train.model, "set_reduce_scatter_max_input_buffers"):  # since torch 2.13
        train.model.set_reduce_scatter_max_input_buffers(2)
    train.step(2)
    train.step()


def all_reduce_hooks() -> None:
    train = training()
    for block in train.model.blocks:
        block.set_all_reduce_hook(lambda gradient: gradient.mul_(1.0))
    train.step(2)
    train.step()


def loaded_weights() -> None:
    train = training(**DELTA)
    train.step()
    train.model.load_state_dict(train.model.state_dict())
    train.handle.invalidate()
    train.step()


def packed_lora(bits: int | None = 4) -> None:
    model = with_adapter(tiny_llama())
    if bits is not None:
        quantize_frozen(model, bits)
    layers = model.base_model.model.model.layers
    shard_frozen(model, layers, get_topology(RANKS_PER_NODE, "cpu").mesh["node"])
    for module in (*layers, model):
        fully_shard(module, ignored_params=set(frozen_parameters(model)))
    handle = apply_zeropp(model, {"ranks_per_node": RANKS_PER_NODE})
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    for step in range(2):
        for micro_step in range(2):
            handle.set_last_micro_step(micro_step == 1)
            model(input_ids=tokens_of(step, micro_step), labels=tokens_of(step, micro_step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def mixed_dtypes() -> None:
    train = training("fp32", prepare=lambda model: model.blocks[1].norm.to(torch.bfloat16).requires_grad_(False))
    with torch.autocast("cpu", torch.bfloat16):
        train.step(2)


CONFIGURATIONS: dict[str, Callable[[], None]] = {
    "values": steps,
    "values, fp32": functools.partial(steps, "fp32"),
    "values, gradients in 16 bits": functools.partial(steps, "bf16 reduce"),
    "values, fp16": functools.partial(steps, "fp16 reduce"),
    "delta": functools.partial(steps, **DELTA),
    "delta, 8-bit copy": functools.partial(steps, **DELTA, hpz_bits=8),
    "delta, resync": functools.partial(steps, **DELTA, qwz_resync_steps=1),
    "error feedback": functools.partial(steps, **FEEDBACK),
    "rotated": functools.partial(steps, qgz_hadamard=True),
    "chunks": functools.partial(steps, **CHUNKS),
    "chunks, error feedback": functools.partial(steps, **CHUNKS, **FEEDBACK),
    "no secondary shard": functools.partial(steps, hpz_size=None),
    "a copy on 4 ranks": functools.partial(steps, hpz_size=4),
    "a copy on 8 ranks, nodes of 4": functools.partial(steps, hpz_size=8, ranks_per_node=4),
    "nodes of one rank": functools.partial(steps, ranks_per_node=1),
    "nodes of one rank, error feedback": functools.partial(steps, ranks_per_node=1, **FEEDBACK),
    "nothing quantized": functools.partial(steps, **EXACT),
    "generation": generation,
    "generation, delta": functools.partial(generation, **DELTA),
    "dense LoRA": functools.partial(packed_lora, None),
} | {
    way.__name__.replace("_", " "): way
    for way in (
        *(skipped_layers, a_head_without_gradients, activation_checkpointing, prefetching, unshard_by_hand),
        *(unsharding_asynchronously, evaluation, no_sync, optimizer_in_backward, two_models, looks_at_gradients),
        *(stays_unsharded, two_reduce_inputs, all_reduce_hooks, loaded_weights, packed_lora, mixed_dtypes),
    )
}


class Outcome(NamedTuple):
    """What the checker found in one run."""

    races: list[str]
    num_accesses: int
    cpu_s: float


def outcome_of(run: Callable[[], None], num_ranks: int = NUM_RANKS) -> Outcome:
    start_s = time.process_time()
    with checked_world(num_ranks) as checker:
        run()
    return Outcome([str(race) for race in checker.races], checker.num_accesses, time.process_time() - start_s)


def outcomes(rank: int) -> dict[str, Outcome]:
    return {name: outcome_of(run) for name, run in CONFIGURATIONS.items()}
