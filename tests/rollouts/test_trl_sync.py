"""TRL trainers with ``use_vllm=True`` on 4 ranks (2 nodes), with an engine that is a plain model: weights, bytes, refusals.

vLLM is not needed: what TRL calls of it is built here on a model of Transformers. test_vllm.py does the same with vLLM itself.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from frozen_runs import prepare, reset_accelerate
from harness import each_case, run_ranks
from peft import LoraConfig, get_peft_model
from rollout_runs import (
    LORA,
    arguments,
    distinct_tokens,
    no_full_tensors,
    prompt_data,
    save_model,
    seen_in_forward,
    train_step,
)
from toy import logged_messages
from trainer_runs import TWO_NODES, callback_of, tiny_model, token_data, training_arguments
from transformers import AutoModelForCausalLM, Trainer
from trl.generation.vllm_generation import VLLMGeneration

from hf_zeropp import ZeroPPCallback
from hf_zeropp.integrations.step_log import CROSS_NODE, ROLLOUT_CROSS_NODE, ROLLOUT_INTRA_NODE
from hf_zeropp.integrations.trainer import feeds_engine
from hf_zeropp.rollouts.trl_sync import count_as_published, publish_to_vllm, warn_if_unused
from hf_zeropp.traffic import GATHER_CROSS, Bytes


class Engine:
    """A model of its own, which takes weights by name and generates: the part of ``vllm.LLM`` that TRL calls."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.cache_resets = 0
        self.cast(torch.float32)
        runner = SimpleNamespace(model=self)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def cast(self, dtype: torch.dtype) -> None:
        self.weights = dict(self.model.to(dtype).named_parameters())

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        for name, weight in weights:
            self.weights[name].copy_(weight)

    def reset_prefix_cache(self) -> None:
        self.cache_resets += 1


class Server:
    """TRL's client of a server: it collects all weights before it hands the first on, as the packed broadcast may."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reset_prefix_cache = engine.reset_prefix_cache

    def update_named_params(self, metadata, named_params) -> None:
        weights = list(named_params)
        assert [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in weights] == metadata
        self.engine.load_weights(weights)


class Generation(VLLMGeneration):
    """TRL's class with an ``Engine`` in the place of vLLM's. ``sync_weights`` and what it iterates over are TRL's and ours."""

    def _init_vllm(self) -> None:
        self.llm = self.engine = Engine(self.model.name_or_path)
        self.vllm_client = Server(self.llm)
        self.wrong: list[str] = []

    def sync_weights(self) -> None:
        with no_full_tensors():
            super().sync_weights()
        seen = seen_in_forward(self.model)
        if self.mode == "server" and not self.accelerator.is_main_process:
            return
        assert seen.keys() == self.engine.weights.keys(), seen.keys() ^ self.engine.weights.keys()
        self.wrong += [name for name in seen if not torch.equal(seen[name], self.engine.weights[name])]

    def generate(self, prompts, images, num_generations, profiler=None):
        ids = torch.tensor(prompts)
        settings = {"do_sample": True, "max_new_tokens": self.max_completion_length}
        written = self.engine.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        completions = written[:, ids.shape[1] :].tolist()
        return prompts, completions, [[[0.0] for _ in row] for row in completions], None


def train(rank: int, folder: str, model: str) -> None:
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    grpo_trainer.VLLMGeneration = Generation
    # The engine reports no probabilities of its tokens, by which GRPO would weigh them.
    config = GRPOConfig(**arguments(folder, TWO_NODES, vllm_importance_sampling_correction=False))
    trainer = GRPOTrainer(
        model, distinct_tokens, args=config, train_dataset=prompt_data(), callbacks=[ZeroPPCallback()]
    )
    generation = trainer.vllm_generation
    first = {name: weight.clone() for name, weight in generation.engine.weights.items()}
    trainer.train()
    assert generation.wrong == [] and generation.engine.cache_resets == 3
    assert not any(torch.equal(first[name], weight) for name, weight in generation.engine.weights.items())

    handle = callback_of(trainer).handle
    predicted = sum(count.cross_node for count in handle.predict(1).values()) * handle.traffic.ranks_per_node
    assert handle.traffic.cross_node_bytes == predicted * config.max_steps > 0
    # The weights cross while the engine is fed, and gradients do not.
    logs = [log for log in trainer.state.log_history if CROSS_NODE in log]
    assert logs and all(0 < log[ROLLOUT_CROSS_NODE] < log[CROSS_NODE] for log in logs)
    assert all(log[ROLLOUT_INTRA_NODE] > 0 for log in logs)


@pytest.mark.thorough
def test_an_unmodified_trainer_feeds_its_engine_without_a_byte_of_its_own(tmp_path):
    run_ranks(train, 4, str(tmp_path), save_model(tmp_path / "model"))


