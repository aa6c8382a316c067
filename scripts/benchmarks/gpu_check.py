"""Run every check that needs a GPU, on one GPU and in nine minutes: ``bash scripts/gpu_check.sh`` calls this.

Each stage has a limit of time, and costs its own result only if it fails (library/stages.py). The stages:

- *environment*: GPU, driver, versions, kernels, and which ways to several ranks there are;
- *kernels*: bits of the CUDA kernels against the CPU's, offsets beyond 32 bits, streams, graphs, products with frozen weights;
- *triton*: the same bits from the kernels that run where nvcc was not there;
- *memory*: the kernels under compute-sanitizer;
- *nccl*: training on 2 nodes x 2 ranks of NCCL beside stock FSDP2: losses, bits with and without overlap, waits of the host;
- *gloo*: training over gloo with tensors of the GPU;
- *streams*: PyTorch's stream sanitizer;
- *integrations*: Accelerate, the Trainer, launchers, LoRA on 4 bits and generation;
- *link*: bytes that really cross between the nodes, beside those predicted;
- *10gbit*, *1gbit*: step times beside stock FSDP2 and HSDP, with a slow link between the nodes and without a limit;
- *operators*: each operator beside a copy of as many bytes, products with frozen weights beside dense ones.

All ranks share one GPU (library/one_gpu.py), and nodes are network namespaces, so *link* and those behind it need root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from library import sandbox
from library.pages import show
from library.stages import Lane, Round, Stage, grid_of, run_rounds
from library.study import ROOT

BENCHMARKS = Path(__file__).parent
KERNELS, NCCL = "tests/gpu/test_gpu_kernels.py", "tests/gpu/test_nccl_training.py"


class Links(NamedTuple):
    """A study of step times on nodes of two ranks.

    Attributes:
        rates: of the links.
        sizes: hidden size, layers and vocabulary of the model on a GPU, which holds the ranks of all variants side by side.
        variants: of ``bench_cluster.py``.
        is_traced: whether a step of each variant is recorded.
    """

    rates: Sequence[str]
    sizes: tuple[int, int, int]
    variants: Sequence[str]
    is_traced: bool = False


SMALL = (256, 4, 2048)
"""Sizes of a model of 4 M parameters, for which no link is too slow, nor a CPU."""
LINK = Links(["unlimited"], SMALL, ["stock", "hsdp", "balanced", "exact"])
TEN_GBIT = Links(["10gbit", "unlimited"], (1536, 12, 16384), ["stock", "hsdp", "balanced", "blocking"], is_traced=True)
"""0.4 B parameters."""
ONE_GBIT = Links(["1gbit"], (768, 8, 16384), ["stock", "hsdp", "balanced", "exact"])
"""0.09 B parameters."""


def rounds(output: Path, device: str) -> list[Round]:
    """Return all stages. What is timed has the machine for itself; tests run beside other tests. Limits add up to 530 s."""
    environment = Stage("environment", [str(BENCHMARKS / "gpu_check.py"), "--describe"], 30)
    one_rank = [
        tests("kernels", 110, device, KERNELS, "-k", "not compute_sanitizer", "--maxfail=20"),
        tests("triton", 50, device, "tests/gpu/test_gpu_triton.py"),
        tests("memory", 90, device, KERNELS, "-k", "compute_sanitizer"),
    ]
    over_nccl = [
        tests("nccl", 130, device, NCCL, "-k", "not sanitizer"),
        tests("gloo", 50, device, "tests/gpu/test_gpu_training.py"),
        tests("streams", 70, device, NCCL, "-k", "sanitizer"),
    ]
    users = [tests("integrations", 200, device, "tests/gpu/test_gpu_integrations.py")]
    timed = [
        training("link", 90, device, LINK, output),
        training("10gbit", 110, device, TEN_GBIT, output),
        training("1gbit", 90, device, ONE_GBIT, output),
        operators(50, device, output),
    ]
    return [Round(30, [[environment]]), Round(200, [one_rank, over_nccl, users]), Round(300, [timed])]


def tests(name: str, limit_s: float, device: str, *arguments: str) -> Stage:
    """Return the stage of some tests."""
    command = ["-m", "pytest", "-v", "-rsP", "--tb=short", "-p", "no:cacheprovider", *arguments]
    return Stage(name, command, limit_s, {"GPU_TESTS_DEVICE": device})


def training(name: str, limit_s: float, device: str, links: Links, output: Path) -> Stage:
    """Return the stage of a study of step times."""
    hidden, layers, vocabulary = links.sizes if device == "cuda" else SMALL
    command = [str(BENCHMARKS / "bench_cluster.py"), "--device", device, "--output", str(output / f"{name}.json")]
    command += ["--hidden-size", str(hidden), "--layers", str(layers), "--vocab-size", str(vocabulary), "--fresh"]
    command += ["--variants", *links.variants, "--rates", *links.rates, "--accumulation", "1", "--seq-len", "256"]
    command += ["--steps", "3", "--rounds", "1"]
    return Stage(name, command + (["--traces", str(output / "traces")] if links.is_traced else []), limit_s)


def operators(limit_s: float, device: str, output: Path) -> Stage:
    """Return the stage that times the operators."""
    command = [str(BENCHMARKS / "bench_ops.py"), "--device", device, "--alone", "--repeats", "7"]
    sizes = ["--megabytes", "16", "128", "1024"] if device == "cuda" else ["--quick"]
    return Stage("operators", [*command, *sizes, "--output", str(output / f"ops_{device}.md")], limit_s)


def describe() -> int:
    """Print what is installed and connected here, as far as programs tell. Return 1 if one of them failed."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    print(f"{os.cpu_count()} processors, Linux {os.uname().release}, user {os.geteuid()}")
    print(f"network namespaces: {sandbox.why_impossible() or 'work'}")
    for program in ("ip", "tc", "unshare", "nvidia-cuda-mps-control", "compute-sanitizer", "nvcc", "c++"):
        print(f"{program}: {shutil.which(program) or 'not found'}")
    python = [sys.executable, "-m"]
    commands = [[*python, "hf_zeropp.cli", "env"], [*python, "pip", "list", "--format", "freeze"]]
    if torch.cuda.is_available():
        commands.insert(0, ["nvidia-smi"])
    statuses = []
    for command in commands:
        print(f"\n$ {' '.join(command)}", flush=True)
        statuses.append(subprocess.run(command, check=False).returncode)
    return int(any(statuses))


