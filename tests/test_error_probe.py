"""The probe of ``bench_convergence.py --errors``: it measures errors, and does not change the training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from toy import EXACT, POLICIES, backward, make_lm, shard

from hf_zeropp import apply_zeropp

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts/benchmarks"))

from library.error_probe import GradientProbe, weight_error  # noqa: E402

WORLD = 4
STEPS = 5
LOW_BITS = {"qwz_mode": "delta", "qwz_bits": 2, "qgz_bits": 3}


def train(rank: int, settings: dict, probes: bool) -> dict:
    """Train for a few steps, and return the losses and the errors that a probe measured."""
    model = shard(make_lm(), POLICIES["bf16"])
    apply_zeropp(model, {"ranks_per_node": 2, **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = GradientProbe(model) if probes else None
    losses = []
    for step in range(STEPS):
        losses.append(backward(model, rank, step))
        if probe:
            probe.look()
            weight_error(model)
        optimizer.step()
        optimizer.zero_grad()
    if probe is None:
        return {"losses": losses}
    backward(model, rank, STEPS)
    return {"losses": losses, "sums": probe.errors(), "weights": weight_error(model)}


@pytest.mark.parametrize("settings", [{}, LOW_BITS], ids=["default", "low bits"])
def test_a_probe_changes_nothing(settings: dict) -> None:
    watched, alone = (run_ranks(train, WORLD, settings, probes) for probes in (True, False))
    assert [rank["losses"] for rank in watched] == [rank["losses"] for rank in alone]


def test_exact_reductions_have_no_error_and_gathers_that_of_bf16() -> None:
    for rank in run_ranks(train, WORLD, EXACT, True):
        assert max(rank["sums"]) < 1e-6
        assert 1e-4 < rank["weights"] < 2.0**-8


def test_quantization_shows_and_more_bits_show_less() -> None:
    four, eight = (run_ranks(train, WORLD, {"qgz_bits": bits}, True)[0] for bits in (4, 8))
    assert len(four["sums"]) == STEPS
    assert four["sums"][0] > 0.01
    assert eight["sums"][-1] < 0.7 * four["sums"][-1]
    assert four["weights"] > 2 * 2.0**-9
