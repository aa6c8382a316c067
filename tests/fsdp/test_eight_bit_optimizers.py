"""Optimizers with moments in 8 bits beside ZeRO++: they read and write the masters, and see gradients that are complete.

The oracle is stock FSDP2 under torchao's optimizer.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from toy import EXACT, full_weights, make_lm, shard, train

from hf_zeropp import apply_zeropp

UNQUANTIZED = EXACT | {"hpz_size": "node", "ranks_per_node": 1}


def trained(rank: int, settings: dict | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of four steps of two micro-steps."""
    from torchao.optim import AdamW8bit

    # torchao keeps 8 bits from 4096 elements of a shard on, and cuts them into blocks of 256.
    model = shard(make_lm(hidden=128, inner=256))
    handle = None if settings is None else apply_zeropp(model, settings)
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    losses = train(model, optimizer, rank, range(4), handle, micro_steps=2)
    assert any(
        getattr(value, "codes", value).dtype == torch.uint8
        for state in optimizer.state.values()
        for value in map(_local, state.values())
        if isinstance(value, torch.Tensor)
    )
    return losses, full_weights(model)


def _local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def beside_stock(rank: int) -> None:
    expected, weights = trained(rank, None)
    losses, own = trained(rank, UNQUANTIZED)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-3, atol=1e-3)
    losses, _ = trained(rank, {"ranks_per_node": 1})
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.01)


def test_torchao_trains_as_under_stock():
    pytest.importorskip("torchao")
    # It compiles its step otherwise, which takes minutes.
    run_ranks(beside_stock, 2, env={"TORCHDYNAMO_DISABLE": "1"})
