"""Cross hops on streams beside node hops, on real gloo ranks that take the ways for GPUs: the same bits, one order of calls.

That no two streams touch the same memory unordered is looked at in test_happens_before.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from happens_before.clocks import Timeline
from happens_before.memory import Memory
from happens_before.replaced import has_streams, replaced, streams_of_torch
from harness import run_ranks
from toy import POLICIES, backward, full_weights, loss_without_head, make_lm, shard, tokens_of

from hf_zeropp import apply_zeropp
from hf_zeropp.comm.hop import Hop
from hf_zeropp.fsdp.weights.freshness import Change

DELTA = {"qwz_mode": "delta", "qwz_bits": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "values": {},
    "delta": DELTA,
    "exact": {"qwz_mode": "exact"},
    "no secondary shard": {"hpz_size": None},
    "nodes of one rank": {"ranks_per_node": 1, **DELTA},
    "values, native node hop": {"qwz_intra_bits": None},
    "delta, native node hop": {"qwz_intra_bits": None, **DELTA},
    "exact, native node hop": {"qwz_intra_bits": None, "qwz_mode": "exact"},
    "no secondary shard, native node hop": {"qwz_intra_bits": None, "hpz_size": None},
}

POLICIES_OF = {"values": ("bf16", "bf16 reduce", "fp16 reduce")}


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let the package and FSDP2 take their ways for GPUs, on streams that run everything at once."""
    timeline = Timeline()
    streams = streams_of_torch(timeline, Memory(timeline), SimpleNamespace(launched=None))
    with replaced(streams, has_streams(timeline)):
        yield


def train(rank: int, policy: str, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Train for some steps of one and two micro-steps; return the weights, and the bytes that crossed nodes."""
    model = shard(make_lm(depth=3), POLICIES[policy])
    handle = apply_zeropp(model, {"ranks_per_node": 2, **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, micro_steps in enumerate((1, 2, 1)):
        model.path = [2, 0] if step == 1 else [0, 1, 2]
        for micro_step in range(micro_steps):
            handle.set_last_micro_step(micro_step == micro_steps - 1)
            if step == 2:
                backward(model, rank, step, loss_without_head)
            else:
                backward(model, rank, 10 * step + micro_step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(tokens_of(rank))
    return full_weights(model), handle.traffic.cross_node_bytes


def differences(rank: int) -> dict[str, list[str]]:
    """Return for all settings the parameters, and the bytes, in which the ways for GPUs differ from those for CPUs."""
    found = {}
    for name, settings in SETTINGS.items():
        for policy in POLICIES_OF.get(name, ("bf16",)):
            # Overlap lets units that a pass skips cross with the others, on both devices. A delta more is another rounding.
            for overlap in (False, True):
                # "auto" within a node means another thing on GPUs.
                within = {"qwz_intra_bits": 8, "qgz_intra_bits": 8}
                settings = within | settings | {"overlap": overlap, "shared_memory": False}
                weights, num_bytes = train(rank, policy, settings)
                with as_on_a_gpu():
                    others, others_bytes = train(rank, policy, settings)
                wrong = [key for key, value in weights.items() if not torch.equal(value, others[key])]
                if num_bytes != others_bytes:
                    wrong.append(f"{others_bytes} bytes in place of {num_bytes}")
                found[f"{name}, {policy}, overlap={overlap}"] = wrong
    return found


@pytest.mark.thorough
def test_streams_change_no_bit():
    for found in run_ranks(differences, 4, limit_s=300):
        assert found and not any(found.values()), {name: wrong for name, wrong in found.items() if wrong}


def calls_of_a_forward_pass(rank: int, overlap: bool) -> list[str]:
    calls = []
    with as_on_a_gpu():
        model = shard(make_lm(depth=3))
        apply_zeropp(model, {"ranks_per_node": 2, "overlap": overlap})
        original = Hop._start

        def noted(hop: Hop, *args: Any) -> Any:
            calls.append("cross" if "across" in hop.name else "node")
            return original(hop, *args)

        Hop._start = noted
        with torch.no_grad():
            model(tokens_of(rank))
    return calls


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cross_hop_is_called_one_unit_ahead_and_not_more(overlap):
    """NCCL starts collectives in the order of calls. One that is called too early would hold up the node hops behind it.

    Where nothing overlaps, all of them end before the first node hop.
    """
    one_by_one = ["cross"] * 4 + ["node"] * 4
    ahead = ["cross", "cross", "node", "cross", "node", "cross", "node", "node"]
    for calls in run_ranks(calls_of_a_forward_pass, 4, overlap):
        assert calls == (ahead if overlap else one_by_one)


def nodes_with_different_layers(rank: int, mode: str) -> tuple[list[str], list[str]]:
    """Let nodes use different layers in an evaluation with new weights, and train on."""
    calls = []
    with as_on_a_gpu():
        model = shard(make_lm(depth=3))
        handle = apply_zeropp(model, {"ranks_per_node": 2, "qwz_mode": mode})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        original = Hop.all_gather

        def noted(hop: Hop, output: torch.Tensor, wire: torch.Tensor, sent: Any = ()) -> Any:
            if "across" in hop.name or "whole" in hop.name:
                calls.append(f"{hop.name}: {output.numel() if mode == 'values' else 'some'}")
            return original(hop, output, wire, sent)

        Hop.all_gather = noted
        for step in range(3):
            model.path = [0, 1, 2]
            handle.set_last_micro_step(True)
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            model.path = [2] if rank < 2 else [1, 0]
            with torch.no_grad():
                model(tokens_of(rank))
        return calls, [gather.unit.name for gather in handle.gathers if gather.copy.freshness.change() != Change.NONE]


@pytest.mark.parametrize("mode", ["values", "exact"])
def test_nodes_may_use_different_layers(mode):
    """The cross hops of a pass are called in one order, and all of them, whatever layers a node uses."""
    calls = run_ranks(nodes_with_different_layers, 4, mode)
    assert all(own == calls[0] for own in calls)
    assert calls[0][1] == []
    if mode == "values":
        assert len(calls[0][0]) == 4 * 4  # the units of four passes with new weights
