"""Mistakes that take a whole job to show: scripts of two ranks under a launcher, each in new processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml
from catalogue import EVERY_RANK, ONE_RANK, WAITING, Mistake, Outcome
from command_mistakes import FSDP2
from harness import free_port

LIMIT_S = 240.0
HUNG = "no end"
PACKAGE = ["hf_zeropp.cli", "launch"]
STOCK = ["accelerate.commands.accelerate_cli", "launch"]

TRAIN = """
import os, torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
rank = int(os.environ["RANK"])
{before}
accelerator = Accelerator({arguments})
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.arange(32).view(2, 16)
for step in range({steps}):
    {inside}
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""

ALONE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""


def script(before: str = "", arguments: str = "", inside: str = "pass", steps: str = "4") -> str:
    return TRAIN.format(before=before, arguments=arguments, inside=inside, steps=steps)


def job(
    name: str, text: str, *words: str, said_by: str = EVERY_RANK, launcher: list[str] = PACKAGE, **env: str
) -> Mistake:
    def make() -> Outcome:
        Path("script.py").write_text(text)
        config = FSDP2 | {"num_processes": 2}
        config["fsdp_config"] = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        Path("config.yaml").write_text(yaml.safe_dump(config))
        flags = ["--config_file", "config.yaml", "--main_process_port", str(free_port()), "script.py"]
        variables = {"OMP_NUM_THREADS": "1", "ZEROPP_RANKS_PER_NODE": "1", "ACCELERATE_USE_CPU": "true"} | env
        return _run([sys.executable, "-m", *launcher, *flags], variables, words)

    return Mistake(name, make, words, said_by=said_by)


def _run(command: list[str], env: dict[str, str], words: tuple[str, ...]) -> Outcome:
    """Run a job until it has ended. The seconds are those until the message came, imports of the ranks included."""
    start, seconds, lines = time.perf_counter(), 0.0, []
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ZEROPP_", "ACCELERATE_", "FSDP_"))}
    with subprocess.Popen(
        ["timeout", "-k", "5", str(LIMIT_S), *command],  # it ends the ranks too, and so their ends of the pipe
        env=kept | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            lines.append(line.rstrip())
            if words[0] in line and not seconds:
                seconds = time.perf_counter() - start
    if process.returncode in (124, 137):
        return Outcome(HUNG, LIMIT_S)
    message = next((line for line in lines if words[0] in line), f"exit code {process.returncode}, no such message")
    return Outcome(message, seconds or time.perf_counter() - start)


JOBS = [
    job(
        "a script that shards nothing",
        ALONE,
        "no model runs under ZeRO++",
        "no Accelerator and no sharded model",
        "ZEROPP_ENABLED=0",
    ),
    job(
        "a misspelt setting in a script",
        script("from hf_zeropp import ZeroPPPlugin", "fsdp_plugin=ZeroPPPlugin(zeropp={'qwz_bit': 8})"),
        *("Unknown ZeRO++ setting 'qwz_bit'", "Did you mean 'qwz_bits'?"),
    ),
    job(
        "a misspelt variable under the stock launcher",
        script("from hf_zeropp import ZeroPPPlugin", "fsdp_plugin=ZeroPPPlugin()"),
        *("Unknown environment variable ZEROPP_QWZ_BITZ", "'ZEROPP_QWZ_BITS'"),
        launcher=STOCK,
        ZEROPP_QWZ_BITZ="8",
    ),
    job(
        "ranks without a device under the stock launcher",
        script("from hf_zeropp import ZeroPPPlugin", "fsdp_plugin=ZeroPPPlugin()"),
        *("takes it for the only one", "of 2", "export ACCELERATE_USE_CPU=true"),
        launcher=STOCK,
        ACCELERATE_USE_CPU="false",
        CUDA_VISIBLE_DEVICES="",
    ),
    job(
        "a variable on one rank",
        script("os.environ['ZEROPP_QGZ_BITS'] = '8' if rank else '4'"),
        *("Ranks must agree on ZeRO++'s settings", "qgz_bits", "rank 1"),
    ),
    job(
        "the switch on one rank",
        script("os.environ['ZEROPP_ENABLED'] = '0' if rank else '1'"),
        *("Ranks must agree on whether ZeRO++ runs", "off for rank 1"),
    ),
    job(
        "a shorter epoch on one rank",
        script(steps="4 - rank"),
        *("waited in vain", "forward pass", "Look for the first error"),
        said_by=WAITING,
    ),
    job(
        "another forward pass on one rank",
        script(inside="rank or model(input_ids=tokens)"),
        *("Ranks", "rank 0", "forward"),
    ),
    job("a rank that raises", script(inside="rank and 1 / (step - 2)"), "ZeroDivisionError", said_by=ONE_RANK),
    job(
        "a rank that dies", script(inside="step == 2 and rank and os._exit(3)"), "exitcode  : 3", said_by="the launcher"
    ),
]
