"""The command line: its help, launching with a zeropp_config block or a file, and the table of ``hf-zeropp env``."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml
from harness import free_port

from hf_zeropp import cli
from hf_zeropp.compat import TESTED
from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.integrations.launch import command as launcher

ROOT = Path(__file__).parent.parent
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2},
}
SETTINGS = {"qwz_bits": 4, "qgz_bits": 8, "ranks_per_node": 1}

SCRIPT = '''
import ctypes, json, sys
import torch
from accelerate import Accelerator
from hf_zeropp import ZeroPPPlugin


def bytes_kept():
    """Return how much malloc keeps of memory that is freed below memory in use, as activations lie above gathered weights."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return 0
    info = ctypes.CDLL(None).mallinfo2
    info.restype = type("Info", (ctypes.Structure,), {"_fields_": [(f"f{i}", ctypes.c_size_t) for i in range(10)]})
    torch.ones(2**20)  # glibc raises its threshold when it is freed
    unit, before = torch.ones(2**20), info().f8
    activation = torch.ones(2**12)
    del unit
    return info().f8 - before


plugin = ZeroPPPlugin()
accelerator = Accelerator(fsdp_plugin=plugin)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
model(torch.ones(2, 8)).sum().backward()
handle = plugin.handle_of(model)
if accelerator.is_main_process:
    facts = {"argv": sys.argv[2:], "bits": [handle.config.qwz_bits, handle.config.qgz_bits], "active": handle.is_active}
    facts |= {"cross": handle.traffic.cross_node_bytes, "precision": accelerator.mixed_precision}
    facts["kept"] = bytes_kept()
    open(sys.argv[1], "w").write(json.dumps(facts))