def main() -> int:
    """Run the stages that the command line asks for; return 1 if one did not pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?", default=ROOT / "runs/gpu_check", help="folder for all results")
    parser.add_argument("--only", nargs="+", default=None, metavar="STAGE", help="run these stages alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--describe", action="store_true", help="print the environment, and nothing else")
    args = parser.parse_args()
    if args.describe:
        return describe()
    output = args.output.resolve()
    every = rounds(output, args.device)
    names = [stage.name for one in every for lane in one.lanes for stage in lane]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"unknown stages {sorted(unknown)}: expected some of {names}")
    if args.device == "cuda" and not torch.cuda.is_available():
        build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        parser.error(f"no CUDA device is visible (torch {torch.__version__} {build}); rehearse with --device cpu")

    def chosen(lane: Lane) -> Lane:
        return [stage for stage in lane if args.only is None or stage.name in args.only]

    output.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name(0) if args.device == "cuda" else "no GPU"
    title = f"{gpu}, torch {torch.__version__}"
    asked = [Round(one.limit_s, [chosen(lane) for lane in one.lanes]) for one in every]
    outcomes = run_rounds(asked, output, title)
    show([grid_of(outcomes, title)])
    for outcome in outcomes:
        if outcome.result != "passed":
            *_, last = ["no output", *outcome.detail.splitlines()]
            print(f"{outcome.stage} {outcome.result}: {last[:300]}")
    print(f"Results are in {output}")
    return 0 if all(outcome.result == "passed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
