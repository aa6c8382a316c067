"""Train a small Llama under stock FSDP2 and under ZeRO++ on the same ranks, and compare loss, step time, memory and bytes.

    python scripts/benchmarks/bench_gpu_training.py --output runs/gpu_check                   # four gloo ranks on one GPU
    python scripts/benchmarks/bench_gpu_training.py --output runs/gpu_check --backend nccl    # one rank on each GPU
    python scripts/benchmarks/bench_gpu_training.py --output runs/cpu_check --device cpu      # without a GPU

The ranks are two emulated nodes. With gloo all of them share one GPU: the figures show that training works and what it
holds, and not how fast a cluster would be. Rank 0 records one step of each variant with PyTorch's profiler, for
https://ui.perfetto.dev. A variant that raises is reported with its error, and the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from library.pages import Grid, megabytes, show
from library.study import add_model_flags, shape_of
from library.training_run import build_model
from library.variants import OFF, PRESETS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from hf_zeropp import ZeroPPHandle, apply_zeropp

VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "unquantized": OFF | {"hpz_size": "node"},
    "balanced": PRESETS["balanced"],
    "half_model": PRESETS["half_model"],
}
GLOO_RANKS = 4
WARM_UP = 3

Figures = dict[str, Any]
"""One variant on one rank: ``losses`` of all steps, median ``step_s`` behind the warm-up, ``peak_bytes`` on the accelerator (0 on
CPU), ``cross_bytes`` that entered this node from the other one per step (None for stock, which does not count); or ``error``."""


def rank_main(rank: int, world: int, job: argparse.Namespace, rendezvous: str) -> None:
    """Run all variants on one rank, and save its figures."""
    device = torch.device(job.device, rank % max(torch.cuda.device_count(), 1)) if job.device == "cuda" else "cpu"
    if job.device == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    store = dist.FileStore(rendezvous, world)
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=world)
    figures: dict[str, Figures] = {}
    for name, settings in VARIANTS.items():
        try:
            figures[name] = train(name, settings, torch.device(device), job)
        except Exception:  # noqa: BLE001 - it is the result of this variant
            figures[name] = {"error": traceback.format_exc()}
            # The ranks' collectives are out of step now, so nothing that follows could be trusted.
            break
    Path(job.output, f"rank{rank}.json").write_text(json.dumps(figures))
    if not any("error" in one for one in figures.values()):
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(1)  # peers may wait in a collective, and so would an orderly exit


def make_model(device: torch.device, job: argparse.Namespace) -> LlamaForCausalLM:
    """Return a model with the same weights on every rank, sharded over the world."""
    model = build_model(shape_of(job)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(name: str, settings: dict[str, Any] | None, device: torch.device, job: argparse.Namespace) -> Figures:
    """Train one variant."""
    model = make_model(device, job)
    handle: ZeroPPHandle | None = None
    if settings is not None:
        handle = apply_zeropp(model, {"ranks_per_node": dist.get_world_size() // 2, **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [], []
    for step in range(job.steps):
        seconds.append(_timed(lambda: losses.append(one_step(model, optimizer, device, step)), device))  # noqa: B023
    cross = None if handle is None else handle.traffic.cross_node_bytes / handle.traffic.steps
    _trace(lambda: one_step(model, optimizer, device, job.steps), Path(job.output, f"trace_{name}.json"), is_cuda)
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
    step_s = statistics.median(seconds[WARM_UP:])
    return {"losses": [loss.item() for loss in losses], "step_s": step_s, "peak_bytes": peak, "cross_bytes": cross}


def one_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, device: torch.device, step: int
) -> torch.Tensor:
    """Run one optimizer step on tokens of this rank and step, and return the loss."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    # Runs of tokens that follow each other can be learned, so the loss shows whether training works.
    start = torch.randint(97, (2, 1), generator=generator)
    tokens = ((start + torch.arange(128)) % 97).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _timed(function: Any, device: torch.device) -> float:
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _trace(function: Any, path: Path, is_cuda: bool) -> None:
    if dist.get_rank() > 0:
        function()
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        function()
        if is_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def grid_of(figures: dict[str, Figures], title: str) -> Grid:
    """Return the table of rank 0."""
    columns = ("variant", "first loss", "last loss", "step, ms", "beside stock", "peak MB", "MB from other nodes")
    grid = Grid(title, columns)
    for name, one in figures.items():
        if "error" in one:
            grid.rows.append([name, "raised", one["error"].strip().splitlines()[-1][:60], "", "", "", ""])
            continue
        losses = (f"{loss:.4f}" for loss in (one["losses"][0], one["losses"][-1]))
        step, ratio = f"{one['step_s'] * 1e3:.1f}", f"{one['step_s'] / figures['stock']['step_s']:.2f}"
        peak = f"{one['peak_bytes'] / 1e6:.0f}" if one["peak_bytes"] else ""
        grid.rows.append([name, *losses, step, ratio, peak, megabytes(one["cross_bytes"])])
    return grid


def main() -> int:
    """Run all variants, and write a table, a JSON file and traces; return 1 if a variant raised or did not learn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the table, the figures and the traces")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--steps", type=int, default=50)
    add_model_flags(parser, vocab_size=4096)
    args = parser.parse_args()
    args.output = args.output.resolve() / f"training_{args.backend}_{args.device}"
    args.output.mkdir(parents=True, exist_ok=True)
    world = torch.cuda.device_count() // 2 * 2 if args.backend == "nccl" else GLOO_RANKS
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(rank_main, (world, args, os.path.join(folder, "store")), world)
        except mp.ProcessExitedException as error:
            print(f"A rank ended early: {error}")
    figures: dict[str, Figures] = json.loads((args.output / "rank0.json").read_text())
    grid = grid_of(figures, f"{world} {args.backend} ranks on {args.device}, {args.steps} steps, medians of rank 0")
    show([grid])
    (args.output / "training.md").write_text(f"# Training beside stock FSDP2\n\n{grid.markdown()}\n")
    for name, one in figures.items():
        if "error" in one:
            print(f"{name}: {one['error']}")
    learned = all("error" not in one and one["losses"][-1] < one["losses"][0] for one in figures.values())
    return 0 if learned and figures.keys() == VARIANTS.keys() else 1


if __name__ == "__main__":
    raise SystemExit(main())
