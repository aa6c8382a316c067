"""The content of shards is hashed where the answer will be asked for, and compared with the copy where nobody expected it."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from harness import Scenarios
from staleness import CONFIG, forward
from toy import backward, make_lm, shard

from hf_zeropp import apply_zeropp
from hf_zeropp.comm.two_hops import TwoHopGather
from hf_zeropp.fsdp.freshness import ShardContent
from hf_zeropp.traffic import GATHER_CROSS

QUANTIZED = CONFIG | {"qwz_bits": 8}


@contextlib.contextmanager
def counted():
    """The hashes and comparisons inside, of all units."""
    counts = {"hashes": 0, "comparisons": 0, "with a hop under way": 0}
    digest, holds = ShardContent.digest, TwoHopGather.holds

    def counting_digest(content):
        counts["hashes"] += 1
        return digest(content)

    def counting_holds(hops, shard, layouts, secondary, flight):
        counts["comparisons"] += 1
        counts["with a hop under way"] += flight is not None
        return holds(hops, shard, layouts, secondary, flight)

    with (
        mock.patch.object(ShardContent, "digest", counting_digest),
        mock.patch.object(TwoHopGather, "holds", counting_holds),
    ):
        yield counts


def model_of(config: dict) -> tuple[torch.nn.Module, object]:
    model = shard(make_lm())
    return model, apply_zeropp(model, config)


def train(model: torch.nn.Module, rank: int, *, steps: int, micro_steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for number in range(micro_steps):
            backward(model, rank, number)
        optimizer.step()
        optimizer.zero_grad()


def one_micro_step_reads_no_content(rank: int) -> None:
    for config in (CONFIG, QUANTIZED):
        model, _ = model_of(config)
        with counted() as counts:
            train(model, rank, steps=3, micro_steps=1)
        assert not any(counts.values()), counts


def micro_steps_compare_once_and_hash_from_then_on(rank: int) -> None:
    model, handle = model_of(QUANTIZED)
    units = len(handle.units)
    with counted() as counts:
        train(model, rank, steps=1, micro_steps=3)
    # The second micro-step compares, and remembers a hash for the third.
    assert counts == {"hashes": 2 * units, "comparisons": units, "with a hop under way": 0}
    with counted() as counts:
        train(model, rank, steps=1, micro_steps=3)
    assert counts == {"hashes": 3 * units, "comparisons": 0, "with a hop under way": 0}


def deltas_and_changed_words_are_hashed(rank: int) -> None:
    for mode in ({"qwz_mode": "delta", "qwz_bits": 4, "hpz_bits": 8}, {"qwz_mode": "exact", "qwz_bits": None}):
        model, _ = model_of(CONFIG | {"hpz_size": "node"} | mode)
        with counted() as counts:
            train(model, rank, steps=2, micro_steps=1)
        assert counts["hashes"] > 0 and counts["comparisons"] == 0, mode


def writes_are_seen_whichever_way_is_taken(rank: int) -> None:
    """A write must be seen where no hash was taken before it, where a comparison left one, and where the gather took one."""
    for config in (CONFIG, QUANTIZED):
        for num_forwards, num_steps in ((1, 0), (2, 0), (1, 2)):
            model, handle = model_of(config)
            train(model, rank, steps=num_steps, micro_steps=2)
            for _ in range(num_forwards):
                before = forward(model, rank)
            model.blocks[1].up.weight.data.mul_(2)
            crossed = handle.traffic.counts[GATHER_CROSS].calls
            assert not torch.equal(forward(model, rank), before), (config, num_forwards, num_steps)
            assert handle.traffic.counts[GATHER_CROSS].calls > crossed
            crossed = handle.traffic.counts[GATHER_CROSS].calls
            forward(model, rank)
            assert handle.traffic.counts[GATHER_CROSS].calls == crossed, "gathered again without a change"


def write_too_small_for_the_wire_needs_no_gather(rank: int) -> None:
    model, handle = model_of(QUANTIZED)
    forward(model, rank)
    with torch.no_grad():
        local = model.blocks[1].up.weight.to_local()
        assert local.numel(), "this rank holds nothing of the weight"
        # A code stands for an interval of weights. One that is no block's largest may move within its interval.
        weight = local.data.view(-1)[local.abs().argmin()]
        before = weight.clone()
        weight.mul_(1 + 1e-6)
        assert weight != before
    crossed = handle.traffic.counts[GATHER_CROSS].calls
    forward(model, rank)
    assert handle.traffic.counts[GATHER_CROSS].calls == crossed


def write_while_the_gather_is_under_way(rank: int) -> None:
    """The first forward pass starts the second block's gather and skips the block; what is written then must be seen."""
    for config in (CONFIG, QUANTIZED):
        model, handle = model_of(config)
        model.path = [0]
        forward(model, rank)
        model.path = [0, 1]
        crossed = handle.traffic.counts[GATHER_CROSS].calls
        with counted() as counts:
            unchanged = forward(model, rank)
        assert counts["with a hop under way"] > 0
        assert handle.traffic.counts[GATHER_CROSS].calls == crossed, "gathered again without a change"
        model, _ = model_of(config)
        model.path = [0]
        forward(model, rank)
        model.path = [0, 1]
        model.blocks[1].up.weight.data.mul_(2)
        assert not torch.equal(forward(model, rank), unchanged)


SCENARIOS = Scenarios(
    4,
    [
        one_micro_step_reads_no_content,
        micro_steps_compare_once_and_hash_from_then_on,
        deltas_and_changed_words_are_hashed,
        writes_are_seen_whichever_way_is_taken,
        write_too_small_for_the_wire_needs_no_gather,
        write_while_the_gather_is_under_way,
    ],
)


@SCENARIOS.parametrize
def test_content(scenario):
    SCENARIOS.check(scenario)
