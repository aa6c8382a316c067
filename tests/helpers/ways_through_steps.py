"""Ways through training steps, each of which takes FSDP2 and the package through streams in another order.

``test_happens_before.py`` runs them under the checker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from checked_training import (
    DELTA,
    FOUR_REPLICAS,
    NATIVE,
    QUANTIZED,
    RANKS_PER_NODE,
    REPLICAS,
    SUMS,
    WHOLE_WIRES,
    Training,
    apply,
    training,
)
from frozen_runs import tiny_llama, with_adapter
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from toy import EXACT, HIDDEN, POLICIES, TinyLM, loss_of, loss_without_head, make_lm, shard, tokens_of

from hf_zeropp import generation_mode, quantize_frozen
from hf_zeropp.comm.topology import get_topology
from hf_zeropp.frozen.units import frozen_parameters, shard_frozen


def steps(policy: str = "bf16", counts: tuple[int, ...] = (1, 2, 1), **settings: Any) -> None:
    """Run steps of one micro-step and of two, or of other ``counts``."""
    train = training(policy, **settings)
    for micro_steps in counts:
        train.step(micro_steps)


def skipped_layers(**settings: Any) -> None:
    train = training(**settings)
    for path in ([0, 2], [1], [0, 1, 2, 1]):
        train.model.path = path
        train.step(2)


def decay_of_a_skipped_layer(**settings: Any) -> None:
    """An optimizer changes weights of the last layer, which the pass did not use, since their gradients are zeros."""
    train = training(**settings)
    for path in ([0, 1, 2], [0, 1], [0, 1]):
        train.model.path = path
        loss_of(train.model, tokens_of(0)).backward()
        train.optimizer.step()
        train.optimizer.zero_grad(set_to_none=False)


def a_head_without_gradients(**settings: Any) -> None:
    train = training(**settings)
    train.step(1, loss_without_head)
    train.step(2, loss_without_head)


def activation_checkpointing() -> None:
    train = training(prepare=lambda model: [checkpoint(block) for block in model.blocks])
    train.step(2)
    train.step()


def reentrant_checkpointing() -> None:
    """Around the calls of units: FSDP2's hooks run in nested backward passes."""
    train = training()
    train.model.call = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    train.step(2)
    train.step()


