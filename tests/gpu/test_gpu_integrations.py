"""Accelerate, the Trainer, launchers, LoRA on a packed base and generation, on GPUs over NCCL, as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from frozen_runs import VOCAB, packed_copy, prepare, tiny_llama, tokens, with_adapter
from gpu_ranks import DEVICE, ON_ONE_GPU, needs_ranks_on_gpus, one_gpu, run_on_gpus
from harness import free_port
from transformers import Trainer, TrainingArguments

from hf_zeropp import ZeroPPCallback, generation_mode
from hf_zeropp.traffic import GATHER_CROSS

pytestmark = needs_ranks_on_gpus

WORLD = 4
SCRIPT = Path(__file__).parents[1] / "integrations/scripts/plain_accelerate.py"


def backends() -> str:
    """The backends of the process group that Accelerate or the Trainer has made."""
    return dist.get_backend_config()


def train_with_accelerate(rank: int, folder: str) -> tuple[str, list[float], list[float]]:
    """Train, save, train on; load, and train on once more. Return the backends, and the losses of both ways to go on."""
    accelerator, plugin, model, optimizer = prepare(tiny_llama(), mixed_precision="bf16")
    handle = plugin.handle_of(model)

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            batch = tokens(seed=100 * step + rank).to(accelerator.device)
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train(range(3))
    accelerator.save_state(folder)
    first = train(range(3, 6))
    accelerator.load_state(folder)
    assert handle.is_active and next(model.parameters()).device.type == DEVICE
    return backends(), first, train(range(3, 6))


def test_accelerate_with_its_own_process_group(tmp_path):
    for config, first, again in run_on_gpus(train_with_accelerate, WORLD, str(tmp_path), backend=None):
        assert DEVICE == "cpu" or "cpu:gloo" not in config, "Accelerate is expected to make a group of NCCL alone"
        assert first == again and first[-1] < 5.0


class Tokens(torch.utils.data.Dataset):
    """Sequences that count up from a random token."""

    def __init__(self, num_sequences: int) -> None:
        starts = torch.randint(3, VOCAB, (num_sequences, 1), generator=torch.Generator().manual_seed(1))
        self.ids = 3 + (starts + torch.arange(16)) % (VOCAB - 3)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train_with_trainer(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """Return the losses, and the gigabytes that each step sent across nodes."""
    args = TrainingArguments(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        bf16=True,
        fsdp=True,
        fsdp_config={"zeropp": {"ranks_per_node": 2}},
    )
    trainer = Trainer(tiny_llama(), args, train_dataset=Tokens(64), callbacks=[ZeroPPCallback()])
    trainer.train()
    trainer.save_model()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in logs], [entry["zeropp/cross_node_gb_per_step"] for entry in logs]


def test_the_trainer_with_its_callback(tmp_path):
    losses, gigabytes = run_on_gpus(train_with_trainer, WORLD, str(tmp_path), backend=None)[0]
    assert losses[-1] < losses[0] and min(gigabytes) > 0
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("launcher", ["accelerate", "hf-zeropp"])
def test_launchers(tmp_path, launcher):
    """Two machines of one rank, both this one. The script knows nothing of this package."""
    file = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "use_cpu": DEVICE == "cpu",
        "num_machines": 2,
        "num_processes": 2,
        "main_process_ip": "127.0.0.1",
        "main_process_port": free_port(),
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }
    command = ["accelerate.commands.accelerate_cli", "launch"]
    if launcher == "hf-zeropp":
        command, file["zeropp_config"] = ["hf_zeropp.cli", "launch"], {"ranks_per_node": 1}
    ranks = []
    for machine in range(2):
        config = tmp_path / f"machine_{machine}.yaml"
        config.write_text(yaml.safe_dump(file | {"machine_rank": machine}))
        words = [sys.executable, "-m", *command, "--config_file", str(config), str(SCRIPT)]
        environment = os.environ | ON_ONE_GPU | one_gpu.rank_variables(machine) | {"OMP_NUM_THREADS": "1"}
        if DEVICE == "cpu":
            environment["ACCELERATE_USE_CPU"] = "true"
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen([*words, "--out", str(tmp_path / "losses.json")], env=environment, **output))
    try:
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(text[-3000:] for text in said)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert all(loss < 6.0 for loss in losses)
    assert ("ZeRO++ is on: 2 nodes x 1 rank" in said[0]) == (launcher == "hf-zeropp"), said[0][-3000:]


def adapt_and_generate(rank: int) -> tuple[list[float], bool, int]:
    """Train LoRA on a base in 4 bits, then generate. Return losses, whether tokens are the unsharded model's, and bytes."""
    model = with_adapter(tiny_llama(hidden_size=128, intermediate_size=384), init_lora_weights=True)
    reference = packed_copy(model, 4).to(DEVICE)
    accelerator, plugin, model, optimizer = prepare(model, frozen_bits=4, qwz_bits=None)
    prompt = tokens(2, 6, seed=rank).to(accelerator.device)
    words = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    expected = reference.generate(**words)
    same = torch.equal(model.generate(**words), expected)
    traffic = plugin.handle_of(model).traffic
    traffic.reset()
    with generation_mode(model, memory_budget="1GB"):
        same &= torch.equal(model.generate(**words), expected)
    crossed = traffic.counts[GATHER_CROSS].cross_node if GATHER_CROSS in traffic.counts else 0
    losses = []
    for _ in range(6):
        batch = tokens(seed=rank).to(accelerator.device)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, same, crossed


def test_lora_on_four_bits_trains_and_generates():
    for losses, same, crossed in run_on_gpus(adapt_and_generate, WORLD, backend=None):
        assert same and crossed == 0
        assert losses[-1] < losses[0]
