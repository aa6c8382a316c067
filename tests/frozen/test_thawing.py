"""Frozen weights that are made trainable after ``prepare``, on 4 ranks (2 nodes)."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from frozen_runs import UNQUANTIZED, prepare, reset_accelerate, tiny_llama, tokens, with_adapter
from harness import Scenarios, scenarios_of
from rollout_runs import train_step

from hf_zeropp import ZeroPPPlugin
from hf_zeropp.comm.disagreement import DisagreementError

NAME = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"


def prepared():
    reset_accelerate()
    return prepare(with_adapter(tiny_llama()), **UNQUANTIZED)


def scenario_a_layer_that_thaws_is_refused_by_name(rank: int) -> None:
    accelerator, _, model, optimizer = prepared()
    train_step(accelerator, model, optimizer, rank)
    weight = model.get_parameter(NAME).requires_grad_(True)
    optimizer.add_param_group({"params": [weight]})
    with pytest.raises(
        ValueError, match=f"{NAME} was made trainable .*rank {rank}.*Set requires_grad before `prepare`"
    ):
        train_step(accelerator, model, optimizer, rank)
    weight.requires_grad_(False)
    train_step(accelerator, model, optimizer, rank)


def scenario_a_layer_that_thaws_on_one_rank_is_a_disagreement_of_all(rank: int) -> None:
    accelerator, _, model, optimizer = prepared()
    train_step(accelerator, model, optimizer, rank)
    if rank == 3:
        model.get_parameter(NAME).requires_grad_(True)
    with pytest.raises(DisagreementError, match=rf"ranks \[0, 1, 2\]: nothing; rank 3: {NAME}"):
        train_step(accelerator, model, optimizer, rank)


def scenario_a_model_that_was_all_frozen(rank: int) -> None:
    reset_accelerate()
    plugin = ZeroPPPlugin(zeropp={"ranks_per_node": 2})
    model = fsdp2_prepare_model(Accelerator(fsdp_plugin=plugin), tiny_llama().requires_grad_(False))
    model(tokens())
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="was made trainable after the model was prepared"):
        model(tokens())


SCENARIOS = Scenarios(4, scenarios_of(__name__))


@SCENARIOS.parametrize
def test_thawing(scenario):
    SCENARIOS.check(scenario)
