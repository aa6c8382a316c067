"""``hf-zeropp tune``: what ranks record of their steps, how trials are compared, and that an interrupted one leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import free_port, run_ranks
from test_unmodified import LAUNCHED, PLAIN, run_script

from hf_zeropp.config import ZeroPPConfig
from hf_zeropp.integrations.tune import command
from hf_zeropp.integrations.tune.command import tune
from hf_zeropp.integrations.tune.report import Search, block, sentence
from hf_zeropp.integrations.tune.trial import STOCK, UNQUANTIZED, WHOLE, Trial, TrialError

STEPS = 8
ACCELERATE = [str(PLAIN), "--two_optimizers", "--steps", str(STEPS)]
TRAINER = f"""
from trainer_runs import build_trainer
build_trainer("unused", True, max_steps={STEPS}, gradient_accumulation_steps=2, learning_rate=1e-3).train()
"""


# ------------------------------------------------------------------------------------------------- what ranks record


def recorded(folder: Path, command: list[str], **variables: str) -> list[list[dict[str, Any]]]:
    """Run a script on two nodes of one rank, and return the lines of both ranks."""
    folder.mkdir()
    environment = LAUNCHED | {"ZEROPP_RANKS_PER_NODE": "1", "ZEROPP_RECORD": str(folder)} | variables
    run_ranks(run_script, 2, command, 2, env=environment, init=False)
    files = [folder / f"rank_{rank}.jsonl" for rank in range(2)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.thorough("trainer")
@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_ranks_record_each_step(tmp_path: Path, kind: str) -> None:
    """Two micro-steps are one step, and so are two optimizers; a pass without gradients gives no loss."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.replace("unused", str(tmp_path / "output")))
    command = [str(script)] if kind == "trainer" else [*ACCELERATE, "--out", str(tmp_path / "losses.json")]
    ours, stock = recorded(tmp_path / "ours", command), recorded(tmp_path / "stock", command, ZEROPP_ENABLED="0")
    for lines in (*ours, *stock):
        assert len(lines) == STEPS and all(line["seconds"] > 0 and line["rate"] == 1e-3 for line in lines)
    for line in (line for lines in stock for line in lines):
        assert line["settings"] is None and line["received"] == line["zero3"] == 0
    for mine, its in zip(ours, stock, strict=True):
        assert mine[-1]["settings"]["qwz_mode"] == "values" and mine[-1]["settings"]["ranks_per_node"] == 1
        # 0.76 M in place of 3 M in each of two micro-steps, in fp32 where nothing is said.
        assert 14 < mine[-1]["zero3"] / mine[-1]["received"] < 17
        losses = [[line["loss"] for line in lines] for lines in (mine, its)]
        assert all(abs(one - other) < 0.01 * other for one, other in zip(*losses, strict=True))
        assert losses[0] != losses[1]  # quantized


# ------------------------------------------------------------------------------------------- trials of recorded figures

