"""``qwz_mode="auto"``: exact while few words change, deltas where many do, and back again.

Each unit chooses for itself, by sizes that its cross group exchanges. The oracles are ``exact``, ``delta`` and the masters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import Scenarios, expect_errors, run_ranks
from toy import POLICIES, backward, full_weights, gathered_weights, make_lm, shard

from hf_zeropp import ZeroPPHandle, apply_zeropp
from hf_zeropp.fsdp.predictions import changed_words_bytes
from hf_zeropp.fsdp.weights.policy import DELTAS_IN_A_ROW
from hf_zeropp.traffic import GATHER_CROSS, GATHER_RESYNC, Bytes

NODES = {"ranks_per_node": 2, "qgz_bits": None, "qgz_intra_bits": None}
AUTO = NODES | {"qwz_mode": "auto"}
EXACT = NODES | {"qwz_mode": "exact"}
DELTA = NODES | {"qwz_mode": "delta", "qwz_bits": 4}
FEW, MANY, ALL = 1e-6, 1e-2, 0.3
"""Learning rates at which few words change, so many that deltas are smaller, and all of them by much."""


class Job:
    """A model in training. Units are large enough for tables of wires to weigh little."""

    def __init__(self, rank: int, settings: dict[str, Any], optimizer_class: type = torch.optim.AdamW) -> None:
        self.rank = rank
        self.model = shard(make_lm(depth=1, hidden=64, inner=256), POLICIES["bf16"])
        self.handle: ZeroPPHandle = apply_zeropp(self.model, settings)
        self.optimizer = optimizer_class(self.model.parameters(), lr=FEW)
        self.step = 0

    def train(self, rates: Sequence[float]) -> list[float]:
        """Train a step at each learning rate, and return the losses."""
        losses = []
        for rate in rates:
            self.optimizer.param_groups[0]["lr"] = rate
            losses.append(backward(self.model, self.rank, self.step))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return losses

    def gathered(self) -> dict[str, torch.Tensor]:
        """Return the weights with which a forward pass computes now."""
        self.model.reshard()
        return gathered_weights(self.model)

    def is_exact(self) -> bool:
        """Whether a forward pass computes with the masters' own bf16 values."""
        masters = full_weights(self.model)
        return all(torch.equal(weight, masters[name].bfloat16()) for name, weight in self.gathered().items())

    def error(self) -> float:
        """The relative error of the weights with which a forward pass computes now."""
        masters, gathered = full_weights(self.model), self.gathered()
        off = sum((gathered[name].double() - master.double()).square().sum() for name, master in masters.items())
        return (off / sum(master.double().square().sum() for master in masters.values())).sqrt().item()

    def crossed(self) -> int:
        """Bytes of weights that this rank received from other nodes since the last call."""
        counts = self.handle.traffic.counts
        self.handle.traffic.reset()
        return sum(counts.get(name, Bytes()).cross_node for name in (GATHER_CROSS, GATHER_RESYNC))


def few_changes_are_sent_exactly(rank: int) -> None:
    auto, exact = Job(rank, AUTO), Job(rank, EXACT)
    assert auto.train([FEW] * 6) == exact.train([FEW] * 6)
    assert auto.crossed() == exact.crossed() > 0
    assert auto.is_exact()


def many_changes_are_sent_as_deltas(rank: int) -> None:
    """The first pass sends whole weights, the second encodes words and drops them, and later ones encode none."""
    auto, delta = Job(rank, AUTO), Job(rank, DELTA)
    assert auto.train([MANY] * 6) == delta.train([MANY] * 6)
    of_sizes = 8 * len(auto.handle.gathers)
    assert auto.crossed() == delta.crossed() + of_sizes
    assert not auto.is_exact() and auto.error() == delta.error() < 0.01


def words_of(job: Job) -> torch.Tensor:
    return torch.cat([param.to_local().bfloat16().view(torch.int16).flatten() for param in job.model.parameters()])


def the_estimate_is_what_is_sent(rank: int) -> None:
    """Bound: 0.2, since the estimate takes one share for all units, and the steps of trained models (``changed_words_bytes``).

    Beside it 24 bytes for each unit and step: its table, and padding to the rank with the most changes.
    """
    for rate in (FEW, 30 * FEW, MANY):
        job = Job(rank, AUTO)
        job.train([rate] * 3)
        before = words_of(job)
        job.crossed()
        job.train([rate])  # sends the step before
        share = (words_of(job) != before).double().mean().item()
        job.train([rate])
        expected = 0
        for gather in job.handle.gathers:
            num_bytes = changed_words_bytes(gather.layouts(torch.bfloat16), share)
            assert num_bytes is not None
            expected += 2 * gather.hops.cross_hop.peers.bytes_of(num_bytes).cross_node
        room = 2 * 24 * len(job.handle.gathers)
        assert 0.95 * expected <= job.crossed() <= 1.2 * expected + room, (rate, share)


