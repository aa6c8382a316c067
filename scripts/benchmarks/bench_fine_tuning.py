"""What fine-tuning sends across nodes with exact weights, and what it learns, beside the lossy presets and stock FSDP2.

    python scripts/benchmarks/bench_fine_tuning.py
    python scripts/benchmarks/bench_fine_tuning.py --rates 1e-5 --variants stock exact

A small Llama is trained from scratch first, and each run goes on from there with a new AdamW at a constant learning rate, on
2 nodes x 2 ranks at full network speed. The text is the source code of Python's standard library. Nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from library.cluster import Cluster, Ranks
from library.loss_study import TokenFiles, loss_parser, write_tokens
from library.pages import Grid, pyplot, report
from library.sandbox import enter_sandbox
from library.study import Study, command_line, new_console, parse, progress_bar, rank_environment, require, shape_of
from library.variants import FINE_TUNING_VARIANTS, ConstantRecipe, Recipe

SERVED = "library.fine_tuning_run:FineTuningRun"
QUICK = {
    "variants": ["stock", "exact"],
    "rates": [1e-5, 1e-4],
    "steps": 8,
    "points": 2,
    "pretraining": 20,
    "hidden_size": 128,
    "layers": 2,
}
TITLE = "Fine-tuning with exact weights"
INTRO = """A Llama was trained from scratch on the source code of Python's standard library (BPE of its own, every tenth
module held out). From that checkpoint each run goes on over the same text with a new AdamW (betas 0.9 and 0.95, weight decay
0.1) at a constant learning rate, without warm-up, with fp32 masters and bf16 compute, on 2 nodes x 2 gloo ranks. There is one
seed, and every variant sees the same batches. M is the model in bf16 times (Y-1)/Y for Y nodes. Bytes are counted by the
package (scales, sizes and padding included, protocol headers not), as means over ranks and over all steps but the first,
which sends whole weights. Stock FSDP2 sends at least 2 M of weights and 1 M of bf16 gradients; that figure is computed, and
its bytes were not counted. Progress is the validation loss at the start minus that at the end of the run. The density of a
unit is the share of its bf16 weights that change in a step, from exact's runs."""
FIXED = ("recipe", "pretraining", "pretraining_rate")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = loss_parser(__doc__, "fine_tuning.json", list(FINE_TUNING_VARIANTS))
    parser.set_defaults(steps=150, points=10, seeds=[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4, 1e-3], help="of AdamW, constant")
    parser.add_argument("--pretraining", type=int, default=400, help="steps before the checkpoint")
    return parse(parser, QUICK, argv)


def run_all(args: argparse.Namespace, study: Study, recipe: Recipe) -> None:
    """Make the checkpoint, and run every variant at every rate that the study lacks."""
    wanted = [(rate, variant, seed) for seed in args.seeds for rate in args.rates for variant in args.variants]
    missing = [key for key in wanted if _find(study, *key) is None]
    if not missing:
        return
    with (
        progress_bar(new_console()) as progress,
        tempfile.TemporaryDirectory(dir="/run") as folder,  # the sandbox's own
        Cluster(2, 2, rank_environment(threads=1)) as cluster,
    ):
        task = progress.add_task("training the checkpoint", total=len(missing) * args.points)
        files = write_tokens(Path(folder), args.vocab_size)
        cluster.set_link()
        checkpoint = make_checkpoint(cluster, recipe, args, files, Path(folder))
        for rate, variant, seed in missing:
            progress.update(task, description=f"{variant} at {rate:g}")
            at_rate = ConstantRecipe(**vars(recipe) | {"learning_rate": rate, "steps": args.steps})
            # Another seed than the checkpoint's, so that a run does not see the checkpoint's batches again.
            with cluster.start(SERVED, variant, seed + 1000, at_rate, *files, checkpoint) as ranks:
                row = train(ranks, args.steps, args.points, lambda: progress.advance(task))
            study.add("runs", {"rate": rate, "variant": variant, "seed": seed, **row})


def make_checkpoint(cluster: Cluster, recipe: Recipe, args: argparse.Namespace, files: TokenFiles, folder: Path) -> str:
    """Train from scratch under stock FSDP2 with the recipe's schedule, and return the path of the weights."""
    path = str(folder / "checkpoint.pt")
    from_scratch = dataclasses.replace(recipe, steps=args.pretraining)
    with cluster.start(SERVED, "stock", 0, from_scratch, *files) as ranks:
        ranks.call("train", args.pretraining)
        ranks.call("save", path)
    return path


def train(ranks: Ranks, steps: int, points: int, advance: Any) -> dict[str, Any]:
    """Train one run to its end, and return its row: losses, bytes, and the curves of loss and density."""
    start = ranks.call("evaluate")[0]["validation"]
    curve: dict[str, Any] = {"step": [], "validation": [], "density": {}}
    done = 0
    for point in range(1, points + 1):
        upto = round(steps * point / points)
        ranks.call("train", upto - done)
        curve["step"].append(upto)
        for unit, share in ranks.call("density")[0].items():
            curve["density"].setdefault(unit, []).append(share)
        curve["validation"].append(ranks.call("evaluate")[0]["validation"])
        done = upto
        advance()
    return {"start": start, "final": curve["validation"][-1], **ranks.call("summary")[0], "curve": curve}


