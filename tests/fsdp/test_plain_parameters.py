"""Parameters that are added to a sharded model are plain tensors, which FSDP2 does not know: who averages their gradients?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from toy import backward, make_lm, shard
from two_nodes import on_four_ranks

from hf_zeropp import apply_zeropp
from hf_zeropp.comm.disagreement import DisagreementError


class Adapted(nn.Module):
    """A layer and an adapter beside it, as PEFT puts it in a layer's place."""

    def __init__(self, layer: nn.Linear, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer = layer
        self.down = nn.Parameter(torch.randn(2, layer.in_features, generator=generator))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


def model_with_adapter(seed: int = 0):
    """Return a model under ZeRO++ to which an adapter was added, and the adapter's parameters."""
    model = shard(make_lm())
    apply_zeropp(model, {"ranks_per_node": 2})
    name, layer = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    adapted = Adapted(layer, seed)
    model.set_submodule(name, adapted)
    return model, [adapted.down, adapted.up]


def scenario_an_adapter_that_is_added_later_is_refused(rank: int) -> None:
    """Whether an optimizer of its own trains it, or that of the model; and not before it has gradients."""
    for has_own in (True, False):
        model, added = model_with_adapter()
        optimizer = torch.optim.AdamW(added if has_own else model.parameters(), lr=0.1)
        optimizer.step()
        backward(model, rank)
        before = [param.clone() for param in added]
        with pytest.raises(
            ValueError, match=r"AdamW .*not sharded: .*\.up\b.* Add adapters .*before accelerator\.prepare"
        ):
            optimizer.step()
        assert all(map(torch.equal, before, added))


def scenario_gradients_that_a_script_averages_are_used(rank: int) -> None:
    model, added = model_with_adapter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        backward(model, rank, step)
        for param in added:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    everyone = [torch.empty_like(added[1]) for _ in range(4)]
    dist.all_gather(everyone, added[1].detach())
    assert all(torch.equal(one, added[1]) for one in everyone) and added[1].any()


def scenario_parameters_of_single_ranks_are_let_be(rank: int) -> None:
    """They are no copies of each other, as experts are not that a script gives to single ranks."""
    model, (down, up) = model_with_adapter(seed=rank)
    with torch.no_grad():
        up.normal_(generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD([down, up], lr=0.1)
    backward(model, rank)
    optimizer.step()


def scenario_another_model_is_let_be(rank: int) -> None:
    model, _ = model_with_adapter()
    probe = nn.Linear(3, 3)
    if rank == 1:  # by itself
        probe(torch.ones(3)).sum().backward()
        torch.optim.SGD(probe.parameters(), lr=0.1).step()
    backward(model, rank)


def scenario_an_adapter_on_one_rank_raises_on_all(rank: int) -> None:
    model, added = model_with_adapter()
    params = [param for param in model.parameters() if rank == 1 or all(param is not one for one in added)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    backward(model, rank)
    with pytest.raises(
        DisagreementError, match="rank 1 is about to step an optimizer that trains parameters which are not"
    ):
        optimizer.step()
        backward(model, rank, 1)


test_parameters_without_a_unit = on_four_ranks(__name__)
