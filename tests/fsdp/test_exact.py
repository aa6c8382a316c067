"""``qwz_mode="exact"`` in training: the same bits as whole weights, whatever changes them, for the bytes of what changed.

The oracle is the same training with ``qwz_bits=None``, which sends whole weights after every change. Runs that resume are in
test_sharded_checkpoints.py.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from frozen_runs import prepare, tiny_llama, tokens, trainable, with_adapter
from harness import run_ranks
from rich.console import Console
from staleness import WritesData, WritesPointers
from torch.distributed.fsdp import CPUOffloadPolicy
from toy import POLICIES, backward, full, full_weights, gathered_weights, make_lm, shard, tokens_of, train
from two_nodes import on_four_ranks

from hf_zeropp import ZeroPPHandle, apply_zeropp, generation_mode
from hf_zeropp.fsdp.predictions import changed_words_bytes
from hf_zeropp.traffic import GATHER_CROSS, GATHER_RESYNC, Bytes

NODES = {"ranks_per_node": 2, "qgz_bits": None, "qgz_intra_bits": None}
EXACT = NODES | {"qwz_mode": "exact"}
WHOLE = NODES | {"qwz_bits": None}
NUM_STEPS = 40
MANY_STEPS = 200


class Run(NamedTuple):
    """The result of one training run. Exact and whole weights must give equal ones.

    Attributes:
        losses: of every backward pass.
        weights: the masters at the end.
        gathered: the weights with which a forward pass would compute at the end.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    gathered: dict[str, torch.Tensor]

    def equals(self, other: Run) -> bool:
        pairs = ((self.weights, other.weights), (self.gathered, other.gathered))
        same = all(
            one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one) for one, two in pairs
        )
        return same and self.losses == other.losses and self.losses[0] != self.losses[-1]


Train = Callable[[nn.Module, ZeroPPHandle, int], Iterator[float]]
"""Trains, and yields losses."""


def run(
    train: Train, rank: int, settings: dict[str, Any], policy: str = "bf16", dtype=torch.float32, **arguments
) -> Run:
    model = shard(make_lm().to(dtype), POLICIES[policy], **arguments)
    handle = apply_zeropp(model, settings)
    losses = list(train(model, handle, rank))
    model.reshard()
    gathered = gathered_weights(model)
    assert calls(handle, GATHER_RESYNC) == 0 or settings["qwz_mode"] == "exact"
    return Run(losses, full_weights(model), gathered)


def is_exact(train: Train, rank: int, **kwargs) -> bool:
    return run(train, rank, EXACT, **kwargs).equals(run(train, rank, WHOLE, **kwargs))


def calls(handle: ZeroPPHandle, name: str) -> int:
    return handle.traffic.counts.get(name, Bytes()).calls


def steps(model: nn.Module, handle: ZeroPPHandle, rank: int, num_steps: int = 6, lr: float = 1e-3) -> Iterator[float]:
    yield from train(model, torch.optim.AdamW(model.parameters(), lr=lr), rank, range(num_steps))


# ------------------------------------------------------------------------------------------------------- the same bits


def over_many_steps(rank: int, num_steps: int) -> None:
    """With fp32 masters at 1e-4 few of the words change; in pure bf16 at 1e-2 many do."""
    for lr, dtype in ((1e-4, torch.float32), (1e-2, torch.bfloat16)):
        many = functools.partial(steps, num_steps=num_steps, lr=lr)
        assert is_exact(many, rank, policy="bf16" if dtype == torch.float32 else "fp32", dtype=dtype)


def accumulated(model: nn.Module, handle: ZeroPPHandle, rank: int) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        for micro_step in range(3):
            handle.set_last_micro_step(micro_step == 2)
            yield backward(model, rank, 3 * step + micro_step)
        if step != 2:  # as a loss scaler skips a step
            optimizer.step()
        optimizer.zero_grad()


def scenario_accumulation_and_skipped_steps(rank: int) -> None:
    assert is_exact(accumulated, rank)


def edited(model: nn.Module, handle: ZeroPPHandle, rank: int) -> Iterator[float]:
    """Optimizers and edits that move no counter, edits that do, loaded weights, and copies given up by one rank."""
    optimizers = [cls(model.parameters(), lr=0.01) for cls in (WritesData, WritesPointers)]
    for step, optimizer in enumerate(3 * optimizers):
        yield backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.5)
    yield backward(model, rank, 7)
    model.load_state_dict({key: 0.5 * value for key, value in model.state_dict().items()})
    yield backward(model, rank, 8)
    model.blocks[1].down.weight.detach().add_(0.25)
    if rank == 3:
        handle.invalidate()
    with torch.no_grad(), generation_mode(model):
        yield model(tokens_of(0)).float().sum().item()
    yield from steps(model, handle, rank, 3)


def scenario_edits_of_every_kind(rank: int) -> None:
    assert is_exact(edited, rank)


