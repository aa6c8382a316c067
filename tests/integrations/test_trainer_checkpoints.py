"""Saving, resuming and loading under the Trainer: exact, in every format, with standard tools."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from harness import run_ranks
from peft import LoraConfig, get_peft_model
from trainer_runs import TWO_NODES, build_trainer, losses, same_weights, tiny_model, weights
from transformers import AutoModelForCausalLM, TrainerCallback

KINDS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT"]


def train(rank: int, folder: str, zeropp: dict, kind: str, resume_from: str | None, arguments: dict):
    trainer = build_trainer(folder, zeropp, fsdp_config={"state_dict_type": kind}, **arguments)
    trainer.train(resume_from_checkpoint=resume_from)
    return losses(trainer), weights(trainer)


@pytest.mark.thorough("SHARDED_STATE_DICT-rank", "FULL*")
@pytest.mark.parametrize(("kind", "where"), [(KINDS[0], "node"), (KINDS[1], "node"), (KINDS[1], "rank")])
def test_resume_is_exact_with_accumulation_and_across_the_schedule(tmp_path, kind, where):
    zeropp = TWO_NODES | {"qgz_until": 0.5, "qgz_accumulate": where}
    arguments = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    straight = run_ranks(train, 4, str(tmp_path), zeropp, kind, None, arguments)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = run_ranks(train, 4, str(tmp_path / "resumed"), zeropp, kind, checkpoint, arguments)
    for (losses_a, weights_a), (losses_b, weights_b) in zip(straight, resumed, strict=True):
        assert losses_b == losses_a
        assert same_weights(weights_a, weights_b)


def train_adapters(rank: int, folder: str, resume_from: str | None):
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    config = {"state_dict_type": "FULL_STATE_DICT"}
    trainer = build_trainer(folder, model=model, fsdp_config=config, save_strategy="steps", save_steps=3)
    trainer.train(resume_from_checkpoint=resume_from)
    return losses(trainer), {name: weight for name, weight in weights(trainer).items() if "lora_" in name}


@pytest.mark.thorough
def test_a_full_checkpoint_holds_the_adapters_of_all_ranks(tmp_path):
    """Accelerate before 1.15 writes rank 0's slice of them, and reads nothing back on the other ranks."""
    straight = run_ranks(train_adapters, 4, str(tmp_path), None)
    resumed = run_ranks(train_adapters, 4, str(tmp_path / "resumed"), str(tmp_path / "checkpoint-3"))
    for (losses_a, weights_a), (losses_b, weights_b) in zip(straight, resumed, strict=True):
        assert losses_b == losses_a
        assert weights_a and same_weights(weights_a, weights_b)


@pytest.mark.thorough
def test_sharded_checkpoint_resumes_on_another_shape(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-3}
    losses_a, _ = run_ranks(train, 4, str(tmp_path), TWO_NODES, KINDS[1], None, arguments)[0]
    arguments |= {"max_steps": 8, "ignore_data_skip": True}
    checkpoint = str(tmp_path / "checkpoint-4")
    for world_size, ranks_per_node in ((4, 1), (6, 3)):
        folder, zeropp = str(tmp_path / str(world_size)), {"ranks_per_node": ranks_per_node}
        losses_b, _ = run_ranks(train, world_size, folder, zeropp, KINDS[1], checkpoint, arguments)[0]
        assert losses_b[:4] == losses_a[:4] and len(losses_b) == 8
        assert max(losses_b[4:]) < losses_a[0], (losses_a, losses_b)  # it went on from there


class RaiseLearningRate(TrainerCallback):
    """Makes the last steps diverge, so that the best model is not the last."""

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 if state.global_step < 4 else 1.0


def load_best(rank: int, folder: str) -> None:
    for kind in KINDS:
        arguments = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
        arguments |= {"load_best_model_at_end": True, "fsdp_config": {"state_dict_type": kind}}
        trainer = build_trainer(os.path.join(folder, kind), callbacks=[RaiseLearningRate()], **arguments)
        trainer.train()
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert trainer.state.best_metric == min(evaluated) != evaluated[-1]
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluated), abs=1e-6)


@pytest.mark.thorough
def test_load_best_model_at_end(tmp_path):
    run_ranks(load_best, 4, str(tmp_path))


def save_after_training(rank: int, folder: str, kind: str):
    config = {"state_dict_type": kind}
    trainer = build_trainer(folder, fsdp_config=config, max_steps=3, save_strategy="steps", save_steps=3)
    trainer.train()
    trainer.save_model(os.path.join(folder, "final"))
    return weights(trainer)


def open_weights(folder) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: param.detach().numpy() for name, param in model.named_parameters()}


@pytest.mark.thorough
def test_saved_model_opens_without_this_package(tmp_path):
    expected = run_ranks(save_after_training, 4, str(tmp_path), "FULL_STATE_DICT")[0]
    for folder in ("final", "checkpoint-3"):
        assert same_weights(open_weights(tmp_path / folder), expected)
    assert b"zeropp" not in (tmp_path / "final" / "config.json").read_bytes()


@pytest.mark.thorough
def test_accelerate_merges_sharded_weights(tmp_path):
    expected = run_ranks(save_after_training, 4, str(tmp_path), "SHARDED_STATE_DICT")[0]
    sharded, merged = tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0", tmp_path / "merged"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights", str(sharded), str(merged)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    tiny_model().config.save_pretrained(merged)
    assert same_weights(open_weights(merged), expected)