BY_HAND = {
    "full": (None, {"mixed_precision": "bf16"}),
    "deltas": (None, {"qwz_mode": "delta", "qwz_bits": 4}),
    "one node": (None, {"ranks_per_node": 4}),
    "LoRA": (LORA, {}),
    "LoRA on 4 bits": (LORA, {"frozen_bits": 4}),
}


def sync_by_hand(rank: int, folder: str, mode: str) -> None:
    """Train steps of an Accelerate loop, each followed by TRL's ``sync_weights``."""
    publish_to_vllm(SimpleNamespace(use_vllm=True))

    def check(case: str) -> None:
        lora, settings = BY_HAND[case]
        model = AutoModelForCausalLM.from_pretrained(folder)
        model = model if lora is None else get_peft_model(model, LoraConfig(**lora))
        accelerator, plugin, model, optimizer = prepare(model, **settings)
        generation = Generation(model, accelerator, None, mode=mode)
        generation.engine.cast(torch.bfloat16 if "mixed_precision" in settings else torch.float32)
        first = {name: weight.clone() for name, weight in generation.engine.weights.items()}
        for step in range(2):
            train_step(accelerator, model, optimizer, seed=10 * rank + step)
            handle = plugin.handle_of(model)
            handle.traffic.reset()
            generation.sync_weights()  # and a forward pass
            one_gather = handle.predict(1).get(GATHER_CROSS, Bytes()).cross_node * 2
            assert handle.traffic.cross_node_bytes == one_gather and (one_gather > 0) == (case != "one node")
        has_changed = any(not torch.equal(first[name], each) for name, each in generation.engine.weights.items())
        assert generation.wrong == [] and has_changed == (mode == "colocate" or rank == 0)
        reset_accelerate()

    each_case(BY_HAND, check)


@pytest.mark.thorough("server")
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_each_mode_syncs_the_weights_of_the_next_forward(tmp_path, mode):
    run_ranks(sync_by_hand, 4, save_model(tmp_path / "model"), mode)


def test_models_that_are_not_under_zeropp_keep_the_way_of_trl(tmp_path):
    publish_to_vllm(SimpleNamespace(use_vllm=True))
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path))
    generation = Generation(model, Accelerator(cpu=True), None)
    given = list(generation._iter_named_params())
    assert [name for name, _ in given] == [name for name, _ in model.named_parameters()]
    assert all(weight.data_ptr() == model.get_parameter(name).data_ptr() for name, weight in given)


def test_a_trl_without_the_seam_is_refused(monkeypatch):
    monkeypatch.delattr(VLLMGeneration, "_iter_named_params")
    publish_to_vllm(SimpleNamespace(use_vllm=False))
    with pytest.raises(ValueError, match=r"expected TRL 1\.11 or newer, got .* set use_vllm=False"):
        publish_to_vllm(SimpleNamespace(use_vllm=True))


def test_trainers_that_feed_an_engine_are_known_and_warned_of_once(caplog):
    server = SimpleNamespace(vllm_server_base_url="")
    assert feeds_engine(SimpleNamespace(use_vllm=True)) and feeds_engine(server)
    assert not feeds_engine(SimpleNamespace()) and not feeds_engine(SimpleNamespace(use_vllm=False))
    model = torch.nn.Linear(2, 2)
    warn_if_unused(server, model)
    count_as_published(model)
    warn_if_unused(server, model)
    assert caplog.text.count("gather every weight over all nodes") == 1


def train_with_a_sync_of_its_own(rank: int, folder: str) -> None:
    """A Trainer with the attribute by which TRL's asynchronous ones say that a server takes adapters."""
    for sends_adapters in (True, False):
        args = training_arguments(folder, max_steps=1)
        args.vllm_server_base_url = ""
        trainer = Trainer(tiny_model(), args, train_dataset=token_data(16), callbacks=[ZeroPPCallback()])
        trainer._lora_sync = sends_adapters
        with logged_messages("hf_zeropp.rollouts.trl_sync") as warnings:
            trainer.train()
        assert (warnings == []) == (sends_adapters or rank > 0), warnings


@pytest.mark.thorough
def test_a_trainer_that_sends_adapters_alone_is_not_warned_of(tmp_path):
    run_ranks(train_with_a_sync_of_its_own, 4, str(tmp_path))


@pytest.mark.thorough
def test_nothing_is_imported_without_use_vllm():
    script = """
import sys
from transformers import TrainingArguments
from hf_zeropp import ZeroPPCallback
from hf_zeropp.integrations.trainer import feeds_engine
ZeroPPCallback()
assert not feeds_engine(TrainingArguments(use_cpu=True))
assert not {"trl", "vllm", "hf_zeropp.rollouts"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
