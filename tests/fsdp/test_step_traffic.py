"""Bytes of others in a step: clipping and a script's own collectives are counted once, and nothing of this package's."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from toy import POLICIES, backward, loss_of, make_lm, shard, tokens_of
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp
from hf_zeropp.fsdp import collective_watch
from hf_zeropp.traffic import Bytes

CONFIG = {"ranks_per_node": 2}
CLIPPING, LOGGING, TOKENS = "all-reduce, between passes", "all-gather, between passes", "all-to-all, in passes"


def training(rank: int, steps: int, *, clips: bool = True, between=lambda: None):
    model = shard(make_lm(hidden=16, inner=48), POLICIES["bf16"])
    handle = apply_zeropp(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        backward(model, rank, step)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        between()
    return model, handle


def scenario_clipping_and_logging_are_counted_once(rank: int) -> None:
    """One all-reduce of a norm per parameter, and an all-gather of a loss."""

    def log() -> None:
        dist.all_gather_into_tensor(torch.empty(4 * 100), torch.zeros(100))

    model, handle = training(rank, 6, between=log)
    # In rings 3/4 of a vector reach a rank, twice in an all-reduce. Half of it comes from the other node, in the mean of a node.
    norms = 4 * len(list(model.parameters()))
    others = handle.traffic.others
    assert (others[CLIPPING].calls, others[CLIPPING].cross_node) == (6, 6 * 2 * 3 * norms // 4 // 2)
    # What is logged after the last step belongs to the next one.
    assert (others[LOGGING].calls, others[LOGGING].cross_node) == (6, 6 * 3 * 400 // 2)
    assert others.keys() == {CLIPPING, LOGGING}
    assert {name: count.cross_node for name, count in handle.traffic.counts.items()} == {
        name: 6 * count.cross_node for name, count in handle.predict().items()
    }
    assert not is_watched()
    handle.traffic.reset()
    assert handle.traffic.others == {}


def scenario_without_clipping_there_is_nothing(rank: int) -> None:
    """Collectives of another thread, such as one that saves a checkpoint, do not count as a step's."""

    def save() -> None:
        thread = threading.Thread(target=dist.all_reduce, args=(torch.zeros(1000),))
        thread.start()
        thread.join()

    _, handle = training(rank, 4, clips=False, between=save)
    assert handle.traffic.others == {}


def scenario_evaluation_is_none_of_a_step(rank: int) -> None:
    def hook(module, args, output):
        if not torch.is_grad_enabled():
            assert not is_watched()
            dist.all_reduce(torch.zeros(1000))

    model = shard(make_lm(hidden=16, inner=48), POLICIES["bf16"])
    model.register_forward_hook(hook)
    handle = apply_zeropp(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, tokens_of(rank))
    assert handle.traffic.others == {}


def is_watched() -> bool:
    """Whether an operator has our kernel."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def scenario_a_model_that_is_gone_is_watched_no_more(rank: int) -> None:
    model, handle = training(rank, 2)
    assert is_watched()
    with torch.no_grad():  # it serves after two steps
        loss_of(model, tokens_of(rank))
    assert not is_watched()
    backward(model, rank)
    assert is_watched()
    del model, handle
    gc.collect()
    dist.all_reduce(torch.zeros(1))
    assert not is_watched()


def scenario_functions_of_functions_run(rank: int) -> None:
    """``torch.cond`` and its like admit no mode that does not know them."""

    class Branching(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.cond(y.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,))

    model = fully_shard(torch.nn.Sequential(fully_shard(Branching(8, 8)), torch.nn.Linear(8, 8)))
    handle = apply_zeropp(model, CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert handle.traffic.others[CLIPPING].calls == 4


def scenario_compiled_functions_stay_compiled(rank: int) -> None:
    """Their collectives are seen as others are, and no step compiles them anew."""

    class Tokens(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes = [1] * dist.get_world_size()
            return super().forward(all_to_all_single_autograd(x, sizes, sizes, dist.group.WORLD))

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(fully_shard(Tokens(8, 8)) for _ in range(2)))
    for layer in model:
        layer.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.01)
    handle = apply_zeropp(model, CONFIG)
    compiled = []
    for _ in range(5):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] > 0 and compiled[1:] == compiled[:-1]
    # A row from each rank, forth and back in each layer. Two of them come from the other node.
    assert handle.traffic.others == {TOKENS: Bytes(5 * 4, 5 * 4 * 32, 5 * 4 * 64)}


def scenario_what_comes_from_one_rank_comes_from_its_node(rank: int) -> None:
    """Pipeline stages and rings of attention hand on from rank to rank; 2 x 2 ranks."""
    mine, theirs = torch.zeros(100), torch.zeros(100)

    def hand_on() -> None:
        sends = [dist.isend(mine, (rank + 1) % 4), dist.irecv(theirs, (rank - 1) % 4)]
        for work in sends:
            work.wait()

    _, handle = training(rank, 5, clips=False, between=hand_on)
    from_outside = rank % 2 == 0
    assert handle.traffic.others == {
        "receive, between passes": Bytes(5, 2000 * (not from_outside), 2000 * from_outside)
    }

    def scatter() -> None:
        dist.scatter(theirs, [mine] * 4 if rank == 1 else None, src=1)

    _, handle = training(rank, 5, clips=False, between=scatter)
    expected = {} if rank == 1 else {"scatter, between passes": Bytes(5, 2000 * (rank == 0), 2000 * (rank > 1))}
    assert handle.traffic.others == expected


def scenario_the_check_is_none_of_others(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROPP_CHECK", "1")
        _, handle = training(rank, 5, clips=False)
    assert handle.traffic.others == {}


def scenario_a_count_that_fails_ends_no_run(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_watch, "_group_of", lambda argument: 1 / 0)
        _, handle = training(rank, 4)
    assert handle.traffic.others == {}
    assert not is_watched()


test_what_others_send = on_four_ranks(__name__)
