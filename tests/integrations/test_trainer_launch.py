"""examples/train_trainer.py from the command line, under Accelerate's launcher: settings arrive, and a model is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_zeropp.integrations.step_log import SAVING

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples/configs"
# tests/test_cli.py starts ``hf-zeropp launch``.
LAUNCHER = [
    *("accelerate.commands.accelerate_cli", "launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "4"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
]


def run_example(folder: Path, *more: str) -> str:
    """Train for two steps on four ranks, and return what the ranks printed."""
    flags = {
        "--fsdp_config": CONFIGS / "zeropp_trainer.json",
        "--output_dir": folder,
        "--text_files": os.path.join(sysconfig.get_path("stdlib"), "json", "*.py"),
        "--vocab_size": 300,
        "--seq_len": 16,
        "--max_steps": 2,
        "--logging_steps": 1,
        "--eval_strategy": "no",
    }
    command = [sys.executable, "-m", *LAUNCHER, str(ROOT / "examples/train_trainer.py"), "--fsdp", *more]
    command += [text for key, value in flags.items() for text in (key, str(value))]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.thorough
def test_example_from_the_command_line(tmp_path):
    assert "gather, across nodes" in run_example(tmp_path)
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert all(entry[SAVING] > 3 for entry in history if "loss" in entry)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 300


@pytest.mark.thorough
def test_example_with_muon(tmp_path):
    """The checkpoint says which optimizer trained what: matrices of layers have a momentum alone, all else AdamW's moments."""
    run_example(tmp_path, "--muon", "--save_strategy", "steps")
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]
    states = torch.load(tmp_path / "checkpoint-2/optimizer.bin")["state"]
    assert len(states) == len(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    for name, state in states.items():
        is_matrix = "layers." in name and "norm" not in name
        assert set(state) == ({"momentum_buffer"} if is_matrix else {"step", "exp_avg", "exp_avg_sq"}), name
