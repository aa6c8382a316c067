"""Gradients of several dtypes in one unit, which FSDP2 takes since torch 2.15 (``param.grad_dtype``)."""

from __future__ import annotations

import pytest
import torch
from toy import backward, loss_of, loss_without_head, make_lm, shard, train
from two_nodes import on_four_ranks

from hf_zeropp import ZeroPPHandle, apply_zeropp

pytestmark = pytest.mark.skipif(torch.__version__ < "2.15", reason="FSDP2 takes one dtype per unit up to torch 2.14")

UNQUANTIZED = {"qwz_bits": None, "qgz_bits": None, "qgz_intra_bits": None, "ranks_per_node": 2}
BF16_EPSILON = torch.finfo(torch.bfloat16).eps
HALF = ("embed.weight", "norm.weight", "norm.bias")
"""Parameters of the root unit, which holds the head as well, and one of each block."""


def mixed_model(settings: dict, half: tuple[str, ...] = HALF) -> tuple[torch.nn.Module, ZeroPPHandle]:
    """Return a model in which the gradients of ``half`` are kept in bf16, and the others in fp32."""
    model = make_lm()
    for name, param in model.named_parameters():
        if name in half:
            param.grad_dtype = torch.bfloat16
    shard(model)
    return model, apply_zeropp(model, settings)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.to_local() for name, param in model.named_parameters() if param.grad is not None}


def scenario_parameters_used_on_some_ranks_only(rank: int) -> None:
    """Even ranks do not use the head. There FSDP2 would reduce the root's gradients in bf16, and elsewhere in fp32."""
    loss = loss_of if rank % 2 else loss_without_head
    found = []
    for half in ((), HALF):
        model, _ = mixed_model(UNQUANTIZED, half)
        backward(model, rank, 0, loss)
        found.append(gradients(model))
    plain, mixed = found
    assert plain.keys() == mixed.keys() and "head.weight" in plain  # a gradient on any rank is one on all
    for name, gradient in mixed.items():
        assert gradient.dtype == (torch.bfloat16 if name in HALF else torch.float32)
        # A gradient in bf16 is rounded on each rank, and once more behind the reduction.
        bound = (
            (2 * BF16_EPSILON if name in HALF else 1e-6) * plain[name].abs().max().item() if gradient.numel() else 0.0
        )
        torch.testing.assert_close(gradient.float(), plain[name], rtol=0, atol=bound)


def scenario_counted_is_predicted(rank: int) -> None:
    """The parts of a flat gradient do not lie in the order in which weights are gathered."""
    model, handle = mixed_model({"ranks_per_node": 2}, (*HALF, "blocks.0.up.weight"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, rank, range(2))
    predicted = handle.predict(1)
    for name, count in handle.traffic.counts.items():
        assert (count.cross_node, count.calls) == (2 * predicted[name].cross_node, 2 * predicted[name].calls), name


def scenario_ranks_that_differ_are_told(rank: int) -> None:
    """Their flat gradients would have other orders, and every number would be added to that of another parameter."""
    with pytest.raises(ValueError, match=r"its gradient in torch\.bfloat16"):
        mixed_model(UNQUANTIZED, HALF if rank == 1 else ())


test_gradient_dtypes = on_four_ranks(__name__)
