"""How much of a step goes into agreeing on weights and gradients, and into reading the content of the shards.

    python scripts/benchmarks/bench_agreement.py

The model and the batches are those of `examples/train_accelerate.py`, which the quickstart runs, with random tokens. Every
rank notes when it begins and ends each piece of this work, on one clock, and the page gives sums:

- *content*: hashing this rank's shards;
- *agreement*: collecting what a rank states, and the exchange itself. A rank that comes early waits for the others. That
  wait is left out, since the rank would wait for them in the collective behind it.

Shares are given of two things: of the step's seconds, and of the processor time that a rank takes for it. Where ranks wait
for processors, as four ranks on two cores do, the seconds of a small exchange are mostly such waiting, in which another rank
computes. The processor time is free of it.

So the page also tells how much longer a step really takes. Steps run in pairs, in random order: one in which ranks agree, and
one in which every rank decides alone, without reading shards. The difference within pairs is given with the interval that
holds the mean of all such pairs with a probability of 95 % (1.96 standard errors).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from library.cluster import Cluster
from library.pages import Grid, pyplot, report
from library.profiling import AGREEMENT, CONTENT, EXCHANGE, phase_seconds, processor_seconds
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

TITLE = "Time that agreement takes"
GOAL = 0.01
QUICK = {"rates": ["200mbit"], "accumulation": [1], "steps": 3, "pairs": 3}
FIXED = ("nodes", "ranks_per_node", "batch_size", "seq_len")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "agreement.json")
    parser.set_defaults(layers=5, vocab_size=4096)
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit", "200mbit"], help="of each link, both ways")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 8], help="micro-steps per step")
    parser.add_argument("--steps", type=int, default=12, help="steps that are counted, after one that is not")
    parser.add_argument(
        "--pairs",
        type=int,
        default=100,
        help="of steps with and without agreement; an eighth of them for 8 micro-steps",
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and micro-step")
    parser.add_argument("--seq-len", type=int, default=128)
    return parse(parser, QUICK, argv)


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of the study that stand on its page."""
    return {
        "command": command_line(__file__),
        "steps": args.steps,
        "pairs": args.pairs,
        "layers": args.layers,
        "vocab_size": args.vocab_size,
        **{key: getattr(args, key) for key in FIXED},
    }


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Profile the steps that the study lacks."""
    keys = [{"rate": rate, "accumulation": count} for rate in args.rates for count in args.accumulation]
    missing = [key for key in keys if study.find("profiles", **key) is None]
    task = progress.add_task("measuring", total=len(missing))
    served = "library.training_run:TrainingRun", VARIANTS["all"], shape_of(args), args.batch_size, args.seq_len
    with (
        Cluster(args.nodes, args.ranks_per_node, rank_environment(threads=1)) as cluster,
        cluster.start(*served) as ranks,
    ):
        for key in missing:
            cluster.set_link(key["rate"])
            summaries = ranks.call("profile", args.steps, key["accumulation"])
            row = {"seconds": phase_seconds(summaries), "processor": processor_seconds(summaries)}
            # As many micro-steps for each number of them per step, so that all rows take as long.
            num_pairs = max(2, args.pairs // key["accumulation"])
            # A step ends when its slowest rank has ended it.
            ranks_pairs = zip(*ranks.call("pairs", num_pairs, key["accumulation"]), strict=True)
            row["pairs"] = [list(map(max, zip(*pair, strict=True))) for pair in ranks_pairs]
            study.add("profiles", {**key, **row})
            progress.advance(task)


def shares(row: dict[str, Any], of: str = "seconds") -> tuple[float, float]:
    """Return the shares that content and agreement take: of the step's "seconds", or of its "processor" time."""
    parts = row[of]
    whole = sum(parts.values())
    return parts.get(CONTENT, 0.0) / whole, (parts[AGREEMENT] + parts[EXCHANGE]) / whole


def grid_of(study: Study) -> Grid:
    """Return the table: the step, and the shares of it, the mean over ranks."""
    columns = ["link, micro-steps", "step, ms", "content", "agreement", "both"]
    columns += ["content, processor", "agreement, processor", "both, processor"]
    grid = Grid("Shares of a step's seconds and of its processor time, the mean over ranks", columns)
    for row in study.rows("profiles"):
        cells = [f"{row['rate']}, {row['accumulation']}", f"{sum(row['seconds'].values()) * 1e3:.0f}"]
        for of in ("seconds", "processor"):
            parts = shares(row, of)
            cells += [f"{100 * share:.2f} %" for share in (*parts, sum(parts))]
        grid.rows.append(cells)
    return grid


def difference(row: dict[str, Any]) -> tuple[float, float]:
    """Return the mean share by which agreement prolongs a step, and half the width of its 95 % interval."""
    alone = statistics.mean(without for _, without in row["pairs"])
    shares = [(agreeing - without) / alone for agreeing, without in row["pairs"]]
    return statistics.mean(shares), 1.96 * statistics.stdev(shares) / len(shares) ** 0.5


def pairs_grid(study: Study) -> Grid:
    """Return the table of steps with and without agreement."""
    grid = Grid(
        "Steps in which ranks agree, and in which each decides alone",
        ["link, micro-steps", "pairs", "alone, ms", "agreeing, ms", "longer by", "95 % interval"],
    )
    for row in study.rows("profiles"):
        agreeing, alone = (statistics.mean(column) * 1e3 for column in zip(*row["pairs"], strict=True))
        mean, half = difference(row)
        cells = [f"{row['rate']}, {row['accumulation']}", f"{len(row['pairs'])}", f"{alone:.0f}", f"{agreeing:.0f}"]
        interval = f"{100 * (mean - half):.2f} to {100 * (mean + half):.2f} %"
        grid.rows.append([*cells, f"{100 * mean:.2f} %", interval])
    return grid


def plot_shares(study: Study, path: Path) -> None:
    """Draw the shares by link and number of micro-steps, and the goal."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 3), sharey=True)
    rows = study.rows("profiles")
    labels = [f"{row['rate']}, {row['accumulation']}" for row in rows]
    for axes, of in zip(panels, ("seconds", "processor"), strict=True):
        content, agreement = zip(*([100 * share for share in shares(row, of)] for row in rows), strict=True)
        axes.barh(labels, content, label="content")
        axes.barh(labels, agreement, left=content, label="agreement")
        axes.axvline(100 * GOAL, color="tab:red", linestyle="--", label="goal")
        axes.set_xlabel(f"share of a step's {of}{' time' if of == 'processor' else ''}, %")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Run the study in the sandbox, and report it."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    study = Study(args.output, conditions(args), FIXED, fresh=args.fresh)
    with progress_bar(new_console()) as progress:
        run_study(args, study, progress)
    intro = "The model and the batches" + __doc__.partition("The model and the batches")[2].rstrip()
    report(args, study, TITLE, intro, [pairs_grid(study), grid_of(study)], plot_shares)
    if args.quick:
        share = sum(shares(study.rows("profiles")[0], "processor"))
        require({f"content and agreement take under {GOAL:.0%} of the processor time": share < GOAL})


if __name__ == "__main__":
    main()