def it_comes_back(rank: int) -> None:
    """When the learning rate falls, the row of deltas ends, words are sent once, and few of them from then on."""
    job = Job(rank, AUTO)
    job.train([MANY] * 3)
    job.train([FEW] * (DELTAS_IN_A_ROW - 3))  # the first pass sent whole weights
    assert not job.is_exact()  # asking sends the last delta of the row
    job.train([FEW])
    assert job.is_exact()
    job.train([FEW])
    job.crossed()
    job.train([FEW])
    assert job.is_exact() and 0 < job.crossed() < 0.1 * job.handle.traffic.model_bytes / 4


def it_stays_with_deltas(rank: int) -> None:
    """A row that ends where many words change still is followed by another."""
    job = Job(rank, AUTO)
    job.train([ALL] * (DELTAS_IN_A_ROW + 1))  # whole weights, and the row
    job.crossed()
    job.train([ALL])  # the words that a whole row of deltas left different
    catching_up = job.crossed()
    job.train([ALL] * 2)
    following = job.crossed()
    assert catching_up > following / 2, (catching_up, following)
    assert not job.is_exact()


def an_edit_ends_a_row(rank: int) -> None:
    job = Job(rank, AUTO)
    job.train([MANY] * 3)
    assert not job.is_exact()
    job.train([MANY])
    with torch.no_grad():
        for param in job.model.parameters():
            param.mul_(0.5)
    assert job.is_exact()


def cross_groups_choose_for_themselves(rank: int) -> None:
    """Every word of the ranks 0 and 2 changes and none of 1 and 3, so one rank of a node lands deltas, the other words."""
    job, seen = Job(rank, AUTO, torch.optim.SGD), []
    for step in range(5):
        backward(job.model, rank, step)
        for param in job.model.parameters():
            if rank % 2:
                param.grad.to_local().zero_()
        job.optimizer.param_groups[0]["lr"] = 1.0
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.crossed()
        assert job.error() < 0.01, step
        seen.append(job.crossed())
    assert (min(seen[2:]) > 1000) == (rank % 2 == 0), seen


def skipped_units_land_in_one_order(rank: int) -> None:
    """The second block is started ahead, skipped and changed, while one rank of a node is in a row and the other is not."""
    model = shard(make_lm(depth=2, hidden=64, inner=256), POLICIES["bf16"])
    apply_zeropp(model, AUTO)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(7):
        model.path = [0, 1] if step < 3 else [0]
        backward(model, rank, step)
        if step == 4:
            model.blocks[0].requires_grad_(False)  # so that whole weights of the first block cross in the next pass
        for param in model.parameters():
            if rank % 2 and param.grad is not None:
                param.grad.to_local().zero_()
        optimizer.step()
        for name, param in model.named_parameters():
            if not name.startswith("blocks.1."):  # whose gradients stay, and move it in steps that skip it
                param.grad = None


def a_checkpoint_resumes_bit_for_bit(rank: int) -> None:
    """Saved in the middle of a row of deltas."""
    ends = []
    job = Job(rank, AUTO, torch.optim.SGD)
    job.train([MANY] * 4)
    with tempfile.TemporaryDirectory() as folder:
        job.handle.save_state(folder)
        saved = {key: value.clone() for key, value in job.model.state_dict().items()}
        for _ in range(2):
            job.step = 4
            job.train([MANY] * 4)
            ends.append(full_weights(job.model))
            job.model.load_state_dict(saved)
            job.handle.load_state(folder)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def other_ways_of_the_same_choice(rank: int) -> None:
    rates = [MANY] * 4 + [FEW] * 3
    expected = Job(rank, AUTO).train(rates)
    for settings in ({"overlap": False}, {"shared_memory": False}, {"hpz_size": 1}):
        assert Job(rank, AUTO | settings).train(rates) == expected, settings


SCENARIOS = Scenarios(
    4,
    [
        few_changes_are_sent_exactly,
        many_changes_are_sent_as_deltas,
        the_estimate_is_what_is_sent,
        it_comes_back,
        it_stays_with_deltas,
        an_edit_ends_a_row,
        cross_groups_choose_for_themselves,
        skipped_units_land_in_one_order,
        a_checkpoint_resumes_bit_for_bit,
        other_ways_of_the_same_choice,
    ],
    env={"ZEROPP_CHECK": "1"},
)


@SCENARIOS.parametrize
def test_auto(scenario):
    SCENARIOS.check(scenario)


def in_any_world(rank: int) -> bool:
    job = Job(rank, AUTO)
    job.train([MANY] * 3)
    return job.error() < 0.01


@pytest.mark.parametrize("world_size", [2, 6])
def test_any_number_of_nodes(world_size):
    assert all(run_ranks(in_any_world, world_size, env={"ZEROPP_CHECK": "1"}))


def without_masters(rank: int) -> None:
    apply_zeropp(shard(make_lm().bfloat16(), POLICIES["fp32"]), AUTO)


def test_masters_are_needed():
    for error in expect_errors(without_masters, 4):
        assert "qwz_mode='auto' needs fp32 master weights" in error and "'exact'" in error
