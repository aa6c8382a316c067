"""Run every check that needs a GPU, within minutes, and write one folder: ``bash scripts/gpu_check.sh`` calls this.

Each stage is a process of its own with a time limit, so that one that hangs or dies costs its own result only. A stage that
cannot run here is skipped, and the summary says why. The stages:

- *environment*: versions, kernels, driver, GPUs and how they are connected;
- *tests*: ``pytest -m gpu``: bits of the CUDA kernels against the CPU's, compute-sanitizer, host synchronization, memory growth;
- *streams*: the training tests again under PyTorch's stream sanitizer (``TORCH_CUDA_SANITIZER=1``);
- *operators*: each operator beside a copy of as many bytes, and beside PyTorch code;
- *training*: four gloo ranks on one GPU for 50 steps, beside stock FSDP2;
- *nccl*: the same with one rank per GPU over NCCL, with a trace of one step. It needs two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from library.pages import Grid, show

ROOT = Path(__file__).parents[2]
BENCHMARKS = Path(__file__).parent
TAIL_LINES = 15


class Stage(NamedTuple):
    """One check.

    Attributes:
        name: of its log, and for ``--only``.
        command: arguments behind the interpreter.
        limit_s: seconds after which it is killed.
        gpus: that it needs.
        environment: further variables.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    gpus: int = 1
    environment: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """The end of a stage.

    Attributes:
        stage: its name.
        result: "passed", "failed", "timed out" or "skipped".
        seconds: it took.
        detail: the reason of a skip, or the last lines of the log.
    """

    stage: str
    result: str
    seconds: float
    detail: str


def stages(output: Path, device: str) -> list[Stage]:
    """Return the stages in order, those that find the most first."""
    training = [str(BENCHMARKS / "bench_gpu_training.py"), "--output", str(output)]
    operators = [str(BENCHMARKS / "bench_ops.py"), "--device", "cuda", "--output", str(output / "ops_cuda.md")]
    tests = ["-m", "pytest", "-m", "gpu", "-q", "-rs"]
    return [
        Stage("environment", [str(BENCHMARKS / "gpu_check.py"), "--describe"], 60, gpus=0),
        Stage("tests", [*tests, "--maxfail=20", "tests/gpu"], 200),
        Stage("training", [*training, "--device", device], 90, gpus=1 if device == "cuda" else 0),
        Stage("nccl", [*training, "--device", "cuda", "--backend", "nccl"], 90, gpus=2),
        Stage("operators", operators, 120),
        Stage("streams", [*tests, "tests/gpu/test_gpu_training.py"], 90, environment={"TORCH_CUDA_SANITIZER": "1"}),
    ]


def why_not(stage: Stage) -> str | None:
    """Return why a stage cannot run here; None if it can."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= stage.gpus:
        return None
    if found:
        return "NCCL gives each rank a GPU of its own, and two nodes of one rank need two: there is one"
    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
    return f"no CUDA device is visible (torch {torch.__version__} {build})"


def describe() -> None:
    """Print what is installed and connected here, as far as programs tell."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    for command in (
        [sys.executable, "-m", "hf_zeropp.cli", "env"],
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv"],
        ["nvidia-smi", "topo", "-m"],
        ["nvcc", "--version"],
        ["c++", "--version"],
    ):
        if shutil.which(command[0]) is None:
            print(f"\n{command[0]}: not installed")
            continue
        print(f"\n$ {' '.join(command)}", flush=True)
        subprocess.run(command, check=False)


def run(stage: Stage, output: Path) -> Outcome:
    """Run a stage, with its output in a log."""
    if (reason := why_not(stage)) is not None:
        return Outcome(stage.name, "skipped", 0.0, reason)
    started = time.monotonic()
    log = output / f"{stage.name}.log"
    with log.open("w") as file:
        # A session of its own, so that all ranks of a stage that hangs can be killed together.
        process = subprocess.Popen(
            [sys.executable, *stage.command],
            cwd=ROOT,
            env={**os.environ, **stage.environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            result = "passed" if process.wait(stage.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            result = "timed out"
            os.killpg(process.pid, 9)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(stage.name, result, time.monotonic() - started, "\n".join(lines[-TAIL_LINES:]))


def report(outcomes: list[Outcome], output: Path) -> Grid:
    """Write ``summary.md`` and ``summary.json``, and return the table."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    device = ", ".join(gpus) or "no GPU"
    grid = Grid(f"{device}, torch {torch.__version__}", ("stage", "result", "seconds"))
    grid.rows = [[outcome.stage, outcome.result, f"{outcome.seconds:.0f}"] for outcome in outcomes]
    details = [f"## {outcome.stage}: {outcome.result}\n\n```\n{outcome.detail}\n```\n" for outcome in outcomes]
    (output / "summary.md").write_text("\n".join(["# Checks on a GPU\n", grid.markdown(), "", *details]))
    record = {"device": device, "torch": torch.__version__, "stages": [one._asdict() for one in outcomes]}
    (output / "summary.json").write_text(json.dumps(record, indent=2))
    return grid


def main() -> int:
    """Run the stages that the command line asks for; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?", default=ROOT / "runs/gpu_check", help="folder for all results")
    parser.add_argument("--only", nargs="+", default=None, metavar="STAGE", help="run these stages alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the stage `training`")
    parser.add_argument("--describe", action="store_true", help="print the environment, and nothing else")
    args = parser.parse_args()
    if args.describe:
        describe()
        return 0
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    chosen = stages(output, args.device)
    if unknown := set(args.only or ()) - {stage.name for stage in chosen}:
        parser.error(f"unknown stages {sorted(unknown)}: expected some of {[stage.name for stage in chosen]}")
    outcomes = []
    for stage in chosen:
        if args.only is None or stage.name in args.only:
            print(f"{stage.name} (at most {stage.limit_s:.0f} s) ...", flush=True)
            outcomes.append(run(stage, output))
            print(f"{stage.name}: {outcomes[-1].result} in {outcomes[-1].seconds:.0f} s", flush=True)
            grid = report(outcomes, output)  # after each stage: whatever ends this program leaves what it has
    show([grid])
    for outcome in outcomes:
        if outcome.result != "passed":
            *_, last = ["no output", *outcome.detail.splitlines()]
            print(f"{outcome.stage} {outcome.result}: {last}")
    print(f"Results are in {output}")
    return 1 if any(outcome.result in ("failed", "timed out") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
