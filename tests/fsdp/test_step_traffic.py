"""Bytes of others in a step: clipping and a script's own collectives are counted once, and nothing of this package's."""

import torch
import torch.distributed as dist
from harness import Scenarios
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from toy import POLICIES, backward, loss_of, make_lm, shard, tokens_of

from hf_zeropp import apply_zeropp

CONFIG = {"ranks_per_node": 2}
CLIPPING, LOGGING = "all-reduce, between passes", "all-gather, between passes"


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


def clipping_and_logging_are_counted_once(rank: int) -> None:
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
    assert not _get_current_dispatch_mode_stack()
    handle.traffic.reset()
    assert handle.traffic.others == {}


def without_clipping_there_is_nothing(rank: int) -> None:
    _, handle = training(rank, 4, clips=False)
    assert handle.traffic.others == {}


def evaluation_is_none_of_a_step(rank: int) -> None:
    def hook(module, args, output):
        if not torch.is_grad_enabled():
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
    assert not _get_current_dispatch_mode_stack()


class Mode(TorchDispatchMode):
    """A mode of the user's, such as one that counts operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def modes_of_users_end_as_they_began(rank: int) -> None:
    """Modes end in the order in which they began, or those that stay on would be others."""
    model = shard(make_lm(hidden=16, inner=48), POLICIES["bf16"])
    handle = apply_zeropp(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(index: int) -> None:
        backward(model, rank, index)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for index in range(4):
        # Around a whole step, and from within one step to within the next one.
        with Mode() as mode:
            step(index)
            assert mode in _get_current_dispatch_mode_stack()
        assert mode not in _get_current_dispatch_mode_stack()
    for index in range(4):
        step(index)
        # Parameters that are no DTensors reach the mode as they are.
        torch.nn.Parameter(torch.ones(3)).data.add_(1)
    assert handle.traffic.others[CLIPPING].calls > 0
    assert not _get_current_dispatch_mode_stack()


SCENARIOS = Scenarios(
    4,
    [
        clipping_and_logging_are_counted_once,
        without_clipping_there_is_nothing,
        evaluation_is_none_of_a_step,
        modes_of_users_end_as_they_began,
    ],
)


@SCENARIOS.parametrize
def test_what_others_send(scenario):
    SCENARIOS.check(scenario)
