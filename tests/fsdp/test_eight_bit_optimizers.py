"""Optimizers with moments in 8 bits beside ZeRO++: they read and write the masters, and see gradients that are complete.

The oracle is stock FSDP2 under the same optimizer. Each needs a package of its own, and is skipped without it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import run_ranks
from toy import EXACT, full_weights, make_lm, shard, train

from hf_zeropp import apply_zeropp

Optimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
UNQUANTIZED = EXACT | {"hpz_size": "node", "ranks_per_node": 1}


def torchao_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-3)


def bitsandbytes_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=16)


def trained(make: Optimizer, settings: dict | None, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of four steps of two micro-steps."""
    # torchao keeps 8 bits from 4096 elements of a shard on, and cuts them into blocks of 256.
    model = shard(make_lm(hidden=128, inner=256))
    handle = None if settings is None else apply_zeropp(model, settings)
    optimizer = make(model)
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


def beside_stock(rank: int, make: Optimizer) -> None:
    expected, weights = trained(make, None, rank)
    losses, own = trained(make, UNQUANTIZED, rank)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-3, atol=1e-3)
    losses, _ = trained(make, {"ranks_per_node": 1}, rank)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.01)


def torchao_beside_stock(rank: int) -> None:
    beside_stock(rank, torchao_adamw)


def bitsandbytes_on_stock(rank: int) -> None:
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        trained(bitsandbytes_adamw, None, rank)


def test_torchao_trains_as_under_stock():
    pytest.importorskip("torchao")
    # It compiles its step otherwise, which takes minutes.
    run_ranks(torchao_beside_stock, 2, env={"TORCHDYNAMO_DISABLE": "1"})


def test_bitsandbytes_does_not_run_on_fsdp2_itself():
    pytest.importorskip("bitsandbytes")
    run_ranks(bitsandbytes_on_stock, 2)
