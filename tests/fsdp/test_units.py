"""units.py: what it says of FSDP2's units is so. tests/style/test_seams.py has the private names that it reads."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from toy import POLICIES, backward, make_lm, shard
from two_nodes import on_four_ranks

from hf_zeropp.fsdp import units
from hf_zeropp.fsdp.gradients.unit_gradients import DefaultReduceScatter
from hf_zeropp.fsdp.sharded_models import find_units
from hf_zeropp.fsdp.units import DefaultAllGather
from hf_zeropp.fsdp.weights.first_use import on_first_use
from hf_zeropp.fsdp.weights.weight_stamp import WeightStamp


class RecordingGather(DefaultAllGather):
    """FSDP2's own all-gather, which remembers what it was given."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.input = input_tensor.clone()
        return super().__call__(output_tensor, input_tensor, group, async_op)


class RecordingReduce(DefaultReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self.numel, self.dtype, self.output = input_tensor.numel(), input_tensor.dtype, output_tensor.clone()
        return work


def record(model) -> list[tuple[units.Unit, RecordingGather, RecordingReduce]]:
    recorded = [(unit, RecordingGather(), RecordingReduce()) for unit in find_units(model)]
    for unit, gather, reduce in recorded:
        unit.set_all_gather(gather)
        unit.gradients.reduce_through(reduce)
        assert unit.all_gather is gather and unit.gradients.comm is reduce
    return recorded


def scenario_shards_are_what_fsdp2_gathers(rank: int) -> None:
    """Order, padding and dtype of the flat shard, for sharded and unevenly sharded parameters."""
    for policy, kwargs in ((name, kwargs) for name in POLICIES for kwargs in ({}, {"tied": True}, {"hidden": 2})):
        model = shard(make_lm(**kwargs), POLICIES[policy])
        recorded = record(model)
        backward(model, rank)
        for unit, gather, _ in recorded:
            assert gather.input.dtype == unit.param_dtype
            assert gather.input.numel() == sum(one.padded_numel for one in unit.param_shards)
            assert unit.has_plain_shards
            assert torch.equal(gather.input, unit.flat_shard(unit.param_dtype)), (policy, kwargs, unit.name)
            local = [param.to_local().numel() for param in unit.params]
            assert [one.numel for one in unit.param_shards] == local
            assert [one.ndim for one in unit.param_shards] == [param.ndim for param in unit.params]


def scenario_reductions_are_what_units_say(rank: int) -> None:
    """Their dtype and size, of the trainable parameters alone; and the division that fp16 still needs."""
    for policy in (*POLICIES.values(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = make_lm()
        model.blocks[0].up.weight.requires_grad_(False)
        recorded = record(shard(model, policy))
        backward(model, rank)
        for unit, _, reduce in recorded:
            shards = unit.gradients.param_shards()
            assert reduce.dtype == unit.gradients.dtype
            assert reduce.numel == dist.get_world_size() * sum(one.padded_numel for one in shards)
            reduced = reduce.output / unit.gradients.divisor_after_reduce(reduce.output.dtype)
            param, numel = unit.trainable[0], shards[0].numel
            assert torch.equal(reduced[:numel].float(), param.grad.to_local().flatten().float()), unit.name


def scenario_gradients_lie_where_units_say(rank: int) -> None:
    """Also where one gradient of a unit has a dtype of its own: torch 2.15 then puts it behind those of the others."""
    model = make_lm().bfloat16()
    if torch.__version__ >= "2.15":
        model.blocks[0].up.weight.grad_dtype = torch.float32
    recorded = record(shard(model, MixedPrecisionPolicy(reduce_dtype=torch.float32)))
    for unit, _, _ in recorded:
        unit.gradients.wrap_post_backward(lambda: False, lambda: None, lambda: None)
    backward(model, rank)
    for unit, _, reduce in recorded:
        shards = unit.gradients.reduced_shards()
        parts = reduce.output.split([one.shard.padded_numel for one in shards])
        for one, part in zip(shards, parts, strict=True):
            gradient = one.param.grad.to_local().flatten()
            assert torch.equal(part[: one.shard.numel].to(gradient.dtype), gradient), (unit.name, one.shard.name)


def scenario_what_a_stamp_notices(rank: int) -> None:
    """A stamp notices some writes; the others need ``handle.invalidate()``."""
    model = shard(make_lm())
    unit = find_units(model)[1]
    weight = model.blocks[0].up.weight
    changes = {
        "in place": lambda: weight.add_(1),
        "local tensor": lambda: weight.to_local().add_(1),
        "detached": lambda: weight.detach().add_(1),
        "copy": lambda: weight.copy_(weight * 2),
        "swapped": lambda: model._apply(lambda tensor: tensor.clone()),
        "data": lambda: weight.data.add_(1),
        "foreach": lambda: torch._foreach_add_([weight], 1.0),
        "collective": lambda: dist.all_reduce(model.blocks[0].down.weight.to_local()),  # 12 rows: even shards
        "nothing": lambda: weight.to_local() + weight.full_tensor().sum(),
    }
    noticed = {}
    for name, change in changes.items():
        stamp = WeightStamp.of(unit.params)
        assert stamp.matches(unit.params)
        with torch.no_grad():
            change()
        noticed[name] = not stamp.matches(unit.params)
    # If one of the others is noticed, torch counts more than it did: shorten the advice to call invalidate().
    unnoticed = {"data", "foreach", "collective", "nothing"}
    assert noticed == {name: name not in unnoticed for name in changes}


def scenario_a_stamp_holds_no_shards(rank: int) -> None:
    """After a conversion, as ``model.cpu()`` on a GPU, the memory of the old shards is free."""
    model = shard(make_lm())
    params = find_units(model)[1].params
    stamp = WeightStamp.of(params)
    old = [weakref.ref(param._local_tensor) for param in params]
    model.to(torch.float64)
    assert [ref() for ref in old] == [None] * len(params)
    assert not stamp.matches(params)


test_units = on_four_ranks(__name__)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("call", ["model", "submodule", "compiled"])
def test_first_use_of_a_model_or_of_a_part_of_it(call):
    model, other, calls = Outer(), Outer(), []
    on_first_use(model, lambda: calls.append("used"))
    other(torch.ones(1, 2))
    assert calls == []
    model.register_forward_pre_hook(lambda module, args: calls.append("the model's own hook"), prepend=True)
    used = {"model": model, "submodule": model.inner, "compiled": torch.compile(model, backend="eager")}[call]
    for _ in range(2):
        used(torch.ones(1, 2))
    assert calls[0] == "used", "runs ahead of the model's own hooks"
    assert calls.count("used") == 1


def test_a_model_that_was_used_goes_without_the_garbage_collector():
    model = Outer()
    kept = weakref.ref(model)
    on_first_use(model, lambda model=model: model.train())
    model(torch.ones(1, 2))
    gc.disable()
    try:
        del model
        assert kept() is None
    finally:
        gc.enable()
