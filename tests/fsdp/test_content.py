"""The content of shards is hashed once per gather across nodes, and once more wherever a change must be told."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from staleness import CONFIG, forward
from toy import make_lm, shard, train
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp
from hf_zeropp.fsdp.weights.freshness import ShardContent
from hf_zeropp.traffic import GATHER_CROSS

QUANTIZED = CONFIG | {"qwz_bits": 8}


@contextlib.contextmanager
def counted():
    """The number of hashes inside, of all units."""
    hashes = mock.Mock()
    digest = ShardContent.digest

    def counting_digest(content):
        hashes()
        return digest(content)

    with mock.patch.object(ShardContent, "digest", counting_digest):
        yield hashes


def model_of(config: dict) -> tuple[torch.nn.Module, object]:
    model = shard(make_lm())
    return model, apply_zeropp(model, config)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scenario_a_gather_across_nodes_takes_one_hash(rank: int) -> None:
    """With one micro-step per step the mark of the optimizer answers, and no question takes another hash."""
    for config in (CONFIG, QUANTIZED):
        model, handle = model_of(config)
        with counted() as hashes:
            train(model, sgd(model), rank, range(3))
        assert hashes.call_count == 3 * len(handle.units)


def scenario_each_further_micro_step_compares_hashes(rank: int) -> None:
    model, handle = model_of(QUANTIZED)
    with counted() as hashes:
        train(model, sgd(model), rank, range(2), micro_steps=3)
    assert hashes.call_count == 2 * 3 * len(handle.units)


def scenario_writes_are_seen_whichever_way_is_taken(rank: int) -> None:
    """A write must be seen behind a gather, behind a pass that compared hashes, and behind steps."""
    for config in (CONFIG, QUANTIZED):
        for num_forwards, num_steps in ((1, 0), (2, 0), (1, 2)):
            model, handle = model_of(config)
            train(model, sgd(model), rank, range(num_steps), micro_steps=2)
            for _ in range(num_forwards):
                before = forward(model, rank)
            model.blocks[1].up.weight.data.mul_(2)
            crossed = handle.traffic.counts[GATHER_CROSS].calls
            assert not torch.equal(forward(model, rank), before), (config, num_forwards, num_steps)
            assert handle.traffic.counts[GATHER_CROSS].calls > crossed
            crossed = handle.traffic.counts[GATHER_CROSS].calls
            forward(model, rank)
            assert handle.traffic.counts[GATHER_CROSS].calls == crossed, "gathered again without a change"


def scenario_write_while_the_gather_is_under_way(rank: int) -> None:
    """The first forward pass starts the second block's gather and skips the block; what is written then must be seen."""
    for config in (CONFIG, QUANTIZED):
        model, handle = model_of(config)
        model.path = [0]
        forward(model, rank)
        model.path = [0, 1]
        crossed = handle.traffic.counts[GATHER_CROSS].calls
        unchanged = forward(model, rank)
        assert handle.traffic.counts[GATHER_CROSS].calls == crossed, "gathered again without a change"
        model, _ = model_of(config)
        model.path = [0]
        forward(model, rank)
        model.path = [0, 1]
        model.blocks[1].up.weight.data.mul_(2)
        assert not torch.equal(forward(model, rank), unchanged)


test_content = on_four_ranks(__name__)
