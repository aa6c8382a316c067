"""Secondary shards never serve weights that have changed. See [Note: when a secondary shard is stale] in freshness.py.

Every scenario changes the weights of a warm model in one way and compares the next forward with an unsharded model that
has the weights as they are now: bit for bit, as nothing is quantized. And each runs a second time with its guard taken
away, where the comparison must fail: otherwise it would prove nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp_io
import torch.distributed.checkpoint.state_dict as dcp
from staleness import (
    CONFIG,
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
from toy import EXACT, backward, full_weights, make_lm, shard
from two_nodes import on_four_ranks, raise_out_of_memory

from hf_zeropp import apply_zeropp, generation_mode
from hf_zeropp.fsdp.weights.copy import State
from hf_zeropp.fsdp.weights.gather import WeightGather
from hf_zeropp.traffic import GATHER_CROSS

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


def scenario_load_state_dict(rank: int) -> None:
    def load(model, handle) -> None:
        model.load_state_dict(doubled(model))

    check(rank, load, without_invalidation, without_versions)


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


def scenario_assign_state_dict_before_the_first_forward(rank: int) -> None:
    """``assign=True`` replaces parameters; FSDP2 takes note of that at its first forward only."""
    model = shard(make_lm())
    apply_zeropp(model, CONFIG)
    model.load_state_dict(doubled(model), assign=True)
    assert sees_the_weights(model, rank)


def scenario_assign_full_state_dict_as_accelerate_does(rank: int) -> None:
    """Accelerate loads full checkpoints into a sharded model with ``assign=True``, after forwards too."""
    model, _ = warm_model(rank)
    model.reshard()
    model.load_state_dict(doubled(model), assign=True)
    for module in (model, *model.blocks):
        module._apply(lambda tensor: tensor)  # what makes FSDP2 look at its parameters again
    assert sees_the_weights(model, rank)


def scenario_load_with_distributed_checkpoint_sharded(rank: int) -> None:
    def load(model, handle) -> None:
        state = {name: value * 2 for name, value in dcp.get_model_state_dict(model).items()}
        dcp.set_model_state_dict(model, state)

    check(rank, load, without_invalidation, without_versions)


# (c) Edits by hand, of the blocks (resharded) and of the root (left unsharded).


def scenario_load_in_place_with_distributed_checkpoint(rank: int) -> None:
    """``dcp.load`` writes into the shards behind every counter; the ``load_state_dict`` that must follow tells."""

    def load(model, handle) -> None:
        model.reshard()
        state = model.state_dict()
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        torch.distributed.broadcast_object_list(folder)
        dcp_io.save({name: value * 2 for name, value in state.items()}, checkpoint_id=folder[0])
        dcp_io.load(state, checkpoint_id=folder[0])
        model.load_state_dict(state)
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])

    check(rank, load, without_invalidation, without_versions)


def scenario_edit_in_place(rank: int) -> None:
    def change(model, handle) -> None:
        model.reshard()
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)

    check(rank, change, without_versions)


# (e) What moves no counter needs invalidate(). That it is refused without is in test_fingerprint.py.


def scenario_invalidate_behind_a_write_that_moves_no_counter(rank: int) -> None:
    """Programs of other such writes are in tests/fuzz/regressions/silent_writes."""

    def change(model, handle) -> None:
        model.blocks[1].up.weight.data.mul_(2)
        handle.invalidate()

    check(rank, change, without_invalidation, without_fingerprints)


class RaisesHalfWay(WritesData):
    """Updates its first parameters, then fails, as a kernel that runs out of memory does."""

    def step(self, closure=None) -> None:
        params = self.param_groups[0]["params"]
        for param in params[: len(params) // 2]:
            param.data.add_(param.grad, alpha=-0.1)
        raise MemoryError("half-way")


def scenario_step_that_raises_and_is_caught(rank: int) -> None:
    """This step moves no version: the optimizer's hook alone tells."""

    def change(model, handle) -> None:
        with contextlib.suppress(MemoryError):
            step(model, RaisesHalfWay, rank)

    check(rank, change, without_optimizer_hook, without_fingerprints)


def scenario_parameters_frozen_between_backward_and_step(rank: int) -> None:
    """Optimizers update every parameter that has a gradient, frozen since or not."""
    for kwargs in ({"foreach": True}, {"fused": True}):

        def change(model, handle, kwargs=kwargs) -> None:
            model.reshard()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kwargs)
            backward(model, rank)
            model.blocks[1].requires_grad_(False)
            optimizer.step()

        check(rank, change, without_optimizer_hook, without_versions)


# (g) What happens on one rank alone. Programs of edits there are in tests/fuzz/regressions/one_rank.


def scenario_optimizer_of_another_module_on_one_rank(rank: int) -> None:
    """A probe on rank 0: it has nothing to do with the sharded model, whose copies stay fresh."""
    model, handle = warm_model(rank)
    handle.traffic.reset()
    if rank == 0:
        probe = torch.nn.Linear(2, 2)
        probe(torch.ones(2)).sum().backward()
        torch.optim.SGD(probe.parameters(), lr=0.1).step()
    forward(model, rank)
    assert GATHER_CROSS not in handle.traffic.counts and handle.traffic.steps == 0


# (f) The root, which FSDP2 leaves unsharded after a forward without backward.


def scenario_edit_of_an_unsharded_root(rank: int) -> None:
    def change(model, handle) -> None:
        shards = {param for unit in handle.units for param in unit.params}
        root = handle.units[0]
        assert root.is_unsharded and not any(param in shards for param in model.head.parameters())
        with torch.no_grad():
            for param in root.params:
                param.mul_(2)

    check(rank, change, without_resharding)


def scenario_optimizer_step_under_an_unsharded_root(rank: int) -> None:
    """Evaluate, then step: stock FSDP2's next forward has the old root."""
    check(rank, lambda model, handle: step(model, torch.optim.SGD, rank), without_resharding)


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


def scenario_units_that_stay_unsharded(rank: int) -> None:
    """``reshard_after_forward=False``, with hpZ and without: the next forward computes with the new weights."""
    for settings in (CONFIG, EXACT | {"ranks_per_node": 2}, CONFIG | {"hpz_size": None, "qwz_bits": 8}):
        model = shard(make_lm(), reshard_after_forward=False)
        apply_zeropp(model, settings)
        forward(model, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, rank)
        forward(model, rank)
        optimizer.step()
        logits = forward(model, rank)
        model.reshard()
        reference = make_lm()
        reference.load_state_dict(full_weights(model))
        if settings.get("qwz_bits") is None:
            assert torch.equal(logits, forward(reference, rank)), settings
        else:
            torch.testing.assert_close(logits, forward(reference, rank), rtol=0, atol=0.1)


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


def scenario_step_behind_a_backward_pass_that_raised(rank: int) -> None:
    """FSDP2 prefetches the first block while the second one, whose backward pass raises, has not ended."""

    def change(model, handle) -> None:
        model.reshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model, rank)
        hook = model.blocks[1].norm.register_full_backward_pre_hook(raise_out_of_memory)
        with contextlib.suppress(MemoryError):
            backward(model, rank)
        hook.remove()
        optimizer.step()

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


def scenario_converted_parameters(rank: int) -> None:
    check(rank, lambda model, handle: model._apply(lambda tensor: tensor * 2), without_versions)


test_next_forward_sees_the_weights = on_four_ranks(__name__)
