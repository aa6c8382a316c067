"""``hf-zeropp tune`` on real scripts: what it measures and refuses, and that no process and no file of it stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from harness import free_port, started_ranks
from test_trainer_launch import CONFIGS
from test_tune_traces import listing
from test_unmodified import LAUNCHED
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import run
from hf_zeropp.integrations.tune import launches
from hf_zeropp.integrations.tune.candidates import OWN, STOCK, Candidate
from hf_zeropp.integrations.tune.command import tune
from hf_zeropp.integrations.tune.launches import command_of, has_config_file, launch
from hf_zeropp.integrations.tune.verdict import Measured

SCRIPT = """
import os, sys, torch
from accelerate import Accelerator, ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

accelerator = Accelerator(gradient_accumulation_steps=2, {replicas})
set_seed(0)
os.makedirs("out/deep", exist_ok=True)
open("out/deep/notes.txt", "w").write("made")
open("log.txt", "a").write("more")
torch.save({{}}, "early.pt")
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
*params, head = model.parameters()
optimizer, second = torch.optim.AdamW(params, lr={rate}), torch.optim.AdamW([head], lr={rate} / 10)
model, optimizer, second = accelerator.prepare(model, optimizer, second)
for step in range({steps}):
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=tokens).loss {change}
        {backward}(loss)
        optimizer.step()
        second.step()
        optimizer.zero_grad()
        second.zero_grad()
    os.makedirs("checkpoint", exist_ok=True)
    torch.save(optimizer.state_dict(), "checkpoint/optimizer.pt")
torch.save({{}}, "final.pt")
"""


REPLICAS = "parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)"
USUAL = {"steps": 40, "change": "", "rate": 1e-3, "replicas": "", "backward": "accelerator.backward"}


def script(folder: Path, **changes: Any) -> str:
    (folder / "log.txt").write_text("before")
    (folder / "script.py").write_text(SCRIPT.format(**{**USUAL, **changes}))
    return str(folder / "script.py")


# --------------------------------------------------------------------------------------- whole searches, on forked ranks


class ForkedJob:
    """Stands in for the launcher's process: ranks that the harness forks run ``hf_zeropp.run``, in seconds."""

    ranks_per_node, num_ranks = "1", 2

    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        self._stack = contextlib.ExitStack()
        words = command[command.index("launch") + 1 :]
        changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
        environment = LAUNCHED | {"ZEROPP_RANKS_PER_NODE": self.ranks_per_node} | changed
        ranks = started_ranks(run_words, self.num_ranks, words, env=environment, init=False)
        self._ranks = self._stack.enter_context(ranks)
        self.pid = self._ranks[0].pid

    def poll(self) -> int | None:
        return 0 if all(rank.has_ended() for rank in self._ranks) else None

    def wait(self) -> None:
        self._stack.close()


def run_words(rank: int, words: list[str]) -> None:
    os.chdir(Path(words[0]).parent)
    run.main(words)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches.subprocess, "Popen", ForkedJob)


