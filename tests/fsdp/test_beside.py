"""Cross hops on streams beside node hops, on real gloo ranks that take the ways for GPUs: the same bits, one order, no memory.

That no two streams touch the same memory unordered is looked at in test_happens_before.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from happens_before.clocks import Timeline
from happens_before.memory import Memory
from happens_before.replaced import has_streams, replaced, streams_of_torch
from harness import run_ranks
from toy import POLICIES, backward, full_weights, loss_without_head, make_lm, shard, tokens_of
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp
from hf_zeropp.comm.hop import Hop
from hf_zeropp.comm.two_hops import TwoHopReduce
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter
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
    original = Hop._start

    def noted(hop: Hop, *args: Any) -> Any:
        calls.append("cross" if "across" in hop.name else "node")
        return original(hop, *args)

    with as_on_a_gpu():
        model = shard(make_lm(depth=3))
        apply_zeropp(model, {"ranks_per_node": 2, "overlap": overlap})
        with mock.patch.object(Hop, "_start", noted), torch.no_grad():
            model(tokens_of(rank))
    return calls


def scenario_a_cross_hop_is_called_one_unit_ahead_and_not_more(rank: int) -> None:
    """NCCL starts collectives in the order of calls. One that is called too early would hold up the node hops behind it.

    Where nothing overlaps, all of them end before the first node hop.
    """
    assert calls_of_a_forward_pass(rank, False) == ["cross"] * 4 + ["node"] * 4
    ahead = ["cross", "cross", "node", "cross", "node", "cross", "node", "node"]
    assert calls_of_a_forward_pass(rank, True) == ahead


def nodes_with_different_layers(rank: int, mode: str) -> list[str]:
    """Let nodes use different layers in an evaluation with new weights, and train on. Return the calls of cross hops."""
    calls = []
    original = Hop.all_gather

    def noted(hop: Hop, output: torch.Tensor, wire: torch.Tensor, sent: Any = ()) -> Any:
        if "across" in hop.name or "whole" in hop.name:
            calls.append(f"{hop.name}: {output.numel() if mode == 'values' else 'some'}")
        return original(hop, output, wire, sent)

    with as_on_a_gpu(), mock.patch.object(Hop, "all_gather", noted):
        model = shard(make_lm(depth=4))
        handle = apply_zeropp(model, {"ranks_per_node": 2, "qwz_mode": mode})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3):
            model.path = [0, 1, 2, 3]
            handle.set_last_micro_step(True)
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            # On the second node the first block alone runs. Its gather starts the cross hops of the root, itself and the next
            # block. Those of the last two blocks are left for the end of the pass.
            model.path = [3] if rank < 2 else [0]
            with torch.no_grad():
                model(tokens_of(rank))
        assert all(gather.copy.freshness.change() == Change.NONE for gather in handle.gathers)
    return calls


def scenario_nodes_may_use_different_layers(rank: int) -> None:
    """The cross hops of a pass are called in one order, and all of them, whatever layers a node uses."""
    for mode in ("values", "exact"):
        calls = nodes_with_different_layers(rank, mode)
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, calls)
        assert all(own == calls for own in of_ranks)
        assert mode == "exact" or len(calls) == 4 * 5  # the units of four passes with new weights


# A reduction under way holds no memory but its wire buffers: neither the gradient of the whole unit nor partial sums.

WAYS = {
    "behind each other": {},
    "behind each other, nodes of one rank": {"ranks_per_node": 1},
    "blocking": {"overlap": False},
}


class SeenTensors:
    """Tensors that reductions got and made, and those of them that lived longer than they should.

    Attributes:
        num_seen: how many of each kind were looked at.
        kept: the kinds of those that were still there.
    """

    def __init__(self) -> None:
        self.num_seen = {"flat gradient": 0, "partial sums": 0}
        self.kept: list[str] = []
        self._made: dict[str, list[weakref.ref[torch.Tensor]]] = {kind: [] for kind in self.num_seen}

    def note(self, kind: str, tensor: torch.Tensor) -> None:
        """A reduction has got or made it."""
        self.num_seen[kind] += 1
        self._made[kind].append(weakref.ref(tensor))

    def look(self, kind: str) -> None:
        """All of this kind must be gone by now."""
        self.kept += [kind for one in self._made[kind] if one() is not None]
        self._made[kind].clear()


@contextlib.contextmanager
def watched() -> Iterator[SeenTensors]:
    """Give reductions flat gradients that nothing else holds, and look when a call returns and when a cross hop ends."""
    memory = SeenTensors()
    call = ZeroPPReduceScatter.__call__
    start_cross_hop, finish = TwoHopReduce.start_cross_hop, TwoHopReduce.finish

    def watched_call(
        reduce: ZeroPPReduceScatter, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any
    ) -> None:
        flat = input_tensor.clone()
        memory.note("flat gradient", flat)
        given = [flat]
        del flat
        call(reduce, output_tensor, given.pop(), **kwargs)
        memory.look("flat gradient")

    def watched_start(hops: TwoHopReduce, layouts: Any, partial: Any, flight: Any = None) -> Any:
        if partial is not None and flight is not None:
            memory.note("partial sums", partial)
        return start_cross_hop(hops, layouts, partial, flight)

    def watched_finish(*args: Any) -> None:
        memory.look("partial sums")
        finish(*args)

    with (
        mock.patch.object(ZeroPPReduceScatter, "__call__", watched_call),
        mock.patch.object(TwoHopReduce, "start_cross_hop", watched_start),
        mock.patch.object(TwoHopReduce, "finish", watched_finish),
    ):
        yield memory


def accumulate(rank: int, settings: dict[str, Any]) -> None:
    """Two steps of two micro-steps. In the second step the root has no gradient of its head."""
    model = shard(make_lm(depth=3))
    handle = apply_zeropp(model, {"ranks_per_node": 2} | settings)
    for step in range(2):
        for is_last in (False, True):
            handle.set_last_micro_step(is_last)
            backward(model, rank, step, *([loss_without_head] if step else []))
        model.zero_grad()


def scenario_a_reduction_under_way_holds_nothing_but_its_wires(rank: int) -> None:
    """A reduction is a generator, and a suspended generator keeps its variables."""
    for name, settings in WAYS.items():
        for device in (contextlib.nullcontext, as_on_a_gpu):
            with device(), watched() as memory:
                accumulate(rank, settings)
            assert memory.kept == [], (name, device, memory.kept)
            assert all(memory.num_seen.values()), (name, memory.num_seen)


test_hops = on_four_ranks(__name__)
