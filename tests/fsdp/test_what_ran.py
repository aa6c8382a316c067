"""Ranks that ran different units raise before mixed gradients are applied: layers of equal shape hide from every hop.

The ranks of one node part earlier, in a gather, and raise there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from harness import expect_errors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import EXACT, HIDDEN, Block, backward, make_lm, shard, tokens_of
from two_nodes import on_four_ranks

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.frozen.units import frozen_parameters, shard_frozen

SETTINGS = {
    "default": EXACT | {"hpz_size": "node"},
    "blocking": EXACT | {"hpz_size": "node", "overlap": False},
    "no copies": EXACT,
}


def trained_once(model: nn.Module, settings: dict) -> tuple[ZeroPPHandle, torch.optim.Optimizer]:
    return apply_zeropp(model, settings | {"ranks_per_node": 2}), torch.optim.SGD(model.parameters(), lr=0.1)


def must_not_step(optimizer: torch.optim.Optimizer, run: Callable[[], object]) -> None:
    """Run a backward pass that ranks run differently, and a step. It must raise before weights change."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.to_local().clone() for param in params]
    try:
        run()
        optimizer.step()
    finally:
        assert all(map(torch.equal, before, (param.to_local() for param in params)))


def skips_in_an_earlier_micro_step(rank: int, settings: dict) -> None:
    model = shard(make_lm(depth=4))
    handle, optimizer = trained_once(model, settings)

    def run() -> None:
        handle.set_last_micro_step(False)
        model.path = [0, 1, 2] if rank < 2 else [0, 1, 3]
        backward(model, rank)
        handle.set_last_micro_step(True)
        model.path = [0, 1, 2]
        backward(model, rank)

    must_not_step(optimizer, run)


def another_order_of_layers(rank: int, settings: dict) -> None:
    model = shard(make_lm(depth=3))
    _, optimizer = trained_once(model, settings)
    model.path = [0, 1, 2] if rank != 3 else [1, 0, 2]
    must_not_step(optimizer, lambda: backward(model, rank))