JOB = """
import json, os, sys
name = os.environ["ZEROPP_PRESET"] if os.environ["ZEROPP_ENABLED"] == "1" else "stock"
name += "unquantized" if "ZEROPP_QGZ_BITS" in os.environ else ""
name += os.environ.get("ZEROPP_QGZ_ACCUMULATE", "")
with open(sys.argv[1], "a") as file:
    file.write(name + "\\n")
made = {"seconds": 1.0, "received": 5.0, "zero3": 20.0, "loss": 2.0, "rate": 1e-4, "settings": None}
if name != "stock":
    variables = [os.environ["ZEROPP_" + field] for field in ("QWZ_MODE", "QWZ_BITS")]
    made["settings"] = {"qwz_mode": variables[0], "qwz_bits": None if variables[1] == "none" else int(variables[1])}
    made["settings"]["qgz_accumulate"] = os.environ.get("ZEROPP_QGZ_ACCUMULATE", "node")
    unset = ("hpz_size", "qgz_bits", "qgz_intra_bits")
    made["settings"] |= {field: None for field in unset if os.environ.get("ZEROPP_" + field.upper()) == "none"}
    made["settings"]["qgz_until"] = 1.0
exec(sys.argv[2])
for rank in range(2):
    with open(os.environ["ZEROPP_RECORD"] + f"/rank_{rank}.jsonl", "w") as file:
        file.write((json.dumps(made) + "\\n") * made.get("steps", 9))
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, where the output of a failed job stays."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def job(tmp_path: Path, change: str) -> list[str]:
    """A command that notes the candidate in a file, and records what ``change`` makes of the usual figures."""
    return [sys.executable, "-c", JOB, str(tmp_path / "names"), change]


def tuned(tmp_path: Path, capsys: Any, change: str, *flags: str) -> dict[str, Any]:
    tune(["--pause", "0", "--json", *flags, *job(tmp_path, change)])
    return json.loads(capsys.readouterr().out)


def test_candidates_take_turns_and_the_fastest_is_recommended(tmp_path: Path, capsys: Any) -> None:
    found = tuned(tmp_path, capsys, "made['seconds'] = {'stock': 2.0, 'exact': 0.5}.get(name, 1.0)")
    names = ["stock", "balanced", "balancedwhole", "balancedunquantizedwhole", "exact", "half_model", "min_traffic"]
    assert (tmp_path / "names").read_text().split() == 2 * names
    assert found["recommended"] == "exact" and found["paste"].startswith("zeropp_config:\n  preset: exact")
    assert found["why"] == "exact: 0.5 s per step where stock FSDP2 takes 2 s (4.00 x)."
    verdicts = {name: each["verdict"] for name, each in found["candidates"].items()}
    faster = dict.fromkeys(("balanced", WHOLE, UNQUANTIZED, "half_model", "min_traffic"), "faster")
    assert verdicts == {STOCK: "", "exact": "recommended", **faster} and not found["failed"]


@pytest.mark.parametrize("name", [WHOLE, UNQUANTIZED])
def test_what_is_recommended_can_be_pasted(tmp_path: Path, capsys: Any, name: str) -> None:
    """Weights that stay are candidates. A config file with the lines has the settings that were tried."""
    fastest = {WHOLE: "balancedwhole", UNQUANTIZED: "balancedunquantizedwhole"}[name]
    found = tuned(tmp_path, capsys, f"made['seconds'] = 0.5 if name == {fastest!r} else 1.0", "--rounds", "1")
    assert found["recommended"] == name
    assert "  preset: balanced  # in place of qwz_mode and qwz_bits\n" in found["paste"]
    file = tmp_path / "config.yaml"
    file.write_text(found["paste"])
    assert ZeroPPConfig.from_file(file) == ZeroPPConfig.from_dict(command.TRIED[name])


def test_the_folder_of_a_trial_is_its_own_and_temporary(tmp_path: Path) -> None:
    script = (
        "import sys; open(sys.argv[1] + '/made', 'x'); open(sys.argv[2], 'a').write(sys.argv[1] + '\\n'); sys.exit(3)"
    )
    for _ in range(2):
        with pytest.raises(SystemExit, match="on stock FSDP2 the job failed with exit status 3"):
            tune([sys.executable, "-c", script, "{folder}", str(tmp_path / "folders")])
    first, second = (tmp_path / "folders").read_text().split()
    assert first != second and not os.path.exists(first)


BAD = {
    "fails": ("print('words of its own'); sys.exit(7)", "exit status 7. It ended with:\n    words of its own"),
    "shards nothing": ("sys.exit()", "no optimizer step of a model that FSDP2 shards was seen"),
    "ends early": ("made['steps'] = 4", "the script made 4 optimizer steps, and at least 6 are needed"),
    "has a loss that is none": ("made['loss'] = float('nan')", "on stock FSDP2 a loss is not finite"),
    "has no seed": (
        "made['loss'] = 2 + len(open(sys.argv[1]).read())",
        "two starts on stock FSDP2 have different losses",
    ),
    "has settings of its own": (
        "if made['settings']: made['settings']['qwz_bits'] = 5",
        "stock FSDP2 runs, but under balanced the script has settings of its own",
    ),
    "is one node": ("made['settings'] = None", "under balanced nothing runs under ZeRO"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, name: str) -> None:
    change, words = BAD[name]
    with pytest.raises(SystemExit) as error:
        tune(["--pause", "0", *job(tmp_path, change)])
    assert words in str(error.value.code)


def test_all_output_of_a_failed_job_is_kept(tmp_path: Path, temporary: Path) -> None:
    """Its error comes before many lines of a launcher."""
    with pytest.raises(SystemExit) as error:
        tune(["--pause", "0", *job(tmp_path, "print('words of its own\\n' + 50 * 'more\\n'); sys.exit(7)")])
    (kept,) = temporary.iterdir()
    assert "words of its own" in kept.read_text()
    assert str(error.value.code).endswith(f"    more\nAll of its output is in {kept}.")


def test_a_command_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the command cannot be started: .*no_such_command"):
        tune(["no_such_command"])


def test_a_candidate_that_fails_is_not_tried_again(tmp_path: Path, capsys: Any) -> None:
    found = tuned(tmp_path, capsys, "if name == 'exact': sys.exit('out of memory')", "--rounds", "3")
    assert (tmp_path / "names").read_text().split().count("exact") == 1
    assert "out of memory" in found["failed"]["exact"] and "exact" not in found["candidates"]
    assert len(found["candidates"]["balanced"]["trials"]) == 3 and found["recommended"] is None


@pytest.mark.parametrize(
    ("rate", "limits"), [(1e-6, {"half_model": "1e-05", "min_traffic": "0.0001"}), (1e-5, {"min_traffic": "0.0001"})]
)
def test_low_rates_exclude_changes_of_few_bits(
    tmp_path: Path, capsys: Any, rate: float, limits: dict[str, str]
) -> None:
    found = tuned(tmp_path, capsys, f"made['rate'] = {rate}", "--rounds", "1")
    assert not set(limits) & set((tmp_path / "names").read_text().split())
    assert found["failed"] == {
        name: f"not tried, since weights lag behind at learning rates under {limit}" for name, limit in limits.items()
    }


def trial(seconds: list[float], losses: tuple[float, ...] = (4.0, 2.0)) -> Trial:
    return Trial(tuple(seconds), losses, 5e6, 2e7, 1e-4, ZeroPPConfig().to_dict())


def test_a_loss_that_differs_is_refused_and_spread_is_no_gain() -> None:
    search = Search()
    search.add(STOCK, trial([1.0, 1.1, 1.2, 1.3]))
    search.add("balanced", trial([0.9, 1.0, 1.1, 1.1]))
    search.add("exact", trial([0.1, 0.1, 0.1, 0.1], (4.0, 2.1)))
    assert search.best is None and block(search) == "export ZEROPP_ENABLED=0"
    assert sentence(search).startswith("Leave it off") and search.difference("exact") == pytest.approx(0.1 / 4)
    search.add("half_model", trial([0.2, 0.2, 0.2, 0.2], (float("nan"), 2.0)))
    assert search.best is None
    search.add("min_traffic", trial([0.5, 0.5, 0.6, 0.6], (4.0, 2.01)))
    assert search.best == "min_traffic" and sentence(search).endswith("(2.09 x).")


def test_ranks_are_put_together() -> None:
    lines = [
        [{"seconds": 1 + rank + step, "received": 10 * rank, "zero3": 8, "loss": rank, "rate": 1 / (1 + step), "settings": None}
         for step in range(7 + rank)]
        for rank in range(2)
    ]  # fmt: skip
    found = Trial.of(lines)
    # Steps that one rank has not recorded are left out, and so are the first three of the rest.
    assert found.seconds == (5, 6, 7, 8) and found.losses == (0.5,) * 7 and found.received == 5
    assert found.rate == 1 / 4  # the highest of the measured steps: schedules fall to nearly 0
    lines[0][2]["loss"] = None
    assert Trial.of(lines).losses == ()
    with pytest.raises(TrialError, match="no optimizer step"):
        Trial.of([])


# ---------------------------------------------------------------------------------------------------------- real commands


def start_tune(folder: Path, *words: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ZEROPP_")}
    environment = inherited | LAUNCHED | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    del environment["ZEROPP_RANKS_PER_NODE"]
    # The folders of trials lie in the test's own, so that a trial that hangs can be read: ``ended`` shows its output.
    environment |= {"TMPDIR": str(folder / "temporary"), "PYTHONFAULTHANDLER": "1"}
    line = [sys.executable, "-m", "hf_zeropp.cli", "tune", *words]
    return subprocess.Popen(
        line,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background with SIGINT ignored, and tests that it runs would hand this on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def ended(nodes: list[subprocess.Popen[str]], folder: Path) -> list[tuple[str, str]]:
    """Wait until each node's search has ended, and return what each said.

    A search that takes longer fails the test. The failure shows what each node said, the output of each trial that was under
    way, and the stacks of its processes. One node may have ended, while the other waits for it.
    """
    deadline = time.monotonic() + 600
    try:
        return [node.communicate(timeout=deadline - time.monotonic()) for node in nodes]
    except subprocess.TimeoutExpired:
        running = [psutil.Process(node.pid) for node in nodes if node.poll() is None]
        jobs = [child for node in running for child in node.children(recursive=True)]
        for node in nodes:
            node.kill()
        said = [node.communicate()[1] for node in nodes]
        for process in jobs:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGABRT)  # Python prints the stacks of its threads and ends
        psutil.wait_procs(jobs, timeout=30)
        outputs = sorted(folder.glob("temporary/hf-zeropp-tune-*/*/output"))
        pytest.fail("\n".join([*said, *(f"{output}:\n{output.read_text()}" for output in outputs)]))


@pytest.mark.thorough
def test_two_nodes_behind_torchrun(tmp_path: Path) -> None:
    """The same command on each node, one after the other on the same port: all trials meet."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
    script = ["-m", "hf_zeropp.run", *ACCELERATE, "--out", "{folder}/losses.json"]
    flags = ["--rounds", "1", "--json"]
    nodes = [start_tune(tmp_path, *flags, *launcher, str(node), *script) for node in range(2)]
    said = ended(nodes, tmp_path)
    assert [node.returncode for node in nodes] == [0, 0], said
    for found in (json.loads(out) for out, _ in said):
        assert {*found["candidates"]} == {STOCK, *command.TRIED} and not found["failed"]
        assert all(each["difference"] < 0.01 for each in found["candidates"].values())
        received = {name: each["trials"][0]["received"] for name, each in found["candidates"].items()}
        assert received[STOCK] == 0 < received["min_traffic"] < received["half_model"] < received["balanced"]
    assert os.listdir(tmp_path) == ["temporary"] and [*tmp_path.glob("temporary/hf-zeropp-*")] == []


@pytest.mark.thorough("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_search_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    sleep = f"import time; open({str(tmp_path / 'up')!r}, 'w'); time.sleep(600)"
    search = start_tune(tmp_path, sys.executable, "-c", sleep)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline and search.poll() is None
        time.sleep(0.1)
    family = psutil.Process(search.pid).children(recursive=True)
    assert family
    search.send_signal(number)
    _, said = search.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == [] and search.returncode == 1 and "interrupted" in said
