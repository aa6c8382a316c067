"""Seconds and bytes of feeding an inference engine from the model in training, on the emulated cluster.

    python scripts/benchmarks/bench_sync.py                              the whole study
    python scripts/benchmarks/bench_sync.py --rates 200mbit --cases "exact, publish_weights" "stock, full_tensor"

Each rank feeds an engine of its own behind every optimizer step, as TRL's colocate mode does. ``full_tensor`` is TRL's own way,
``publish_weights`` this package's. Steps without a sync stand beside both, because the weights that ``publish_weights`` brings
across nodes are those that the next forward pass then needs not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from library.cluster import Ranks
from library.links import Key, measure_cells
from library.network import rate_text, speed
from library.pages import Grid, megabytes, report
from library.plots import cluster_text, over_rates, panels, save
from library.rounds import busiest_link_bytes, step_seconds
from library.study import Study, add_cluster_flags, make_parser, parse, require, shape_of, study_of
from library.variants import VARIANTS, shown

CASES = {
    f"{variant}, {way}": (variant, way)
    for variant, way in (
        ("stock", "full_tensor"),
        ("balanced", "full_tensor"),
        ("balanced", "publish_weights"),
        ("exact", "publish_weights"),
        ("lora-stock", "full_tensor"),
        ("lora-16", "publish_weights"),
        ("lora-4", "publish_weights"),
    )
}
QUICK = {
    "rates": ["100mbit"],
    "cases": ["stock, full_tensor", "balanced, publish_weights"],
    "steps": 2,
    "hidden_size": 256,
}
TITLE = "Feeding an inference engine on an emulated cluster"
INTRO = """A Llama with random weights is trained with AdamW, and behind every step each rank feeds an engine of its own: a set
of bf16 tensors that the weights are copied to. Nodes are network namespaces of one machine. `full_tensor` is how TRL gathers
weights under FSDP2 (adapters are merged into the sharded base before, and taken out behind), `publish_weights` is this package's
way; *stock FSDP2* is Accelerate's, the *LoRA* variants train adapters (rank 8) on a frozen base, in 16 bits or packed in 4.
Seconds are medians. A sync also does what the next forward pass would do first, so the last column, what a step takes longer with
a sync than without, is what it costs. Bytes are those of the busiest node, by its interface's counters, per step."""
FIXED = ("nodes", "ranks_per_node", "batch_size", "seq_len", "learning_rate", "model")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "sync.json")
    add_cluster_flags(parser, ["unlimited", "1gbit", "200mbit"], batch_size=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--steps", type=int, default=6, help="measured with syncs, and as many without")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of AdamW; changed words depend on it")
    return parse(parser, QUICK, argv)


def run_study(args: argparse.Namespace, study: Study) -> None:
    """Measure every rate and case that the study lacks."""

    def arguments(name: str) -> tuple[Any, ...]:
        return VARIANTS[name], shape_of(args), args.batch_size, args.seq_len, args.learning_rate

    def measure(ranks: Ranks, key: Key) -> dict[str, Any]:
        # Steps with and without a sync, behind one of each that is not measured.
        found: dict[str, Any] = {}
        for name, sync in (("alone", "none"), ("synced", CASES[key["case"]][1])):
            ranks.call("steps", 1, sync)
            reports = ranks.call("steps", args.steps, sync)
            measurements = [report.measurement for report in reports]
            found[f"{name}_s"] = statistics.median(step_seconds(measurements))
            found[f"{name}_bytes"] = busiest_link_bytes([measurements], args.ranks_per_node) / args.steps
            if sync != "none":
                of_syncs = zip(*(report.sync_s for report in reports), strict=True)
                found["sync_s"] = statistics.median(map(max, of_syncs))
        return found

    keys = [{"rate": rate, "case": case} for rate in args.rates for case in args.cases]
    measure_cells(study, keys, lambda key: CASES[key["case"]][0], "library.sync_run:SyncRun", arguments, measure)


def sync_grid(study: Study, rate: str) -> Grid:
    """Make the table of one rate, with a row per case."""
    rows = [
        {
            "case": shown(cell["case"]),
            "step, s": f"{cell['alone_s']:.3f}",
            "step and sync, s": f"{cell['synced_s']:.3f}",
            "of it sync": f"{cell['sync_s']:.3f}",
            "MB a step": megabytes(cell["alone_bytes"]),
            "with sync": megabytes(cell["synced_bytes"]),
            "sync costs, s": f"{cost_of(cell):.3f}",
        }
        for cell in study.rows("cells", rate=rate)
    ]
    return Grid.of(f"sync, {rate_text(rate)}", rows)


def cost_of(cell: dict[str, Any]) -> float:
    """Return the seconds that a sync adds to a step."""
    return cell["synced_s"] - cell["alone_s"]


def plot(study: Study, path: Path) -> None:
    """Draw what a sync costs over the link's rate, one line per case."""
    title = f"Feeding an inference engine behind every step\n{cluster_text(study.conditions)}"
    figure, (axis,) = panels(1, title, width=6)
    over_rates(axis, study.rows("cells"), cost_of, by="case")
    axis.set_ylabel("seconds that a sync adds to a step")
    save(figure, path)


def check_direction(study: Study, args: argparse.Namespace) -> None:
    """End with an error where a result of the quick form has the wrong direction, at the lowest rate."""
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
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    study = study_of(args, __file__, FIXED, run_study)
    report(study, TITLE, INTRO, [sync_grid(study, rate) for rate in args.rates], plot)
    if args.quick:
        check_direction(study, args)


if __name__ == "__main__":
    main()
