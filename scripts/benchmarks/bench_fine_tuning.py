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
from pathlib import Path
from typing import Any

from library.checkpoint import SERVED, checkpoint_of
from library.cluster import Cluster, Ranks
from library.loss_study import loss_parser
from library.pages import Grid, report
from library.plots import colors_of, model_text, panels, pyplot, save
from library.study import Study, parse, rank_environment, require, shape_of, study_of
from library.variants import FINE_TUNING_VARIANTS, ConstantRecipe, Recipe, shown
from rich.progress import Progress

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
    parser = loss_parser(__doc__, "fine_tuning.json", FINE_TUNING_VARIANTS)
    parser.set_defaults(steps=150, points=10, seeds=[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4, 1e-3], help="of AdamW, constant")
    parser.add_argument("--pretraining", type=int, default=400, help="steps before the checkpoint")
    return parse(parser, QUICK, argv)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings of the checkpoint, and of all runs but for the learning rate."""
    return Recipe(shape_of(args), args.steps, args.batch_size, learning_rate=args.learning_rate)


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Make the checkpoint, and run every variant at every rate that the study lacks."""
    wanted = [(rate, variant, seed) for seed in args.seeds for rate in args.rates for variant in args.variants]
    missing = [key for key in wanted if _find(study, *key) is None]
    if not missing:
        return
    task = progress.add_task("training the checkpoint", total=len(missing) * args.points)
    recipe = recipe_of(args)
    with (
        Cluster(2, 2, rank_environment(threads=1)) as cluster,
        checkpoint_of(cluster, recipe, args.pretraining) as checkpoint,
    ):
        for rate, variant, seed in missing:
            progress.update(task, description=f"{variant} at {rate:g}")
            at_rate = ConstantRecipe(**vars(recipe) | {"learning_rate": rate})
            # Another seed than the checkpoint's, so that a run does not see the checkpoint's batches again.
            with cluster.start(SERVED, variant, seed + 1000, at_rate, *checkpoint) as ranks:
                row = train(ranks, args.steps, args.points, lambda: progress.advance(task))
            study.add("runs", {"rate": rate, "variant": variant, "seed": seed, **row})


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
        row = [f"{run['rate']:g}", shown(run["variant"]), *(f"{figure:.4f}" for figure in sent), f"{sum(sent):.3f}"]
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
    """Draw the density of exact's units over steps, one panel per learning rate, and the bytes of each variant."""
    recipe, rates = study.conditions["recipe"], rates_of(study)
    conditions = f"{model_text(recipe['shape'])}, 2 nodes x 2 ranks, one micro-step per step"
    title = f"Fine-tuning: share of bf16 weights that change in a step (exact), and bytes across nodes\n{conditions}"
    figure, (totals, *densities) = panels(len(rates) // 2 + 1, title, rows=2, width=4, height=3.2)
    for axis, rate in zip(densities, rates, strict=False):
        run = _find(study, rate, "exact")
        units = list(run["curve"]["density"].items()) if run else []
        for place, (unit, shares) in enumerate(units):
            color = pyplot().cm.viridis(place / len(units))
            axis.plot(run["curve"]["step"], shares, color=color, linewidth=1, label=unit)
        axis.set(xlabel="step", yscale="log", ylim=(1e-3, 1), title=f"exact, learning rate {rate:g}")
        axis.set_ylabel("share of weights that change")
    for variant, color in colors_of(run["variant"] for run in study.rows("runs")).items():
        runs = [run for rate in rates if (run := _find(study, rate, variant)) and run["weights"] is not None]
        if runs:
            sent = [run["weights"] + run["gradients"] for run in runs]
            totals.plot([run["rate"] for run in runs], sent, color=color, marker="o", label=shown(variant))
    totals.set(
        xlabel="learning rate", ylabel="bytes across nodes in a step, of M", xscale="log", title="bytes of all variants"
    )
    save(figure, path)


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
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    conditions = {
        "recipe": dataclasses.asdict(recipe_of(args)) | {"learning_rate": "see the table", "warmup": 0},
        "pretraining": f"{args.pretraining} steps",
        "pretraining_rate": f"{args.learning_rate:g} at its highest, cosine to a tenth",
    }
    study = study_of(args, __file__, conditions, FIXED, run_study)
    report(study, TITLE, INTRO, [result_grid(study), density_grid(study)], plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