def _find(study: Study, rate: float, variant: str, seed: int = 0) -> dict[str, Any] | None:
    return study.find("runs", rate=rate, variant=variant, seed=seed)


def rates_of(study: Study) -> list[float]:
    """Return the learning rates that have run."""
    return sorted({run["rate"] for run in study.rows("runs")})


def progress_share(study: Study, run: dict[str, Any]) -> float | None:
    """Return what a run has learned, over what stock has learned at the same rate; None where stock has learned nothing."""
    stock = _find(study, run["rate"], "stock", run["seed"])
    if stock is None or stock["final"] >= stock["start"]:
        return None
    return (stock["start"] - run["final"]) / (stock["start"] - stock["final"])


def result_grid(study: Study) -> Grid:
    """Make the table of bytes and losses, by learning rate and variant."""
    columns = (
        "rate", "variant", "weights", "gradients", "whole step", "loss at start", "at end", "to stock", "of stock's progress",
    )  # fmt: skip
    grid = Grid("Bytes across nodes in a step, of M, and validation loss", columns)
    for run in sorted(study.rows("runs"), key=lambda run: run["rate"]):
        stock, share = _find(study, run["rate"], "stock", run["seed"]), progress_share(study, run)
        sent = (2.0, 1.0) if run["weights"] is None else (run["weights"], run["gradients"])
        row = [f"{run['rate']:g}", run["variant"], *(f"{figure:.4f}" for figure in sent), f"{sum(sent):.3f}"]
        row += [f"{run['start']:.4f}", f"{run['final']:.4f}"]
        row += ["" if stock is None else f"{100 * (run['final'] / stock['final'] - 1):+.3f} %"]
        grid.rows.append([*row, "" if share is None else f"{100 * share:.1f} %"])
    return grid


def density_grid(study: Study) -> Grid:
    """Make the table of changed weights by unit, in the first and in the last part of exact's runs."""
    grid = Grid(
        "Weights that change in a step: first and last point of exact's runs", ("unit", *map(str, rates_of(study)))
    )
    runs = [_find(study, rate, "exact") for rate in rates_of(study)]
    units = next((list(run["curve"]["density"]) for run in runs if run), [])
    for unit in units:
        curves = [run and run["curve"]["density"][unit] for run in runs]
        grid.rows.append([unit, *(f"{curve[0]:.1%} → {curve[-1]:.1%}" if curve else "" for curve in curves)])
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw the density of exact's units over steps, and the bytes of each variant over the learning rate."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4))
    styles = ("-", "--", "-.", ":")
    for index, rate in enumerate(rates_of(study)):
        run = _find(study, rate, "exact")
        for place, (unit, shares) in enumerate(run["curve"]["density"].items() if run else ()):
            style = styles[index % len(styles)]
            left.plot(
                run["curve"]["step"], shares, style, color=f"C{place}", linewidth=1, label=None if index else unit
            )
    left.set(
        xlabel="step (one line style per learning rate, the lowest below)", ylabel="weights that change", yscale="log"
    )
    for index, variant in enumerate(dict.fromkeys(run["variant"] for run in study.rows("runs"))):
        runs = [run for rate in rates_of(study) if (run := _find(study, rate, variant)) and run["weights"] is not None]
        if runs:
            totals = [run["weights"] + run["gradients"] for run in runs]
            right.plot([run["rate"] for run in runs], totals, color=f"C{index}", marker="o", label=variant)
    right.set(xlabel="learning rate", ylabel="bytes across nodes in a step, of M", xscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def check_direction(study: Study) -> None:
    """Check the results of the quick form.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    stock, exact, slow = _find(study, 1e-4, "stock"), _find(study, 1e-4, "exact"), _find(study, 1e-5, "exact")
    require(
        {
            "stock learns from the checkpoint on": stock["final"] < stock["start"],
            "exact weights at 1e-5 take less than 2-bit deltas, 0.133 M": 0 < slow["weights"] < 0.133,
            "they take more at 1e-4, and less than the model": slow["weights"] < exact["weights"] < 1.01,
            "gradients take the bytes of INT4": 0.25 < slow["gradients"] < 0.30,
            "exact stays within 1 % of stock": abs(exact["final"] / stock["final"] - 1) < 0.01,
            "more weights of every unit change at the higher rate": all(
                exact["curve"]["density"][unit][-1] > shares[-1] > 0
                for unit, shares in slow["curve"]["density"].items()
            ),
        }
    )


def main() -> None:
    """Run the study in the sandbox, and report it."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    recipe = Recipe(shape_of(args), args.steps, args.batch_size, learning_rate=args.learning_rate)
    conditions = {
        "command": command_line(__file__),
        "recipe": dataclasses.asdict(recipe) | {"learning_rate": "see the table", "warmup": 0},
        "pretraining": f"{args.pretraining} steps",
        "pretraining_rate": f"{args.learning_rate:g} at its highest, cosine to a tenth",
    }
    study = Study(args.output, conditions, FIXED, fresh=args.fresh)
    run_all(args, study, recipe)
    report(args, study, TITLE, INTRO, [result_grid(study), density_grid(study)], plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
