"""A model that Transformers shards at load, in a script that does not know this package, run as ``hf-zeropp launch`` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import expect_errors, free_port
from test_meshes import allow_parallelism_on_cpu
from trainer_runs import build_trainer, tiny_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

SCRIPT = Path(__file__).parent / "scripts/sharded_at_load.py"


def launch(folder: Path, **environ: str) -> tuple[list[float], str]:
    """Start the command with the script on two ranks. Return the losses, and what was printed."""
    file = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "use_cpu": True, "num_machines": 1}
    config = folder / "launch.yaml"
    config.write_text(yaml.safe_dump(file | {"num_processes": 2, "zeropp_config": {"ranks_per_node": 1}}))
    command = [sys.executable, "-m", "hf_zeropp.cli", "launch", "--config_file", str(config)]
    command += ["--main_process_port", str(free_port()), str(SCRIPT)]
    command += ["--model", str(folder / "model"), "--out", str(folder)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text()), ran.stdout + ran.stderr


@pytest.mark.thorough
def test_the_command_runs_a_script_whose_model_is_sharded_at_load(tmp_path: Path) -> None:
    """Accelerate's name for several ranks is MULTI_GPU, also on CPUs. Its file must not say FSDP, as the next test shows."""
    tiny_model().save_pretrained(tmp_path / "model")
    off, said = launch(tmp_path, ZEROPP_ENABLED="0")
    assert "ZeRO++ is on" not in said and "gather, across nodes" not in said
    ours, said = launch(tmp_path)
    assert "ZeRO++ is on: 2 nodes x 1 rank" in said and "gather, across nodes" in said
    assert ours == pytest.approx(off, rel=0.01) and ours != off


def train_with_checkpoints(rank: int, folder: str, saved: str) -> None:
    allow_parallelism_on_cpu()
    model = AutoModelForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(fsdp_size=2))
    build_trainer(folder, {"ranks_per_node": 1}, model=model, fsdp=None, save_strategy="steps", save_steps=1)


@pytest.mark.thorough
def test_transformers_does_not_resume_models_that_it_shards_at_load(tmp_path: Path) -> None:
    """The guide says so by these words."""
    saved = str(tmp_path / "model")
    tiny_model().save_pretrained(saved)
    for error in expect_errors(train_with_checkpoints, 2, str(tmp_path), saved):
        assert "Resuming is not supported for models sharded at load time (`DistributedConfig`)" in error
        assert "save_only_model=True" in error