def test_tune_on_two_ranks(tmp_path: Path, forked: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The promise: trials of a user's own script, one table of them, and no trace of them."""
    # For time: of the candidates the user's own settings alone.
    monkeypatch.setattr("hf_zeropp.integrations.tune.search.presets", lambda *_: [])
    monkeypatch.setattr("hf_zeropp.integrations.tune.search.ON_THE_RANK", {})
    path = script(tmp_path)
    before = listing(tmp_path)
    tune(["--steps", "6", "--json", path])
    assert listing(tmp_path) == before and {each.name for each in tmp_path.iterdir()} == set(before)
    found = json.loads(capsys.readouterr().out)
    stock, again, own = found["trials"]
    assert stock["name"] == again["name"] == "stock FSDP2" and own["name"] == "your settings"
    assert stock["losses"] == again["losses"] and len(stock["losses"]) == 6 and len(stock["seconds"]) == 3
    assert 0 < own["difference"] < 0.01
    assert own["about"]["learning_rate"] == 1e-4  # of the optimizer that has the lowest
    assert own["config"]["ranks_per_node"] == 1 and own["memory"] > 10**8
    # Two micro-steps: stock gathers four times and reduces once, and ours sends 8-bit weights and 4-bit gradients once.
    assert 6 < stock["cross_node"] / own["cross_node"] < 30
    assert found["recommended"] in (None, "your settings")


BAD = {
    "ends": ({"steps": 6}, "on stock FSDP2 the script ended after 3 of 6 steps: give it more data"),
    "crashes": ({"change": "+ None"}, "on stock FSDP2 the script failed: TypeError: unsupported operand"),
    "shows no loss": (
        {"backward": "(lambda loss: torch.autograd.backward([loss], [torch.ones(())]))"},
        "the script failed: ValueError: no backward pass of a step began with a scalar",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_scripts(tmp_path: Path, forked: None, name: str) -> None:
    changes, words = BAD[name]
    path = script(tmp_path, **changes)
    before = listing(tmp_path)
    with pytest.raises(SystemExit) as error:
        tune(["--steps", "6", path])
    assert words in error.value.code and "\n" not in error.value.code and "--steps" not in error.value.code
    assert listing(tmp_path) == before


def test_a_script_that_never_shards(tmp_path: Path, forked: None) -> None:
    path = tmp_path / "alone.py"
    path.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(9):\n    model(torch.ones(1, 4)).sum().backward()\n    optimizer.step()\n"
    )
    before = listing(tmp_path)
    with pytest.raises(
        SystemExit, match="trains, but shards no model with FSDP2: set `distributed_type: FSDP`"
    ) as error:
        tune([str(path)])
    assert "\n" not in str(error.value.code) and listing(tmp_path) == before


def test_replicas(
    tmp_path: Path, forked: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two nodes holds a replica. In a step FSDP2 averages the whole gradients over them once; nothing else crosses."""
    monkeypatch.setattr(ForkedJob, "ranks_per_node", "2")
    monkeypatch.setattr(ForkedJob, "num_ranks", 4)
    path, folder = script(tmp_path, replicas=REPLICAS), tmp_path_factory.mktemp("tuner")
    stock = dataclasses.replace(STOCK, ranks_per_node=2)
    ranks = launch(command_of([path]), folder / "stock", stock, 6, lambda _: None)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.device("meta"):
        params = [*LlamaForCausalLM(config).parameters()]
    # FSDP2 pads the first dimension to a multiple of the two ranks of a replica. The gradients are in float32.
    whole = sum(4 * -(-len(param) // 2) * 2 * param[0].numel() for param in params)
    measured = Measured.of(stock, ranks)
    assert measured.cross_node == whole
    # Gathers of two micro-steps and one reduction: at least three times half of the model to each of two ranks.
    assert measured.intra_node >= 3 * whole
    with pytest.raises(SystemExit, match="each replica of the model lies within one node"):
        tune(["--steps", "6", path])


TRAINER = """
import torch, transformers
from hf_zeropp import ZeroPPCallback

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(97, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}

class StepsAlone(transformers.TrainerCallback):
    def on_save(self, *args, **kwargs):
        raise AssertionError("the trial saved")

    def on_evaluate(self, *args, **kwargs):
        raise AssertionError("the trial evaluated")

arguments = transformers.TrainingArguments(
    "output", max_steps=20, per_device_train_batch_size=2, save_steps=1, eval_strategy="steps", eval_steps=1, report_to="none",
    logging_steps=50, learning_rate=1e-5, warmup_steps=10, use_cpu=True, fsdp=True, fsdp_config={"zeropp": {"ranks_per_node": 1}},
)
config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
transformers.set_seed(0)
model = transformers.LlamaForCausalLM(config)
callbacks = [ZeroPPCallback(), StepsAlone()]
trainer = transformers.Trainer(model, arguments, train_dataset=Data(), eval_dataset=Data(), callbacks=callbacks)
trainer.train()
trainer.save_model("final")
"""


def test_a_trainer_with_settings_of_its_own(
    tmp_path: Path, forked: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Candidates go over the script's settings, which would go over variables, and so the block to paste is one of Python."""
    exact = Candidate("exact", {"qwz_mode": "exact", "qwz_bits": None, "hpz_bits": None, "qgz_bits": 4})
    monkeypatch.setattr("hf_zeropp.integrations.tune.search.presets", lambda *_: [exact])
    monkeypatch.setattr("hf_zeropp.integrations.tune.report.best_of", lambda others, _: others[1])
    (tmp_path / "script.py").write_text(TRAINER)
    tune(["--steps", "7", "--json", str(tmp_path / "script.py")])
    assert os.listdir(tmp_path) == ["script.py"]
    found = json.loads(capsys.readouterr().out)
    *_, own, other = found["trials"]
    assert own["config"]["qwz_mode"] == "values" and other["config"]["qwz_mode"] == "exact"
    assert found["paste"] == "zeropp={'preset': 'exact', 'ranks_per_node': 1}"
    # The rate of a warm-up would let too few words change.
    assert {trial["about"]["learning_rate"] for trial in found["trials"]} == {1e-5}
    assert other["difference"] < 0.01 and 0 < other["difference"]


# ---------------------------------------------------------------------------------------------------------- real launches


def start_tune(folder: Path, *words: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ZEROPP_")}
    environment = inherited | LAUNCHED | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    del environment["ZEROPP_RANKS_PER_NODE"]
    command = [sys.executable, "-m", "hf_zeropp.cli", "tune", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=folder, **pipes)


def torchrun(node: int, port: int, path: str) -> list[str]:
    place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["torchrun", "--nproc-per-node", "1", *place, path]


def test_one_trial_through_the_launcher(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder, config = script(tmp_path), tmp_path_factory.mktemp("tuner"), "cpu_2_nodes_x_2_ranks.yaml"
    words = ["--config_file", str(CONFIGS / config), "--main_process_port", "0", path]
    before, steps = listing(tmp_path), []
    monkeypatch.chdir(tmp_path)
    ranks = launch(command_of(words), folder / "trial", OWN, 6, steps.append)
    assert len(ranks) == 4 and set(steps) == set(range(1, 7))
    own = Measured.of(OWN, ranks)
    assert own.about["num_nodes"] == own.about["ranks_per_node"] == own.about["micro_steps"] == 2
    # Each rank hands its node's other rank, in both micro-steps, what crosses nodes once.
    assert own.cross_node < own.intra_node < 20 * own.cross_node and own.memory > 10**8
    assert listing(tmp_path) == before and has_config_file(words)


def test_two_nodes_behind_torchrun_decide_alike(tmp_path: Path) -> None:
    path, port = script(tmp_path, rate=1e-5), free_port()
    before = listing(tmp_path)
    nodes = [start_tune(tmp_path, "--steps", "6", "--json", *torchrun(node, port, path)) for node in range(2)]
    said = [node.communicate(timeout=600) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first == second and listing(tmp_path) == before
    names = [trial["name"] for trial in first["trials"]]
    assert names[:3] == ["stock FSDP2", "stock FSDP2", "your settings"] and {"exact", "half_model"} <= {*names}
    assert "min_traffic" not in names  # one of the optimizers has 1e-6
    assert first["paste"].startswith("export ZEROPP_")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_search_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    path = script(tmp_path, steps=10**6)
    before = listing(tmp_path)
    job = ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), path]
    command = start_tune(tmp_path, "--steps", "10000", *job)
    deadline = time.monotonic() + 120
    while not (tmp_path / "early.pt").exists():
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.2)
    family = psutil.Process(command.pid).children(recursive=True)
    assert len(family) >= 3  # the launcher and its ranks
    command.send_signal(number)
    if number != signal.SIGKILL:  # people interrupt again when a program does not end at once
        time.sleep(0.3)
        command.send_signal(number)
    _, said = command.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    if number != signal.SIGKILL:  # then none is left who could remove files
        assert command.returncode == 1 and "interrupted" in said and listing(tmp_path) == before


COMMANDS = {
    "train.py --steps 3": "hf_zeropp.cli launch train.py --steps 3",
    "accelerate launch --num_machines 2 b.py": "hf_zeropp.cli launch --num_machines 2 --main_process_port 29503 b.py",
    "-m b": "hf_zeropp.cli launch -m b",
    "torchrun --nnodes 2 b.py c": "torch.distributed.run --nnodes 2 --master-port 29503 -m hf_zeropp.run b.py c",
    "torchrun --nnodes 2 --rdzv-endpoint h:1 b": (
        "torch.distributed.run --nnodes 2 --rdzv-endpoint h:1 --rdzv-endpoint h:4 -m hf_zeropp.run b"
    ),
    "torchrun -m b -m": "torch.distributed.run -m hf_zeropp.run -m b -m",
    "torchrun -m hf_zeropp.run b": "torch.distributed.run -m hf_zeropp.run b",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_the_command_of_a_job(words: str) -> None:
    assert command_of(words.split(), 3) == [sys.executable, "-m", *COMMANDS[words].split()]