class TwoHeads(nn.Module):
    """Two heads of equal shape on one trunk, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = Block(), nn.ModuleList(Block() for _ in range(2))
        for block in (self.trunk, *self.heads):
            fully_shard(block)
        fully_shard(self)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]


def loss_of_another_head(rank: int, settings: dict) -> None:
    """The forward passes are the same, and what is reduced is not."""
    model = TwoHeads()
    _, optimizer = trained_once(model, settings)
    outputs = model(torch.randn(2, HIDDEN))
    must_not_step(optimizer, outputs[rank % 2].square().mean().backward)


DIFFERENCES = {
    skips_in_an_earlier_micro_step: ["forward passes of module blocks.2: 1 on ranks [0, 1], 0 on ranks [2, 3]"],
    another_order_of_layers: ["blocks.1", "on ranks [0, 1, 2]", "on rank 3"],
    loss_of_another_head: [
        "reductions of unit heads.0: 1 on ranks [0, 2], 0 on ranks [1, 3]",
        "reductions of unit heads.1: 0 on ranks [0, 2], 1 on ranks [1, 3]",
    ],
}
# The ranks of a node wait for each other in gathers of their first step.
PARTING = DIFFERENCES | {another_order_of_layers: ["gather unit blocks.0", "rank 3 is about to gather unit blocks.1"]}


@pytest.mark.thorough("*blocking", "*-no copies", "another_order*")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda function: function.__name__)
def test_every_rank_raises_before_the_step(difference, settings):
    if difference is loss_of_another_head and settings == "no copies":
        pytest.skip("A rank that gathers less often makes the others wait in a gather, until the timeout.")
    began = time.monotonic()
    expected = PARTING if settings == "default" else DIFFERENCES
    for error in expect_errors(difference, 4, SETTINGS[settings], timeout_s=20.0):
        assert error.startswith("DisagreementError"), error
        assert all(words in error for words in expected[difference]), error
    assert time.monotonic() - began < 60, "it should not have taken a timeout"


def scenario_what_ranks_run_alike_is_no_difference(rank: int) -> None:
    """And evaluation takes other layers on each node: what stays within a node is not compared."""
    for settings in (SETTINGS["default"], SETTINGS["no copies"]):
        model = shard(make_lm(depth=4))
        _, optimizer = trained_once(model, settings)
        for step in range(3):
            model.path = [index for index in range(4) if index != step]
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.path = [0, 1, 2, 3]
                model(tokens_of(rank))
                if settings["hpz_size"] is not None:
                    model.path = [0, 1] if rank < 2 else [2, 3, 3]
                    model(tokens_of(rank))


# A rank that leaves out what the others of its node run: all ranks raise within seconds, and the error names the module. The
# everyday case is a batch without images on one rank, which skips the vision tower. Whole nodes may skip what is frozen.

WAYS = {
    "shared memory": {},
    "wires": {"shared_memory": False},
    "native": {"qwz_intra_bits": None},
    "exact": {"preset": "exact"},
}


def behind_a_step(rank: int, settings: dict, is_frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of four blocks behind its first step. Blocks 0 and 1 may be frozen: units of their node alone."""
    model = make_lm(depth=4)
    if is_frozen:
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        node_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cross", "node"))["node"]
        shard_frozen(model, model.blocks[:2], node_mesh)
        for module in (*model.blocks[2:], model):
            fully_shard(module, ignored_params=set(frozen_parameters(model)))
    else:
        shard(model)
    apply_zeropp(model, {"ranks_per_node": 2} | settings)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    take_step(model, optimizer, rank, 0)
    return model, optimizer


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    loss = backward(model, rank, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def one_rank_skips_a_block(rank: int, settings: dict, is_frozen: bool) -> None:
    model, optimizer = behind_a_step(rank, settings, is_frozen)
    model.path = [0, 2, 3] if rank == 1 else [0, 1, 2, 3]
    take_step(model, optimizer, rank, 1)


def one_rank_evaluates(rank: int, settings: dict, is_frozen: bool) -> None:
    model, _ = behind_a_step(rank, settings, is_frozen)
    with torch.set_grad_enabled(rank != 1):
        model(tokens_of(rank))


def another_order_without_gradients(rank: int, settings: dict, is_frozen: bool) -> None:
    """The blocks have equal shapes, so ranks compute with each other's, and raise at the next question."""
    model, optimizer = behind_a_step(rank, settings, is_frozen)
    with torch.no_grad():
        model(tokens_of(rank))  # the copies of the new weights land
        model.path = [1, 0, 2, 3] if rank == 1 else [0, 1, 2, 3]
        model(tokens_of(rank))
    model.path = [0, 1, 2, 3]
    take_step(model, optimizer, rank, 1)


PARTED = {
    one_rank_skips_a_block: ["about to gather unit blocks.1", "Give such a batch a placeholder"],
    one_rank_evaluates: ["rank 1 is about to run a forward pass of the model (FSDPTinyLM) without gradients"],
    another_order_without_gradients: ["ranks [0, 1], which are one node, gathered different units", "blocks."],
}
CASES = [(one_rank_skips_a_block, way, kind) for way in WAYS for kind in ("trained", "frozen")]
CASES += [(one_rank_evaluates, way, "trained") for way in ("shared memory", "wires")]
CASES += [
    (another_order_without_gradients, "wires", "trained"),
    (another_order_without_gradients, "shared memory", "frozen"),
]


@pytest.mark.thorough("one_rank_skips*-trained", "one_rank_skips_a_block-[wne]*", "*-wires-trained")
@pytest.mark.parametrize(
    ("part", "way", "kind"), CASES, ids=[f"{case[0].__name__}-{case[1]}-{case[2]}" for case in CASES]
)
def test_all_ranks_raise_where_those_of_a_node_part(part, way, kind):
    """The other node learns of it too, and nobody waits for the timeout."""
    began = time.monotonic()
    for error in expect_errors(part, 4, WAYS[way], kind == "frozen", timeout_s=100.0):
        assert error.startswith("DisagreementError"), error
        assert all(words in error for words in PARTED[part]), error
    assert time.monotonic() - began < 80, "it should not have taken a timeout"


def scenario_a_whole_node_may_skip_what_is_frozen(rank: int) -> None:
    model, optimizer = behind_a_step(rank, {}, is_frozen=True)
    for step in range(1, 4):
        model.path = [0, 2, 3] if step == 2 and rank < 2 else [0, 1, 2, 3]
        assert take_step(model, optimizer, rank, step) < 10


test_ranks_that_run_alike = on_four_ranks(__name__)
