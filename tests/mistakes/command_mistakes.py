"""Wrong command lines: ``hf-zeropp`` and its commands. Nothing may start."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from catalogue import Mistake

from hf_zeropp import cli

FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 4,
    "mixed_precision": "no",
    "fsdp_config": {"fsdp_version": 2},
}


def command(name: str, line: str, *words: str, env: dict[str, str] | None = None) -> Mistake:
    return Mistake(name, lambda: cli.main(line.split()), words, env or {})


def launch(name: str, change: dict[str, Any], *words: str, line: str = "script.py", **env: str) -> Mistake:
    """A launch with the file ``config.yaml``: FSDP2 on four ranks, with some of its keys changed."""

    def make() -> None:
        Path("script.py").touch()
        Path("config.yaml").write_text(yaml.safe_dump(FSDP2 | change))
        # A job that starts is a mistake that was not noticed.
        error = AssertionError("a job was started")
        names = dict.fromkeys(("multi_gpu_launcher", "simple_launcher"), mock.Mock(side_effect=error))
        with mock.patch.multiple("accelerate.commands.launch", **names):
            cli.main(["launch", "--config_file", "config.yaml", *line.split()])

    return Mistake(name, make, ("hf-zeropp launch: ", *words), env)


def settings(**values: Any) -> dict[str, Any]:
    return {"zeropp_config": values}


def fsdp(values: dict[str, Any]) -> dict[str, Any]:
    return {"fsdp_config": FSDP2["fsdp_config"] | values}


COMMANDS = [
    command("unknown command", "lunch", "invalid choice: 'lunch'", "launch"),
    command("no number of ranks", "estimate 7B", "--world"),
    command("misspelt count", "estimate 7X --world 8", "such as 7B", "got '7X'", "organization/model"),
    command("no parameters", "estimate 0 --world 8", "positive parameter count", "got '0'"),
    command("no ranks", "estimate 7B --world 0", "--world: expected a positive int", "got '0'"),
    command("negative ranks", "estimate 7B --world -4", "--world: expected a positive int", "got '-4'"),
    command("ranks that nodes do not divide", "estimate 7B --world 10", "8 ranks per node", "Divisors: [1, 2, 5, 10]"),
    command("no micro-step", "estimate 7B --world 8 --accumulation 0", "--accumulation: expected a positive int"),
    command("LoRA of rank 0", "estimate 7B --world 8 --lora 0", "--lora: expected a positive int", "got '0'"),
    command("bits of no format", "estimate 7B --world 8 --lora 8 --frozen-bits 3", "--frozen-bits", "3", "16, 8, 4"),
    command("unknown optimizer", "estimate 7B --world 8 --optimizer adam", "invalid choice: 'adam'", "adamw"),
    command("settings that are not there", "estimate 7B --world 8 --zeropp z.yaml", "'z.yaml'", "Check the path"),
    command("wrong settings in force", "env", "hf-zeropp env: ", "got 'four'", env={"ZEROPP_QGZ_BITS": "four"}),
    launch("machines of different sizes", {"num_machines": 3}, "a multiple of num_machines=3", "Change one"),
    launch("misspelt setting", settings(qwz_bitz=8), "zeropp_config", "'config.yaml'", "Did you mean 'qwz_bits'?"),
    launch("a block under another name", {"zeropp": {"qwz_bits": 8}}, "unknown keys (['zeropp'])"),
    launch("settings without the block", {"qgz_bits": 8}, "unknown keys (['qgz_bits'])"),
    launch("a block under FSDP's", fsdp({"zeropp": "exact"}), "'zeropp' stands under `fsdp_config:`", "the top level"),
    launch("a setting under FSDP's", fsdp({"fsdp_qwz_bits": 4}), "'qwz_bits' stands under", "`zeropp_config:`"),
    launch("a misspelt block", {"zeropp_confg": {}}, "unknown keys (['zeropp_confg'])"),
    launch("a block that names no file", {"zeropp_config": "gone.yaml"}, "'gone.yaml'", "Check the path"),
    launch("a block that names no preset", {"zeropp_config": "fast"}, "neither a preset (paper, ", "'config.yaml'"),
    launch("a number for a block", {"zeropp_config": 8}, "zeropp_config", "must be a mapping", "int"),
    launch("settings twice", settings(), "both ZEROPP_CONFIG_FILE", "Drop one", ZEROPP_CONFIG_FILE="z.yaml"),
    launch("a misspelt variable", settings(), "Did you mean 'ZEROPP_QWZ_BITS'?", ZEROPP_QWZ_BITZ="8"),
    launch("half a switch", settings(), "ZEROPP_ENABLED", "'perhaps'", ZEROPP_ENABLED="perhaps"),
    launch("DeepSpeed", {"distributed_type": "DEEPSPEED"}, "expected distributed_type: FSDP", "DEEPSPEED"),
    launch("plain data parallel", {"distributed_type": "MULTI_CPU"}, "starts one process", "distributed_type: FSDP"),
    launch("one process by a flag", {}, "starts one process with --cpu", "`use_cpu: true`", line="--cpu script.py"),
    launch("another file", {}, "cannot read the config file 'gone.yaml'", line="--config_file gone.yaml script.py"),
]
