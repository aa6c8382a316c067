"""One machine without fast links between its ranks: preset "pcie" makes each rank a node, and all exchanges are quantized."""

from __future__ import annotations

import logging

import pytest
import torch
from accelerate_runs import batch_of, handle_of, new_accelerator, prepared, tiny_llama, train
from harness import run_ranks
from toy import logged_messages

pytestmark = pytest.mark.thorough

WORLD, STEPS = 4, 4
# Blocks of 128 to 256 elements need rows of that length, or the scales weigh as much as in no real model.
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def run(rank: int, zeropp, micro_steps: int):
    """Train on one batch per rank. Returns losses, bytes counted in the last step, bytes predicted, and the model's bytes."""
    accelerator = new_accelerator(zeropp, mixed_precision="bf16", micro_steps=micro_steps)
    model = tiny_llama(**SIZES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batches = range(micro_steps)
    losses = [train(accelerator, model, optimizer, rank, batches) for _ in range(STEPS - 1)]
    handle = handle_of(accelerator, model)
    if handle is not None:
        handle.traffic.reset()
    losses.append(train(accelerator, model, optimizer, rank, batches))
    losses = [sum(step) / micro_steps for step in losses]
    if handle is None:
        return losses, None, None, None
    counted = {name: (count.intra_node, count.cross_node) for name, count in handle.traffic.counts.items()}
    predicted = {name: (count.intra_node, count.cross_node) for name, count in handle.predict(micro_steps).items()}
    return losses, counted, predicted, 2 * sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_four_ranks_of_one_machine(micro_steps):
    """Losses near stock FSDP2's, and the bytes of the prediction: all of them quantized, none unquantized beside them."""
    stock = run_ranks(run, WORLD, False, micro_steps)
    ranks = run_ranks(run, WORLD, {"preset": "pcie"}, micro_steps)
    for (losses, counted, predicted, model_bytes), (theirs, *_) in zip(ranks, stock, strict=True):
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(theirs, rel=0.01)
        assert counted == predicted
        assert sum(within for within, _ in counted.values()) == 0
        # Two gathers in 8 bits for each micro-step, and one reduction in 4 bits; with scales.
        arrived = sum(cross for _, cross in counted.values())
        share = model_bytes * (WORLD - 1) / WORLD
        assert arrived == pytest.approx((2 * micro_steps * 0.5 + 0.25) * share, rel=0.04)


def warnings_without_preset(rank: int) -> list[str]:
    with logged_messages("hf_zeropp.apply", logging.WARNING) as lines, torch.no_grad():
        model, _ = prepared(new_accelerator({}))
        model(batch_of(rank, 0))
    return lines


def test_one_node_without_the_preset_is_told_of_it_once():
    [line], of_rank_1 = run_ranks(warnings_without_preset, 2)
    assert 'preset="pcie"' in line and "One node only (2 ranks)" in line and of_rank_1 == []
