"""``qwz_intra_bits=None``: the backend's own all-gathers move weights within the node, and training keeps every bit.

Two oracles: the same training with the wires of ``qwz_intra_bits=8``, which each rank decodes for itself, and stock FSDP2 where
nothing is quantized.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import each_case, run_ranks
from toy import EXACT, POLICIES, full_weights, gathered_weights, make_lm, shard, train

from hf_zeropp import apply_zeropp
from hf_zeropp.traffic import GATHER_CROSS, GATHER_NODE, Bytes

DELTA = {"qwz_mode": "delta", "qwz_bits": 4}
MODES: dict[str, dict[str, Any]] = {
    "values": {},
    "values of 4 bits": {"qwz_bits": 4},
    "values, unquantized": {"qwz_bits": None},
    "delta": DELTA,
    "delta, 8-bit copy": DELTA | {"hpz_bits": 8},
    "exact": {"qwz_mode": "exact"},
    "no secondary shard": {"hpz_size": None},
    "hops that block": {"overlap": False, **DELTA},
    "a copy on all ranks": {"hpz_size": "world"},
    "a copy on two nodes": {"hpz_size": 2, "ranks_per_node": 1},
    "copies on parts of a node": {"hpz_size": 1},
    "nodes of one rank": {"ranks_per_node": 1},
}
SIZES: dict[str, dict[str, int]] = {
    "uneven": {},
    "whole wires": {"hidden": 96, "inner": 96},
    "few": {"hidden": 2, "inner": 3},
}
"""Models. The shards of the second one have no padding between parameters in 2 x 2 ranks; ranks have empty ones of the third."""


def trained(
    rank: int, settings: dict[str, Any], policy: str, sizes: str
) -> tuple[list[float], dict, dict, Bytes | None]:
    """Return losses, the masters, the weights that a forward pass computes with, and the bytes of a step's cross hops."""
    model = shard(make_lm(**SIZES[sizes]), POLICIES[policy])
    handle = apply_zeropp(model, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, rank, range(3), handle, micro_steps=2)
    handle.traffic.reset()
    losses += train(model, optimizer, rank, (3,), handle, micro_steps=2)
    counts, predicted = handle.traffic.counts, handle.predict(2)
    assert counts.get(GATHER_NODE) == predicted.get(GATHER_NODE)
    if settings.get("qwz_mode") != "exact":
        assert counts.get(GATHER_CROSS) == predicted.get(GATHER_CROSS)
    crossed = counts.get(GATHER_CROSS)
    return losses, full_weights(model), gathered_weights(model), crossed


def keeps_every_bit(rank: int, world_size: int, ranks_per_node: int, mode: str, policy: str, sizes: str) -> None:
    settings = {"ranks_per_node": ranks_per_node, **MODES[mode]}
    if settings.get("hpz_size") == "world":
        settings["hpz_size"] = world_size
    wires = trained(rank, settings | {"qwz_intra_bits": 8, "shared_memory": False}, policy, sizes)
    native = trained(rank, settings | {"qwz_intra_bits": None}, policy, sizes)
    assert native[0] == wires[0] and len(set(wires[0])) == len(wires[0])
    for one, two in zip(native[1:3], wires[1:3], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in two)
    assert native[3] == wires[3]


def run_cases(rank: int, world_size: int, ranks_per_node: int, cases: list[tuple[str, str, str]]) -> None:
    each_case(cases, lambda case: keeps_every_bit(rank, world_size, ranks_per_node, *case))


@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (6, 2), (6, 3)], ids=["2 x 2", "3 x 2", "2 x 3"])
def test_native_gathers_give_the_weights_of_wires(world_size, ranks_per_node):
    """Modes with dtypes and sizes in turn, under the check that compares copies with the masters."""
    policies, sizes = itertools.cycle(["bf16", "fp32", "fp16 reduce", "bf16 reduce"]), itertools.cycle(SIZES)
    cases = list(zip(MODES, policies, sizes, strict=False))
    run_ranks(run_cases, world_size, world_size, ranks_per_node, cases, env={"ZEROPP_CHECK": "1"}, limit_s=300)


def beside_stock(rank: int) -> None:
    """Gathered weights are those of stock FSDP2, bit for bit. Losses in fp32 differ by the order of sums of gradients alone."""
    for policy, sizes in zip(POLICIES, itertools.cycle(SIZES), strict=False):
        weights, losses = [], []
        for settings in (None, {"hpz_size": "node"}, {"qwz_mode": "exact"}):
            model = shard(make_lm(**SIZES[sizes]), POLICIES[policy])
            if settings is not None:
                native = EXACT | {"hpz_size": "node", "qwz_intra_bits": None, "ranks_per_node": 2} | settings
                apply_zeropp(model, native)
            weights.append(gathered_weights(model))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses.append(train(model, optimizer, rank, range(4)))
        for ours in weights[1:]:
            assert all(torch.equal(ours[name], weight) for name, weight in weights[0].items()), (policy, sizes)
        assert losses[1] == losses[2]
        assert losses[0][0] == losses[1][0] != losses[0][-1]
        if policy == "fp32":
            torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-6, atol=1e-6)


def test_unquantized_native_gathers_are_those_of_stock():
    run_ranks(beside_stock, 4)