def roots_in_one_pass(loss: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor], counts: tuple[int, ...]) -> None:
    """Train three models, which FSDP2 knows as roots with streams of their own, with one loss. They are used one by one first."""
    roots = nn.ModuleList(make_lm(depth=2) for _ in range(3))
    for root in roots:
        shard(root, POLICIES["bf16"])
    handle = apply(roots)
    optimizer = torch.optim.AdamW(roots.parameters())
    with torch.no_grad():
        for root in roots:
            root(tokens_of(0))
    for micro_steps in counts:
        for micro_step in range(micro_steps):
            handle.set_last_micro_step(micro_step == micro_steps - 1)
            loss(roots, tokens_of(0, micro_step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def one_loss_over_roots() -> None:
    """Each root is reduced when the pass through all of them has ended."""
    roots_in_one_pass(lambda roots, tokens: torch.stack([loss_of(root, tokens) for root in roots]).sum(), (2, 1))


def roots_that_take_turns() -> None:
    """The reductions of one root stand between those of another one."""

    def loss(roots: nn.ModuleList, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(2, 5, HIDDEN, requires_grad=True)
        for index in range(2):
            for root in roots:
                x = root.blocks[index](x)
        return x.square().mean()

    roots_in_one_pass(loss, (2, 1))


def passes_that_are_not_the_last() -> None:
    """FSDP2 does not wait for reductions at their end."""
    train = training()
    for is_last in (False, False, True):
        train.model.set_is_last_backward(is_last)
        loss_of(train.model, tokens_of(0)).backward()
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


def secondary_shards_of_two_streams() -> None:
    """Weights cross on the caller's stream, and are decoded on FSDP2's."""
    train = training()
    for step in range(2):
        train.step()
        side = torch.cpu.Stream()
        side.wait_stream(torch.cpu.current_stream())
        with torch.no_grad(), torch.cpu.stream(side), train.handle.generating():
            pass
        with torch.no_grad():
            train.model(tokens_of(0, step))


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


def looks_at_gradients(**settings: Any) -> None:
    train = training(**settings)
    for _ in range(2):
        train.handle.set_last_micro_step(False)
        loss_of(train.model, tokens_of(0)).backward()
        train.handle.deliver()
        nn.utils.clip_grad_norm_(train.model.parameters(), 1.0)
        train.step()


def stays_unsharded() -> None:
    model = make_lm(depth=3)
    shard(model, POLICIES["bf16"], reshard_after_forward=False)
    handle = apply(model)
    Training(model, handle, torch.optim.AdamW(model.parameters())).step(2)
    Training(model, handle, torch.optim.AdamW(model.parameters())).step()


def two_reduce_inputs() -> None:
    train = training()
    if hasattr(train.model, "set_reduce_scatter_max_input_buffers"):  # since torch 2.13
        train.model.set_reduce_scatter_max_input_buffers(2)
    train.step(2)
    train.step()


def gradient_hooks() -> None:
    train = training()
    for param in train.model.blocks[1].parameters():
        param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(1.0))
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
    handle = apply(model)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    for step in range(2):
        for micro_step in range(2):
            handle.set_last_micro_step(micro_step == 1)
            model(input_ids=tokens_of(step, micro_step), labels=tokens_of(step, micro_step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def mixed_dtypes() -> None:
    """FSDP2 gathers a unit of several dtypes itself."""
    train = training("fp32", prepare=lambda model: model.blocks[1].up.bfloat16().requires_grad_(False))
    with torch.autocast("cpu", torch.bfloat16):
        train.step(2)


def hooks_on_all_reduces(handle_of: Callable[[nn.Module], Any] | None = None) -> None:
    """Run a step of two micro-steps, with FSDP2's hook that runs on its stream for all-reduces."""
    model = make_lm(depth=3)
    shard(model, POLICIES["bf16"])
    for block in model.blocks:
        block.set_all_reduce_hook(lambda gradient: gradient.mul_(1.0))
    (handle_of or apply)(model)
    for step in range(2):
        loss_of(model, tokens_of(0, step)).backward()


def optimizers_in_some_units() -> None:
    """One block steps in a hook, on FSDP2's stream for all-reduces, and delivers what the others have accumulated."""
    train = training()
    own = list(train.model.blocks[1].parameters())
    inner = torch.optim.SGD(own, lr=1e-2)
    rest = torch.optim.AdamW(set(train.model.parameters()).difference(own), lr=1e-2, foreach=True)
    arrived: list[nn.Parameter] = []

    def step_behind_the_last(param: nn.Parameter) -> None:
        arrived.append(param)
        if len(arrived) == 3 * len(own):  # three micro-steps
            inner.step()

    for param in own:
        param.register_post_accumulate_grad_hook(step_behind_the_last)
    for _ in range(2):
        arrived.clear()
        train._replace(optimizer=rest).step(3)
        inner.zero_grad()


def optimizers_that_free_what_they_read() -> None:
    """Each parameter steps in a hook in the last micro-step, and frees the gradient that the first one made."""
    train = training()
    is_last = False

    def step_and_free(param: nn.Parameter) -> None:
        if is_last:
            optimizers[param].step()
            optimizers[param].zero_grad()

    optimizers = {param: torch.optim.SGD([param], lr=1e-2) for param in train.model.parameters()}
    for param in optimizers:
        param.register_post_accumulate_grad_hook(step_and_free)
    for _ in range(2):
        for is_last in (False, True):
            train.handle.set_last_micro_step(is_last)
            loss_of(train.model, tokens_of(0)).backward()


def optimizer_on_a_side_stream(**settings: Any) -> None:
    """FSDP2 is told of the end of the optimizer's step by an event, and the stream of the model does not wait."""
    train = training(**settings)
    side = torch.cpu.Stream()
    for step in range(3):
        loss_of(train.model, tokens_of(0, step)).backward()
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side):
            train.optimizer.step()
        train.model.set_post_optim_event(side.record_event())
        gradients = [param.grad for param in train.model.parameters()]  # held until the next pass, as FSDP2 asks
        train.optimizer.zero_grad()
    del gradients


def delivers_what_was_not_dropped() -> None:
    """One gradient of each unit is dropped, and then the rest is delivered, behind a pass that is not FSDP2's last."""
    train = training()
    train.model.set_is_last_backward(False)
    train.handle.set_last_micro_step(False)
    loss_of(train.model, tokens_of(0)).backward()
    for unit in train.handle.units:
        unit.trainable[0].grad = None
    train.handle.deliver()
    train.model.set_is_last_backward(True)
    train.step()


class Experts(nn.Module):
    """Two experts on each rank, one behind the other. Every rank of ``parts`` holds other ones."""

    def __init__(self, parts: DeviceMesh) -> None:
        super().__init__()
        self.weights = nn.Parameter(DTensor.from_local(torch.randn(2, HIDDEN, HIDDEN), parts, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weights.to_local() if isinstance(self.weights, DTensor) else self.weights
        for weight in weights:
            x = (x @ weight).tanh()
        return x


def two_meshes(counts: tuple[int, ...] = (1, 3, 1), num_replicas: int = 1, **settings: Any) -> None:
    """Dense weights lie on all ranks of a replica. Experts lie on every fourth of them, and are units of their own."""
    size = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, size // 4, 4), mesh_dim_names=("replicate", "efsdp", "ep"))
    experts_mesh = mesh["efsdp"] if num_replicas == 1 else mesh["replicate", "efsdp"]
    experts = []

    def add_experts(model: TinyLM) -> None:
        for block in model.blocks:
            experts.append(fully_shard(Experts(mesh["ep"]), mesh=experts_mesh, mp_policy=POLICIES["bf16"]))
            experts[-1].set_gradient_divide_factor(float(dist.get_world_size()))
            block.down = nn.Sequential(block.down, experts[-1])

    train = training(prepare=add_experts, num_replicas=num_replicas, **settings)
    # One operator takes no tensors of two meshes.
    own = {param for module in experts for param in module.parameters()}
    groups = [{"params": [param for param in train.model.parameters() if (param in own) == of]} for of in (False, True)]
    train = train._replace(optimizer=torch.optim.AdamW(groups, lr=1e-2, foreach=True))
    for micro_steps in counts:
        train.step(micro_steps)


CONFIGURATIONS: dict[str, Callable[[], None]] = {
    "values": steps,
    "values, fp32": functools.partial(steps, "fp32"),
    "values, gradients in 16 bits": functools.partial(steps, "bf16 reduce"),
    "values, fp16": functools.partial(steps, "fp16 reduce"),
    "delta": functools.partial(steps, **DELTA),
    "delta, 8-bit copy": functools.partial(steps, **DELTA, hpz_bits=8),
    "exact": functools.partial(steps, qwz_mode="exact"),
    "no secondary shard": functools.partial(steps, hpz_size=None),
    "a copy on 4 ranks": functools.partial(steps, hpz_size=4),
    "a copy on 8 ranks, nodes of 4": functools.partial(steps, hpz_size=8, ranks_per_node=4),
    "nodes of one rank": functools.partial(steps, ranks_per_node=1),
    "sums in bf16": functools.partial(steps, counts=(3, 1), **SUMS),
    "looks at gradients, sums in bf16": functools.partial(looks_at_gradients, **SUMS),
    "nothing quantized": functools.partial(steps, **EXACT),
    "native sums, gradients in 16 bits": functools.partial(steps, "bf16 reduce", counts=(3, 1), **NATIVE, **SUMS),
    "quantized within the node": functools.partial(steps, **QUANTIZED),
    "quantized within the node, delta": functools.partial(steps, **QUANTIZED, **DELTA),
    "quantized within the node, exact": functools.partial(steps, **QUANTIZED, qwz_mode="exact"),
    "quantized within the node, no secondary shard": functools.partial(steps, **QUANTIZED, hpz_size=None),
    "quantized within the node, skipped layers": functools.partial(skipped_layers, **QUANTIZED),
    "native, a copy on 8 ranks, nodes of 4": functools.partial(steps, **NATIVE, hpz_size=8, ranks_per_node=4),
    "native, secondary shards of weights": functools.partial(steps, **NATIVE, sizes=WHOLE_WIRES, qwz_mode="exact"),
    "accumulation on the rank": functools.partial(steps, counts=(3, 1), qgz_accumulate="rank", **NATIVE),
    "weights and gradients on the rank": functools.partial(steps, counts=(3, 1), qgz_accumulate="whole", **NATIVE),
    "accumulation on the rank, gradients in 16 bits": functools.partial(
        steps, "bf16 reduce", counts=(3, 1), qgz_accumulate="rank"
    ),
    "hops on one stream": functools.partial(steps, overlap=False),
    "hops on one stream, exact": functools.partial(steps, overlap=False, qwz_mode="exact"),
    "optimizer on a side stream, exact": functools.partial(optimizer_on_a_side_stream, qwz_mode="exact"),
    "optimizer on a side stream, hops on one stream": functools.partial(optimizer_on_a_side_stream, overlap=False),
    "generation": generation,
    "generation, delta": functools.partial(generation, **DELTA),
    "generation, exact": functools.partial(generation, qwz_mode="exact"),
    "dense LoRA": functools.partial(packed_lora, None),
    "decay of a skipped layer, delta": functools.partial(decay_of_a_skipped_layer, **DELTA),
    "decay of a skipped layer, exact": functools.partial(decay_of_a_skipped_layer, qwz_mode="exact"),
    "replicas": functools.partial(steps, counts=(1, 3, 1), **REPLICAS),
    "replicas, exact": functools.partial(steps, counts=(1, 3, 1), **REPLICAS, qwz_mode="exact"),
    "replicas, delta": functools.partial(steps, counts=(1, 3), **REPLICAS, **DELTA),
    "replicas, gradients and sums in bf16": functools.partial(steps, "bf16 reduce", counts=(3, 1), **REPLICAS, **SUMS),
    "replicas, quantized within the node": functools.partial(steps, counts=(1, 3), **REPLICAS, **QUANTIZED),
    "replicas, accumulation on the rank": functools.partial(steps, counts=(3, 1), **REPLICAS, qgz_accumulate="rank"),
    "replicas, hops on one stream": functools.partial(steps, counts=(1, 3), **REPLICAS, overlap=False),
    "replicas, skipped layers": functools.partial(skipped_layers, **REPLICAS),
    "replicas, a head without gradients": functools.partial(a_head_without_gradients, **REPLICAS),
    "replicas, looks at gradients": functools.partial(looks_at_gradients, **REPLICAS),
    "replicas in two rounds": functools.partial(steps, counts=(1, 3, 1), **FOUR_REPLICAS),
    "replicas, nothing quantized": functools.partial(steps, counts=(1, 3), sizes=WHOLE_WIRES, **REPLICAS, **EXACT),
    "replicas, an all-reduce": functools.partial(steps, counts=(1, 3, 1), sizes=WHOLE_WIRES, **FOUR_REPLICAS, **EXACT),
    "replicas, an all-reduce in 16 bits": functools.partial(
        steps, "bf16 reduce", counts=(3, 1), **FOUR_REPLICAS, **EXACT
    ),
    "replicas, an all-reduce, looks at gradients": functools.partial(looks_at_gradients, **FOUR_REPLICAS, **EXACT),
    "two meshes, exact": functools.partial(two_meshes, qwz_mode="exact"),
    "two meshes, exact, hops on one stream": functools.partial(two_meshes, qwz_mode="exact", overlap=False),
    "two meshes in replicas, exact": functools.partial(two_meshes, **REPLICAS, qwz_mode="exact"),
} | {
    way.__name__.replace("_", " "): way
    for way in (
        *(skipped_layers, a_head_without_gradients, activation_checkpointing, prefetching, unshard_by_hand),
        *(decay_of_a_skipped_layer, stays_unsharded, two_reduce_inputs, secondary_shards_of_two_streams),
        *(reentrant_checkpointing, one_loss_over_roots, roots_that_take_turns, passes_that_are_not_the_last),
        *(unsharding_asynchronously, evaluation, no_sync, optimizer_in_backward, two_models, looks_at_gradients),
        *(loaded_weights, packed_lora, mixed_dtypes, hooks_on_all_reduces, gradient_hooks, two_meshes),
        *(optimizers_in_some_units, optimizers_that_free_what_they_read, optimizer_on_a_side_stream),
        delivers_what_was_not_dropped,
    )
}
