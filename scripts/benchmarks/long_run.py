"""Do memory, descriptors and threads stay flat over thousands of steps, and do two runs give the same bits?

    python scripts/benchmarks/long_run.py                    5,000 steps, twice
    python scripts/benchmarks/long_run.py --steps 200 --every 20 --output /tmp/short.json

Four processes on this machine, as two nodes of two ranks, train a small Llama through Accelerate with the default settings:
hops overlap with the computation, and the ranks of a node share memory. After every ``--every`` steps the model generates some
tokens in ``generation_mode``, and every rank notes what it holds. The same run is made twice, in new processes. Every loss,
every generated token and every weight is compared bit for bit.

What leaks shows as a line that rises: a rank that kept 1 kB per step would hold 5 MB more at the end. Growth is counted from
the first fifth of the run on, because allocators and caches fill in the beginning.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from library.pages import Grid, report
from library.plots import panels, save
from library.study import Study, make_parser, require, study_of
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zeropp import ZeroPPPlugin, generation_mode

WORLD_SIZE, RANKS_PER_NODE = 4, 2
RUNS = ("first", "second")
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SEQ_LEN = 16
NEW_TOKENS = 4
MEASURES = {
    "private": "private memory, MB",
    "shared": "shared memory, MB",
    "dev_shm": "/dev/shm, MB",
    "descriptors": "descriptors",
    "threads": "threads",
    "objects": "Python objects",
}
"""Headers of the quantities that each rank samples, by the key under which a row keeps them."""
MAX_GROWTH = {"private": 1.0, "shared": 0.0, "dev_shm": 0.1, "descriptors": 0, "threads": 0, "objects": 500}
"""How much more a rank may hold at the end than after the first fifth of the run. 1 MB is 250 bytes per step.

Other programs use ``/dev/shm`` too, for semaphores of some bytes.
"""
FIXED = ("steps", "samples_and_generations_every", "model", "batch")
TITLE = "A long run"
INTRO = """Small steps of a tiny Llama under ZeRO++, with overlapping hops, memory that the ranks of a node share, and generation
at every sample; four CPU processes are treated as two nodes of two ranks. *Private* is what the kernel counts as the process's
own pages in memory (`RssAnon`), *shared* what it has mapped of its node's memory (`RssShmem`). `/dev/shm` is that of the whole
machine. Growth is the largest over all ranks, from the first fifth of the run to its end. The digests are over the bits of all
losses, tokens and weights."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "long_run.json", has_model=False)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=100, help="steps between two samples, and between generations")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------------------- one rank