accelerator.end_training()
'''


@pytest.fixture(autouse=True)
def own_environment():
    """Undo what ``hf-zeropp launch`` exports for the job that it becomes, or the next test would find it."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("ZEROPP_") and name != "ZEROPP_KERNELS"]:
            del os.environ[name]
        yield


@pytest.fixture
def jobs(tmp_path, monkeypatch) -> list[tuple[argparse.Namespace, ZeroPPConfig]]:
    """The arguments and the settings of the jobs that Accelerate would start, in a folder that has a script."""
    started = []
    for name in ("multi_gpu_launcher", "simple_launcher"):
        start = "accelerate.commands.launch." + name
        monkeypatch.setattr(start, lambda args: started.append((args, ZeroPPConfig.from_env())))
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    return started


def launch(change: dict, *flags: str) -> None:
    """Launch the script, with a config file that differs from ``ACCELERATE``."""
    Path("config.yaml").write_text(yaml.safe_dump(ACCELERATE | change))
    cli.main(["launch", "--config_file", "config.yaml", *flags, "script.py"])


@pytest.mark.thorough
def test_launch_takes_the_zeropp_block_and_delegates_the_rest(tmp_path) -> None:
    config, script, facts = (tmp_path / name for name in ("config.yaml", "script.py", "facts.json"))
    config.write_text(yaml.safe_dump(ACCELERATE | {"zeropp_config": SETTINGS}))
    script.write_text(SCRIPT)
    # Another job on this machine may hold the launcher's default port.
    command = [sys.executable, "-m", "hf_zeropp.cli", "launch", "--main_process_port", str(free_port())]
    command += ["--config_file", str(config), str(script), str(facts), "--steps", "3"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(facts.read_text())
    assert told["bits"] == [4, 8] and told["active"] and told["cross"] > 0
    assert told["argv"] == ["--steps", "3"] and told["precision"] == "bf16"
    assert told["kept"] < 2**20, "memory of gathered weights does not go back to the system"


def test_an_empty_zeropp_block_means_the_defaults(jobs) -> None:
    launch({"zeropp_config": None})
    assert [settings for _, settings in jobs] == [ZeroPPConfig()]


@pytest.mark.parametrize(
    ("variables", "is_cpu", "threshold"),
    [
        ({}, True, "1048576"),
        ({}, False, None),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, True, "65536"),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}, True, None),
    ],
)
def test_the_threshold_of_malloc_is_set_on_cpu_and_left_to_the_user(jobs, variables, is_cpu, threshold) -> None:
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    os.environ.update(variables)
    launch({"use_cpu": is_cpu})
    assert os.environ.get("MALLOC_MMAP_THRESHOLD_") == threshold


@pytest.mark.parametrize(
    ("command", "started"),
    [
        (["script.py", "--config_file", "of_the_script"], ["script.py", "--config_file", "of_the_script"]),
        (["-m", "json.tool", "x"], ["-m", "json.tool", "x"]),
        (["trl", "sft", "--lr", "1"], ["-m", "trl.scripts.sft", "--lr", "1"]),
    ],
)
def test_the_default_config_file_is_read_and_the_ranks_run_the_package(jobs, monkeypatch, command, started) -> None:
    Path("default.yaml").write_text(yaml.safe_dump(ACCELERATE | {"zeropp_config": SETTINGS}))
    monkeypatch.setattr(launcher, "default_config_file", "default.yaml")
    cli.main(["launch", *command])
    ((args, settings),) = jobs
    assert settings.qgz_bits == 8 and (args.training_script, args.module) == ("hf_zeropp.run", True)
    assert args.training_script_args == started


def under_fsdp(settings: dict) -> dict:
    return {"fsdp_config": ACCELERATE["fsdp_config"] | settings}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_machines": 3}, "a multiple of num_machines=3"),
        ({"distributed_type": "DEEPSPEED"}, "expected distributed_type: FSDP"),
        ({"distributed_type": "MULTI_CPU"}, "starts one process with distributed_type: MULTI_CPU"),
        ({"zeropp_confg": {}}, "Write `zeropp_config:` in its place"),
        ({"zeropp": "exact"}, "'zeropp' in 'config.yaml' is no key of this file. Write `zeropp_config:`"),
        ({"qgz_bits": 8}, "'qgz_bits' stands at the top level of 'config.yaml'"),
        ({"num_processes": 0}, "num_processes must be a positive integer without quotes, got 0"),
        ({"num_processes": "4"}, "num_processes must be a positive integer without quotes, got '4'"),
        ({"num_machines": "two"}, "num_machines must be a positive integer without quotes, got 'two'"),
        ({"num_machines": 2, "machine_rank": 0}, "num_machines=2 needs main_process_ip: the address of machine 0"),
        (
            {"num_machines": 2, "main_process_ip": "10.0.0.1"},
            "num_machines=2 needs machine_rank: 0 to 1, another one on each",
        ),
        ({"zeropp_config": {"qwz_bitz": 8}}, "Did you mean 'qwz_bits'"),
        (under_fsdp({"zeropp": "exact"}), "'zeropp' stands under `fsdp_config:`"),
        (under_fsdp({"fsdp_qwz_bits": 4}), "'qwz_bits' stands under `fsdp_config:`"),
    ],
)
def test_a_job_without_its_settings_or_its_ranks_does_not_start(jobs, change: dict, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        launch(change)
    assert jobs == []


def test_the_file_for_two_machines_needs_two_flags(jobs) -> None:
    command = ["launch", "--config_file", str(ROOT / "examples/configs/gpus_2_machines_x_8.yaml")]
    with pytest.raises(SystemExit, match="needs main_process_ip"):
        cli.main([*command, "script.py"])
    del os.environ["ZEROPP_CONFIG_FILE"]  # of the job that did not start
    cli.main([*command, "--machine_rank", "1", "--main_process_ip", "10.0.0.1", "script.py"])
    ((args, settings),) = jobs
    assert (args.machine_rank, args.main_process_ip, settings) == (1, "10.0.0.1", ZeroPPConfig())


def test_flags_and_variables_are_read_before_any_process_starts(jobs, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="starts one process with --cpu"):
        launch({}, "--cpu")
    with pytest.raises(SystemExit, match="num_processes must be a positive integer without quotes, got -2"):
        launch({}, "--num_processes=-2")
    monkeypatch.setenv("ZEROPP_QWZ_BITZ", "8")
    with pytest.raises(SystemExit, match="Did you mean 'ZEROPP_QWZ_BITS'"):
        launch({})
    monkeypatch.setenv("ZEROPP_CONFIG_FILE", "z.yaml")
    with pytest.raises(SystemExit, match="both ZEROPP_CONFIG_FILE"):
        launch({"zeropp_config": {}})
    assert jobs == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("just words", "key: value"),
        ("#" * 2**21, "more than 1048576 bytes"),
        ("!!python/object/apply:os.mkdir [exploded]", "cannot read the config file"),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_config_file_shows_before_any_process_starts(tmp_path, monkeypatch, content: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(content)
    with pytest.raises(SystemExit, match=said):
        cli.main(["launch", "--config_file", "config.yaml", "absent.py"])
    assert os.listdir() == ["config.yaml"]


def test_env_tells_versions_kernels_and_settings(capsys, monkeypatch) -> None:
    monkeypatch.setenv("ZEROPP_QGZ_BITS", "8")
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["env"])
    shown = capsys.readouterr().out
    for words in ("torch", "accelerate", "CPU kernels", "qgz_bits", f"(tested: {TESTED['torch']})"):
        assert words in shown
    assert any("qgz_bits" in line and "8" in line for line in shown.splitlines())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--version"], ["hf-zeropp "]),
        (["--help"], ["{launch,tune,env,estimate,bench-network}"]),
        (["estimate", "--help"], ["usage: hf-zeropp estimate "]),
        (["env", "--help"], ["usage: hf-zeropp env "]),
        (["launch", "--help"], ["usage: hf-zeropp launch ", "`zeropp_config:`", "ZEROPP_ENABLED=0", "--num_processes"]),
    ],
    ids=lambda words: words[0],
)
def test_help_is_in_sentences(capsys, monkeypatch, command: list[str], words: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # one line per option
    with pytest.raises(SystemExit, match="0"):
        cli.main(command)
    shown = capsys.readouterr().out
    assert all(word in shown for word in words), shown
    options = [line for line in shown.splitlines() if line.startswith("  ") and "  " in line.strip()]
    if command[0] != "launch":  # whose options are Accelerate's
        assert all(line.endswith(".") or "show this help message" in line for line in options), options
