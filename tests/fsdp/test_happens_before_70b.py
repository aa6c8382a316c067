"""The happens-before checker on as many units and parameters as a 70B model has, on 16 nodes of 8 ranks."""

from __future__ import annotations

import torch
import torch.nn as nn
from happens_before import checked, fake_world
from harness import run_ranks
from test_happens_before import Outcome, outcome_of_checker
from torch.distributed.fsdp import fully_shard
from toy import POLICIES
from ways_through_steps import Training, apply

LAYERS_70B, PARAMS_OF_A_LAYER = 80, 13


class Layer(nn.Module):
    """A layer with as many parameters as a large model's, each of a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(8)) for _ in range(PARAMS_OF_A_LAYER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def step_of_70b(rank: int) -> Outcome:
    with fake_world(16 * 8) as host_groups:
        # FSDP2 cuts each parameter into 128 pieces when it shards. That takes longer than the step, and runs on one stream.
        model = nn.Sequential(*(Layer() for _ in range(LAYERS_70B)))
        for module in (*model, model):
            fully_shard(module, mp_policy=POLICIES["bf16"])
        with checked(host_groups) as checker:
            handle = apply(model)
            # DTensor plans an operation on n parameters at once in n * n steps, so there is a group for each layer.
            optimizer = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in model], foreach=True)
            Training(model, handle, optimizer).step(
                loss=lambda model, _: model(torch.ones(2, 8)).float().square().mean()
            )
        assert len(handle.units) == LAYERS_70B
        return outcome_of_checker(checker)


def test_a_step_with_the_units_of_a_70b_model_has_no_race():
    [outcome] = run_ranks(step_of_70b, 1, init=False, limit_s=300)
    assert not outcome.races, "\n".join(outcome.races)
    assert outcome.num_accesses > 100 * LAYERS_70B