def train(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Run the training of one rank, and save its samples and digests."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    settings = {"ranks_per_node": RANKS_PER_NODE, "overlap": True, "shared_memory": True}
    plugin = ZeroPPPlugin(zeropp=settings, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(rank)
    samples, digest = [], hashlib.sha256()
    start = time.monotonic()
    for step in range(1, args.steps + 1):
        tokens = torch.randint(SHAPE["vocab_size"], (1, SEQ_LEN), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.detach().numpy().tobytes())
        if step % args.every == 0:
            digest.update(_generate(model, tokens[:, :8]).numpy().tobytes())
            samples.append({"step": step, "rank": rank, "seconds": time.monotonic() - start, **_holdings()})
    for param in model.parameters():
        digest.update(param.full_tensor().detach().numpy().tobytes())
    torch.save({"samples": samples, "digest": digest.hexdigest(), "loss": loss.item()}, f"{folder}/rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _generate(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    with generation_mode(model, memory_budget="20kB"), torch.no_grad():
        return model.generate(input_ids=prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


def _holdings() -> dict[str, float]:
    """Return what this process holds: see ``MEASURES``."""
    gc.collect()  # garbage in cycles that waits for a collection is not a leak, and its amount is a matter of chance
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    status = {words[0]: words[1] for words in lines if len(words) > 1}
    disk = os.statvfs("/dev/shm")
    return {
        "private": int(status["RssAnon:"]) / 1e3,
        "shared": int(status["RssShmem:"]) / 1e3,
        "dev_shm": (disk.f_blocks - disk.f_bfree) * disk.f_frsize / 1e6,
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # one is the listing's own
        "threads": int(status["Threads:"]),
        "objects": len(gc.get_objects()),
    }


# ------------------------------------------------------------------------------------------------------------ the study


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Make the runs that the study lacks, one after the other."""
    missing = [name for name in RUNS if study.find("ends", run=name, rank=WORLD_SIZE - 1) is None]
    task = progress.add_task("starting", total=len(missing))
    for name in missing:
        progress.update(task, description=f"{name} run")
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, (folder, args), WORLD_SIZE)
            ranks = [torch.load(f"{folder}/rank_{rank}.pt") for rank in range(WORLD_SIZE)]
        for rank, saved in enumerate(ranks):
            for sample in saved["samples"]:
                study.add("samples", {"run": name, **sample})
            study.add("ends", {"run": name, "rank": rank, "digest": saved["digest"], "loss": saved["loss"]})
        progress.advance(task)


def growth(study: Study, measure: str) -> float:
    """Return how much more the worst rank holds at the end than after the first fifth of its run."""
    grown = []
    for run in RUNS:
        for rank in range(WORLD_SIZE):
            values = _values(study, run, rank, measure)
            tail = max(len(values) // 10, 1)
            # The median of some samples: a single one may catch a buffer that is there for a moment.
            grown.append(_median(values[-tail:]) - _median(values[len(values) // 5 :][:tail]))
    return max(grown)


def _values(study: Study, run: str, rank: int, measure: str) -> list[float]:
    return [row[measure] for row in study.rows("samples") if (row["run"], row["rank"]) == (run, rank)]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def holdings_grid(study: Study) -> Grid:
    """Make the table of what ranks hold, with a row per measure."""
    grid = Grid("what a rank holds", ("", "first sample", "after a fifth", "end", "largest growth", "allowed"))
    for measure, words in MEASURES.items():
        runs = [_values(study, run, rank, measure) for run in RUNS for rank in range(WORLD_SIZE)]
        moments = [max(values[index] for values in runs) for index in (0, len(runs[0]) // 5, -1)]
        cells = [f"{value:.2f}".rstrip("0").rstrip(".") for value in (*moments, growth(study, measure))]
        grid.rows.append([words, *cells, str(MAX_GROWTH[measure])])
    return grid


def runs_grid(study: Study) -> Grid:
    """Make the table of the two runs: duration, last loss and digests."""
    grid = Grid("two runs", ("run", "seconds", "ms per step", "last loss, rank 0", "digests of ranks 0 to 3"))
    for run in RUNS:
        ends = [row for row in study.rows("ends") if row["run"] == run]
        last = [row for row in study.rows("samples") if row["run"] == run][-1]
        digests = " ".join(row["digest"][:8] for row in ends)
        milliseconds = 1e3 * last["seconds"] / last["step"]
        grid.rows.append([run, f"{last['seconds']:.0f}", f"{milliseconds:.1f}", repr(ends[0]["loss"]), digests])
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw private memory, descriptors and threads of all ranks over steps."""
    title = (
        "What a rank holds in a long run\na tiny Llama, 2 nodes x 2 ranks, default settings, generation at every sample"
    )
    figure, axes = panels(3, title, width=3.4, height=3)
    for axis, measure in zip(axes, ("private", "descriptors", "threads"), strict=True):
        for run, style in zip(RUNS, ("-", "--"), strict=True):
            for rank in range(WORLD_SIZE):
                label = f"rank {rank}, {run} run"
                steps = _values(study, run, rank, "step")
                axis.plot(steps, _values(study, run, rank, measure), style, color=f"C{rank}", linewidth=1, label=label)
        axis.set(xlabel="step", ylabel=MEASURES[measure])
        axis.set_ylim(bottom=0)
    save(figure, path)


def check(study: Study) -> None:
    """Check that nothing grows, and that both runs gave the same bits.

    Raises:
        SystemExit: one of them does not hold.
    """
    claims = {f"{words} stays flat": growth(study, key) <= MAX_GROWTH[key] for key, words in MEASURES.items()}
    digests = [[row["digest"] for row in study.rows("ends") if row["run"] == run] for run in RUNS]
    claims["two runs give the same bits"] = digests[0] == digests[1]
    require(claims)


def main() -> None:
    """Make the runs, write the page, and check the claims."""
    args = parse_args(sys.argv[1:])
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["LOCAL_WORLD_SIZE"] = str(WORLD_SIZE)
    conditions: dict[str, Any] = {
        "steps": args.steps,
        "samples_and_generations_every": f"{args.every} steps",
        "model": SHAPE,
        "batch": f"1 x {SEQ_LEN} tokens per rank",
    }
    study = study_of(args, __file__, conditions, FIXED, run_study, on_cluster=False)
    report(study, TITLE, INTRO, [runs_grid(study), holdings_grid(study)], plot)
    check(study)


if __name__ == "__main__":
    main()