def scenario_other_ways_of_the_same_bytes(rank: int) -> None:
    """Without overlap, through sockets, a copy on each rank, parameters offloaded, and frozen units that thaw."""
    for settings in ({"overlap": False}, {"shared_memory": False}, {"hpz_size": 1}, {"ranks_per_node": 1}):
        assert run(steps, rank, EXACT | settings).equals(run(steps, rank, WHOLE | settings)), settings
    assert is_exact(steps, rank, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert is_exact(thawing, rank, policy="fp32")


def thawing(model: nn.Module, handle: ZeroPPHandle, rank: int) -> Iterator[float]:
    for requires_grad in (False, True):
        model.blocks[0].requires_grad_(requires_grad)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        yield from train(model, optimizer, rank, range(3))


# ---------------------------------------------------------------------------------------------------------- the bytes


def scenario_only_what_changed_crosses(rank: int) -> None:
    """Whole weights cross once. An edit of a single word is a few bytes, and a pass without changes nothing."""
    model = shard(make_lm(hidden=64, inner=256), POLICIES["bf16"])
    handle = apply_zeropp(model, EXACT)
    model(tokens_of(rank))
    assert calls(handle, GATHER_RESYNC) == len(handle.gathers)
    handle.traffic.reset()
    model.reshard()
    model(tokens_of(rank))
    assert calls(handle, GATHER_CROSS) == calls(handle, GATHER_RESYNC) == 0
    if rank == 2:
        with torch.no_grad():
            model.blocks[0].up.weight.to_local()[0, 0] += 1
    model.reshard()
    model(tokens_of(rank))
    # The sizes, of one unit, and the wire: a table of entries, and the block with one change.
    assert calls(handle, GATHER_CROSS) == 2 and calls(handle, GATHER_RESYNC) == 0
    assert 0 < handle.traffic.counts[GATHER_CROSS].cross_node < 64


def scenario_the_prediction_is_what_was_measured(rank: int) -> None:
    model = shard(make_lm(hidden=64, inner=256), POLICIES["bf16"])
    handle = apply_zeropp(model, EXACT)
    assert not any(count.is_measured for count in handle.predict().values())
    list(steps(model, handle, rank, 1, lr=1e-5))
    handle.traffic.reset()
    list(steps(model, handle, rank, 4, lr=1e-5))
    predicted, counted = handle.predict()[GATHER_CROSS], handle.traffic.counts[GATHER_CROSS]
    assert predicted.is_measured and abs(4 * predicted.cross_node - counted.cross_node) <= 4 * len(handle.gathers)
    # A rank receives a quarter of the model from other nodes where whole weights cross.
    assert counted.cross_node / 4 < 0.06 * handle.traffic.model_bytes / 4
    [row] = [row for row in table_rows(handle) if "gather, across nodes" in row]
    assert "(measured)" in row


def words_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.to_local().bfloat16().view(torch.int16).flatten() for param in model.parameters()])


def scenario_the_estimate_is_what_is_sent(rank: int) -> None:
    """Bound: 0.2, since the estimate takes one share for all units, and the steps of trained models (``changed_words_bytes``).

    Beside it 24 bytes for each unit and step: its table, and padding to the rank with the most changes.
    """
    for lr in (1e-6, 3e-5):
        model = shard(make_lm(depth=1, hidden=64, inner=256), POLICIES["bf16"])
        handle = apply_zeropp(model, EXACT)
        list(steps(model, handle, rank, 3, lr=lr))
        model(tokens_of(rank))  # sends the last of these steps
        model.reshard()
        before = words_of(model)
        list(steps(model, handle, rank, 1, lr=lr))
        share = (words_of(model) != before).double().mean().item()
        handle.traffic.reset()
        model(tokens_of(rank))
        expected = 0
        for gather in handle.gathers:
            num_bytes = changed_words_bytes(gather.layouts(torch.bfloat16), share)
            assert num_bytes is not None
            expected += gather.hops.cross_hop.peers.bytes_of(num_bytes).cross_node
        counted = handle.traffic.counts[GATHER_CROSS].cross_node
        assert 0.95 * expected <= counted <= 1.2 * expected + 24 * len(handle.gathers), (lr, share, counted, expected)


def table_rows(handle: ZeroPPHandle) -> list[str]:
    console = Console(width=120, file=io.StringIO())
    console.print(handle.traffic.table(handle.predict()))
    return console.file.getvalue().splitlines()


def scenario_one_exchange_of_sizes(rank: int) -> None:
    """The sizes of all units that are due cross together, once per step."""
    model = shard(make_lm(depth=6), POLICIES["bf16"])
    handle = apply_zeropp(model, EXACT)
    list(steps(model, handle, rank, 1))
    handle.traffic.reset()
    list(steps(model, handle, rank, 3))
    assert calls(handle, GATHER_CROSS) == 3 * (1 + len(handle.gathers))


test_exact = pytest.mark.thorough("*edits_of_every_kind*", "*other_ways_of_the_same_bytes*")(
    on_four_ranks(__name__, env={"ZEROPP_CHECK": "1"})
)


@pytest.mark.thorough
@pytest.mark.parametrize("num_steps", [NUM_STEPS, pytest.param(MANY_STEPS, marks=pytest.mark.long)])
def test_over_many_steps(num_steps):
    run_ranks(over_many_steps, 4, num_steps, limit_s=300)


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [2, 6, 8])
def test_any_number_of_nodes(num_ranks):
    run_ranks(over_many_steps, num_ranks, 6)


def lora(rank: int, bits: int | None, settings: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train an adapter, add a second one, and train that."""
    model = with_adapter(tiny_llama(), ("default", "other"))
    accelerator, _, model, _ = prepare(model, mixed_precision="bf16", **settings, frozen_bits=bits)
    losses = []
    for adapter in ("default", "other", "default"):
        model.set_adapter(adapter)
        optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
        for step in range(4):
            loss = model(input_ids=tokens(seed=step), labels=tokens(seed=step)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {name: full(param.detach()) for name, param in model.named_parameters() if "lora" in name}


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [None, 4])
def test_adapters(bits):
    exact, whole = (run_ranks(lora, 4, bits, settings, init=False) for settings in (EXACT, WHOLE))
    for (losses, weights), (expected_losses, expected) in zip(exact, whole, strict=True):
        assert losses == expected_losses and all(torch.equal(weights[name], expected[name]) for name in expected)
