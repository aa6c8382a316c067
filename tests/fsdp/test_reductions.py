"""A reduction under way holds no memory but its wire buffers: neither the gradient of the whole unit nor partial sums.

A reduction is a generator, and a suspended generator keeps its variables.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from harness import run_ranks
from test_beside import as_on_a_gpu
from toy import backward, loss_without_head, make_lm, shard

from hf_zeropp import apply_zeropp
from hf_zeropp.comm.two_hops import TwoHopReduce
from hf_zeropp.fsdp.gradients.reduce import ZeroPPReduceScatter

WAYS = {
    "behind each other": {},
    "behind each other, nodes of one rank": {"ranks_per_node": 1},
    "blocking": {"overlap": False},
}


class Memory:
    """Weak references to the tensors that reductions got and made, and a list of those that lived longer than they should.

    Attributes:
        num_seen: how much of each kind was looked at.
        kept: the kinds of those that were still there.
    """

    def __init__(self) -> None:
        self.num_seen = {"flat gradient": 0, "partial sums": 0}
        self.kept: list[str] = []
        self._made: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def note(self, kind: str, tensor: torch.Tensor) -> None:
        """A reduction has got or made it."""
        self.num_seen[kind] += 1
        self._made.append((kind, weakref.ref(tensor)))

    def look(self, *kinds: str) -> None:
        """All of these kinds must be gone by now."""
        self.kept += [kind for kind, one in self._made if kind in kinds and one() is not None]
        self._made = [(kind, one) for kind, one in self._made if kind not in kinds]


@contextlib.contextmanager
def watched() -> Iterator[Memory]:
    """Give reductions flat gradients that nothing else holds, and look when a call returns and when a cross hop ends."""
    memory = Memory()
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


def nothing_is_held(rank: int) -> None:
    for name, settings in WAYS.items():
        for device in (contextlib.nullcontext, as_on_a_gpu):
            with device(), watched() as memory:
                accumulate(rank, settings)
            assert memory.kept == [], (name, device, memory.kept)
            assert all(memory.num_seen.values()), (name, memory.num_seen)


def test_a_reduction_under_way_holds_nothing_but_its_wires():
    run_ranks(nothing_is_held, 4)
