"""Seconds and bytes of feeding an inference engine from the model in training, on the emulated cluster.

    python scripts/benchmarks/bench_sync.py                              the whole study
    python scripts/benchmarks/bench_sync.py --rates 200mbit --cases "exact, publish_weights" "stock, full_tensor"

Each rank feeds an engine of its own behind every optimizer step, as TRL's colocate mode does. ``full_tensor`` is TRL's own way,
``publish_weights`` this package's. Steps without a sync stand beside both, because the weights that ``publish_weights`` brings
across nodes are those that the next forward pass then needs not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

from library.cluster import Cluster, Ranks
from library.measurement import busiest_link_bytes, step_seconds
from library.network import speed
from library.pages import Grid, plot_over_rates, report
from library.sandbox import enter_sandbox
from library.study import (
    Study,
    command_line,
    make_parser,
    new_console,
    parse,
    progress_bar,
    rank_environment,
    require,
    shape_of,
)
from library.variants import VARIANTS
from rich.progress import Progress

CASES = {
    f"{variant}, {way}": (variant, way)
    for variant, way in (
        ("stock", "full_tensor"),
        ("all", "full_tensor"),
        ("all", "publish_weights"),
        ("exact", "publish_weights"),
        ("lora-stock", "full_tensor"),
        ("lora-16", "publish_weights"),
        ("lora-4", "publish_weights"),
    )
}
QUICK = {"rates": ["100mbit"], "cases": ["stock, full_tensor", "all, publish_weights"], "steps": 2, "hidden_size": 256}
TITLE = "Feeding an inference engine on an emulated cluster"
INTRO = """A Llama with random weights is trained with AdamW, and behind every step each rank feeds an engine of its own: a set
of bf16 tensors that the weights are copied to. Nodes are network namespaces of one machine. `full_tensor` is how TRL gathers
weights under FSDP2 (adapters are merged into the sharded base before, and taken out behind), `publish_weights` is this package's
way; `stock` is Accelerate's FSDP2, the `lora` variants train adapters (rank 8) on a frozen base, in 16 bits or packed in 4.
Seconds are medians. A sync also does what the next forward pass would do first, so the last column, what a step takes longer with
a sync than without, is what it costs. Bytes are those of the busiest node, by its interface's counters, per step."""
FIXED = ("nodes", "ranks_per_node", "model", "batch_size", "seq_len")
Cell = dict[str, Any]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "sync.json")
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit", "200mbit"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured with syncs, and as many without")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of AdamW; changed words depend on it")
    return parse(parser, QUICK, argv)


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Measure every rate and case that the study lacks."""
    wanted = [(rate, case) for rate in args.rates for case in args.cases]
    missing = [(rate, case) for rate, case in wanted if study.find("cells", rate=rate, case=case) is None]
    if not missing:
        return
    task = progress.add_task("starting", total=len(missing))
    with (
        Cluster(args.nodes, args.ranks_per_node, rank_environment(threads=1)) as cluster,
        contextlib.ExitStack() as stack,
    ):
        variants = dict.fromkeys(CASES[case][0] for _, case in missing)
        runs = {name: stack.enter_context(_start(cluster, name, args)) for name in variants}
        for rate, case in missing:
            progress.update(task, description=f"{case}, {rate}")
            cluster.set_link(rate)
            variant, way = CASES[case]
            study.add("cells", {"rate": rate, "case": case, **_measure(runs[variant], way, args)})
            progress.advance(task)


def _start(cluster: Cluster, name: str, args: argparse.Namespace) -> contextlib.AbstractContextManager[Ranks]:
    served = "library.sync_run:SyncRun"
    return cluster.start(served, VARIANTS[name], shape_of(args), args.batch_size, args.seq_len, args.learning_rate)


def _measure(ranks: Ranks, way: str, args: argparse.Namespace) -> Cell:
    """Return seconds and bytes of steps with and without a sync, behind one of each that is not measured."""
    found: Cell = {}
    for name, sync in (("alone", "none"), ("synced", way)):
        ranks.call("steps", 1, sync)
        reports = ranks.call("steps", args.steps, sync)
        measurements = [report.measurement for report in reports]
        found[f"{name}_s"] = statistics.median(step_seconds(measurements))
        found[f"{name}_bytes"] = busiest_link_bytes([measurements], args.ranks_per_node) / args.steps
        if sync != "none":
            of_syncs = zip(*(report.sync_s for report in reports), strict=True)
            found["sync_s"] = statistics.median(map(max, of_syncs))
    return found


def sync_grid(study: Study, rate: str) -> Grid:
    """Make the table of one rate, with a row per case."""
    columns = ("case", "step, s", "step and sync, s", "of it sync", "MB a step", "with sync", "sync costs, s")
    grid = Grid(f"sync, {rate}", columns)
    for cell in (cell for cell in study.rows("cells") if cell["rate"] == rate):
        seconds = [f"{cell[key]:.3f}" for key in ("alone_s", "synced_s", "sync_s")]
        sent = [f"{cell[key] / 1e6:.2f}" for key in ("alone_bytes", "synced_bytes")]
        grid.rows.append([cell["case"], *seconds, *sent, f"{cell['synced_s'] - cell['alone_s']:.3f}"])
    return grid


def plot_costs(study: Study, path: Path) -> None:
    """Draw what a sync costs over the link's rate, one line per case."""
    label = "a step takes longer with a sync by, s"
    plot_over_rates(study, path, "case", lambda cell: cell["synced_s"] - cell["alone_s"], label)


def check_direction(study: Study, args: argparse.Namespace) -> None:
    """Check the results of the quick form, at the lowest rate.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    rate = min(args.rates, key=speed)
    stock, ours = (study.find("cells", rate=rate, case=case) for case in QUICK["cases"])
    require(
        {
            "a sync adds under 2 % to the bytes of a step": ours["synced_bytes"] < 1.02 * ours["alone_bytes"],
            "TRL's way adds bytes": stock["synced_bytes"] > 1.2 * stock["alone_bytes"],
            "a sync is faster than TRL's": ours["sync_s"] < stock["sync_s"],
        }
    )


def main() -> None:
    """Run the study in the sandbox, and report it."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    conditions = {key: getattr(args, key) for key in FIXED if key != "model"}
    conditions |= {"command": command_line(__file__), "model": dataclasses.asdict(shape_of(args))}
    conditions |= {"learning_rate": args.learning_rate}
    study = Study(args.output, conditions, (*FIXED, "learning_rate"), fresh=args.fresh)
    with progress_bar(new_console()) as progress:
        run_study(args, study, progress)
    report(args, study, TITLE, INTRO, [sync_grid(study, rate) for rate in args.rates], plot_costs)
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
