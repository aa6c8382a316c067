"""``ZEROPP_ENABLED=0`` changes collectives alone: what a job can do with ZeRO++ on, it can do with ZeRO++ off."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from accelerate_runs import TWO_NODES, UNQUANTIZED, batch_of, new_accelerator, prepared, tiny_llama, train
from frozen_runs import with_adapter
from harness import Scenarios, run_ranks, scenarios_of
from torch.distributed.tensor import DTensor
from trainer_runs import build_trainer, losses
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, T5Config
from transformers import T5ForConditionalGeneration as T5

from hf_zeropp import generation_mode, publish_weights

SWITCHES = {"on": "1", "off": "0"}


def with_and_without(job, *args) -> None:
    """Run a job under both, and compare what it returns: numbers, but for the order of sums."""
    found = {}
    for name, value in SWITCHES.items():
        with mock.patch.dict(os.environ, ZEROPP_ENABLED=value):
            found[name] = job(new_accelerator(UNQUANTIZED), *args)
    assert found["off"] == pytest.approx(found["on"], rel=1e-5)


def llava() -> LlavaForConditionalGeneration:
    """Its ``_no_split_modules`` name classes that it does not contain, for which Accelerate looks."""
    torch.manual_seed(0)
    text = LlamaConfig(hidden_size=24, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=16, patch_size=8, **shape)
    features = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=5, **features)
    )


def t5() -> T5:
    """Three modules share its embedding."""
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "d_model": 24, "d_kv": 6, "d_ff": 56, "num_layers": 2, "num_heads": 4}
    return T5(T5Config(dropout_rate=0.0, decoder_start_token_id=0, **shape))


def scenario_models_whose_units_accelerate_cannot_choose(rank: int) -> None:
    def losses_of(accelerator, make) -> list[float]:
        model, optimizer = prepared(accelerator, make())
        return train(accelerator, model, optimizer, rank, range(2))

    for make in (llava, t5):
        with_and_without(losses_of, make)


def scenario_generation_and_publishing_with_adapters(rank: int) -> None:
    """PEFT's ``generate`` calls the base model, past the root that gathers what no block owns."""

    def tokens_and_sums(accelerator) -> list[float]:
        model = with_adapter(tiny_llama())
        trained = [param for param in model.parameters() if param.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1))
        train(accelerator, model, optimizer, rank, range(1))
        inputs = batch_of(rank, 0)
        found = model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=2 + rank, pad_token_id=0
        )
        with generation_mode(model, memory_budget="1MB"):
            model(input_ids=inputs)
        return found.flatten().tolist() + [weight.double().norm().item() for _, weight in publish_weights(model)]

    with_and_without(tokens_and_sums)


SCENARIOS = Scenarios(4, scenarios_of(__name__), init=False)


@SCENARIOS.parametrize
def test_the_switch(scenario):
    SCENARIOS.check(scenario)


def evaluate_and_train(rank: int, folder: str) -> None:
    found = {}
    for name, value in SWITCHES.items():
        with mock.patch.dict(os.environ, ZEROPP_ENABLED=value):
            trainer = build_trainer(folder, TWO_NODES | UNQUANTIZED, max_steps=2)
            first = trainer.evaluate()["eval_loss"]
            # Before 5.24 Transformers would give the optimizer what the evaluation left gathered, which is a KeyError.
            assert all(isinstance(param, DTensor) for param in trainer.model.parameters())
            trainer.train()
            found[name] = [first, *losses(trainer), trainer.evaluate()["eval_loss"]]
    assert found["off"] == pytest.approx(found["on"], rel=1e-5)


@pytest.mark.thorough
def test_an_evaluation_before_training(tmp_path):
    run_ranks(evaluate_and_train, 4, str(tmp_path))
