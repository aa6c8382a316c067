"""Secondary shards never serve weights that have changed. See [Note: when a secondary shard is stale] in freshness.py.

Every scenario changes the weights of a warm model in one way and compares the next forward with an unsharded model that
has the weights as they are now: bit for bit, as nothing is quantized. And each runs a second time with its guard taken
away, where the comparison must fail: otherwise it would prove nothing.

Programs of other changes (checkpoints, frozen parameters, steps that raise, edits on one rank, units that stay unsharded) are in
tests/fuzz/regressions. That a write which moves no counter is refused without ``invalidate()`` is in test_fingerprint.py.
"""

from __future__ import annotations

import weakref
from unittest import mock

import torch
from staleness import (
    WritesData,
    check,
    forward,
    sees_the_weights,
    step,
    warm_model,
    without_fingerprints,
    without_invalidation,
    without_optimizer_hook,
    without_resharding,
    without_versions,
)
from toy import full_weights, make_lm, shard
from two_nodes import on_four_ranks

from hf_zeropp import generation_mode
from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.fsdp.weights.copy import State
from hf_zeropp.fsdp.weights.gather import WeightGather
from hf_zeropp.fsdp.weights.weight_stamp import WeightStamp

# (a) Optimizers.


def scenario_forward_between_backward_and_step(rank: int) -> None:
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        check(
            rank,
            lambda model, handle, optimizer=optimizer: step(model, optimizer, rank),
            without_optimizer_hook,
            without_versions,
        )


def scenario_optimizer_that_writes_through_data(rank: int) -> None:
    check(rank, lambda model, handle: step(model, WritesData, rank), without_optimizer_hook, without_fingerprints)


# (b) Loading.


def doubled(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value * 2 for name, value in model.state_dict().items()}


class LoadsThroughData(torch.nn.Linear):
    """As layers with a format of their own load: no counter moves, the hook alone tells."""

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self.weight.data.copy_(state_dict[prefix + "weight"])


def scenario_load_through_data(rank: int) -> None:
    def load(model, handle) -> None:
        name = "blocks.0.up.weight"
        model.blocks[0].up.__class__ = LoadsThroughData
        model.load_state_dict({name: model.state_dict()[name] * 2}, strict=False)

    check(rank, load, without_invalidation, without_fingerprints)


def scenario_assign_full_state_dict_as_accelerate_does(rank: int) -> None:
    """Accelerate loads full checkpoints into a sharded model with ``assign=True``, after forwards too."""
    model, _ = warm_model(rank)
    model.reshard()
    model.load_state_dict(doubled(model), assign=True)
    for module in (model, *model.blocks):
        module._apply(lambda tensor: tensor)  # what makes FSDP2 look at its parameters again
    assert sees_the_weights(model, rank)


# (c) The root, which FSDP2 leaves unsharded after a forward without backward.


def scenario_generation_after_a_step_under_an_unsharded_root(rank: int) -> None:
    """The copies are brought up to date when generation begins; the root holds older values, and must not use them."""
    for keep in ("root", "all"):
        model, _ = warm_model(rank)
        if keep == "all":
            for block in model.blocks:
                block.set_reshard_after_forward(False)
        step(model, torch.optim.SGD, rank)
        with generation_mode(model):
            logits = forward(model, rank)
        model.reshard()
        reference = make_lm()
        reference.load_state_dict(full_weights(model))
        assert torch.equal(logits, forward(reference, rank)), keep


def scenario_edit_of_a_unit_that_was_prefetched_in_vain(rank: int) -> None:
    """A pass skips the second block, whose weights the first one has prefetched: stock's next forward has the old ones."""

    def change(model, handle) -> None:
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        model.path = [0]
        forward(model, rank)
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
        model.path = [0, 1]

    check(rank, change, without_resharding)


# A cross hop that was started ahead of its use.


def scenario_edit_of_a_unit_whose_gather_is_under_way(rank: int) -> None:
    """The root's gather starts those of all blocks; the second block is skipped, its copy in flight when edited."""

    def change(model, handle) -> None:
        model.reshard()
        with torch.no_grad():
            model.head.weight.add_(1)
            model.blocks[1].up.weight.add_(1)
        model.path = [0]
        forward(model, rank)
        model.reshard()
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
        model.path = [0, 1]

    check(rank, change, without_versions)
    with mock.patch.object(WeightGather, "start", start_unless_started(WeightGather.start)):
        model, handle = warm_model(rank)
        change(model, handle)
        assert not sees_the_weights(model, rank), "the change shows without a new start: the test cannot fail"


def start_unless_started(start):
    """As if a gather under way were as good as a new one."""

    def maybe_start(self, made=None):
        if self.copy.is_under_way:
            self.copy.state = State.CROSSING
        else:
            start(self, made)

    return maybe_start


# Conversions keep the parameter object, and swap what is in it.


def scenario_a_stamp_holds_no_shards(rank: int) -> None:
    """After a conversion, as ``model.cpu()`` on a GPU, the memory of the old shards is free."""
    model = shard(make_lm())
    params = find_units(model)[1].params
    stamp = WeightStamp.of(params)
    old = [weakref.ref(param._local_tensor) for param in params]
    model.to(torch.float64)
    assert [ref() for ref in old] == [None] * len(params)
    assert not stamp.matches(params)


test_next_forward_sees_the_weights = on_four_ranks(__name__)
