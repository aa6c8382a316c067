"""What do ZeRO++ and its presets cost in training loss, from scratch and from a checkpoint on, beside stock FSDP2?

    python scripts/benchmarks/bench_losses.py --steps 300
    python scripts/benchmarks/bench_losses.py --rates 1e-6 1e-5 1e-4 1e-3 --seeds 0 --output scripts/results/fine_tuning.json

The first form trains from scratch with a schedule. With ``--rates`` a model is trained from scratch once, and every run goes on
from there at a constant learning rate. A seed sets the order of the text, and from scratch the weights, the same for every
variant. Runs are on 2 nodes x 2 ranks at full network speed, and nothing is timed. Every run keeps a curve, whose last point is
its end.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from library.cluster import Cluster, Ranks
from library.pages import Grid, report
from library.plots import colors_of, model_text, panels, save
from library.study import Study, make_parser, parse, rank_environment, require, shape_of, study_of
from library.text import SERVED, checkpoint_of
from library.variants import FINE_TUNING_VARIANTS, LOSS_VARIANTS, ConstantRecipe, Recipe, shown
from rich.progress import Progress

SCRATCH_VARIANTS = ("stock", "qwz", "hpz", "qgz", "balanced", "balanced, qgz_until 0.5", "unblocked")
QUICK = {
    "seeds": [0],
    "steps": 24,
    "batch_size": 2,
    "points": 2,
    "hidden_size": 128,
    "layers": 2,
    "learning_rate": 1e-3,
}
QUICK_SCRATCH = QUICK | {"variants": ["stock", "balanced", "half_model", "min_traffic"]}
QUICK_FINE_TUNING = QUICK | {"variants": ["stock", "exact"], "steps": 8, "pretraining": 20}
TITLE = "The loss of each preset beside stock FSDP2"
FINE_TUNING_TITLE = "Fine-tuning: loss and bytes of each preset beside stock FSDP2"
INTRO = """A Llama from scratch; the seed sets its weights as well, and the learning rate follows a cosine. The shaded band of the
plot is the spread over seeds. `paper` is ZeRO++ as published (INT8 weights, INT4 gradients in both hops); the other presets send
INT8 gradients inside the node. *One scale per shard* is the paper's negative control: one for a rank's whole shard of each
parameter."""
FINE_TUNING_INTRO = """A Llama was trained from scratch. From this checkpoint each run goes on with a new AdamW at a constant
learning rate, without warm-up. Progress is the validation loss at the start minus that at the end of the run. The density of a
unit is the share of its bf16 weights that change in a step, from exact's runs."""
COMMON = """

The text is the source code of Python's standard library (BPE of its own, every tenth module held out); 2 nodes x 2 ranks, fp32
masters, bf16 compute, AdamW (betas 0.9 and 0.95, weight decay 0.1), steps of {tokens} tokens. A seed sets the order of the text,
the same for every variant, and losses are compared within a seed. M is the model in bf16 times (Y-1)/Y for Y nodes. Bytes are
counted by the package (scales, sizes and padding included, protocol headers not), as means over all steps but the first, which
sends whole weights. Those of stock FSDP2 were not counted: it sends at least 2 M of weights and 1 M of gradients."""
FIXED = ("recipe", "pretraining")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = make_parser(__doc__, "convergence.json")
    parser.set_defaults(hidden_size=256, layers=4)
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="of AdamW, constant, behind a checkpoint")
    parser.add_argument("--variants", nargs="+", default=SCRATCH_VARIANTS, choices=list(LOSS_VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500, help="of each run")
    parser.add_argument("--pretraining", type=int, default=0, help="steps before the checkpoint; 300 with --rates")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest of the schedule")
    parser.add_argument("--points", type=int, default=20, help="points of each curve")
    if "--rates" not in argv:
        return parse(parser, QUICK_SCRATCH, argv)
    parser.set_defaults(variants=FINE_TUNING_VARIANTS, steps=150, points=10, pretraining=300)
    return parse(parser, QUICK_FINE_TUNING, argv)


# ---------------------------------------------------------------------------------------------------------- measurement


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Make the checkpoint, and run every rate, variant and seed that the study lacks.

    Seeds are the outer loop, so that a study that is stopped has complete comparisons for some seeds.
    """
    rates = args.rates or [None]
    wanted = [(rate, variant, seed) for seed in args.seeds for rate in rates for variant in args.variants]
    missing = [key for key in wanted if _find(study, *key) is None]
    if not missing:
        return
    task = progress.add_task("preparing the text", total=len(missing) * args.points)
    recipe = recipe_of(args)
    with (
        Cluster(2, 2, rank_environment(threads=1)) as cluster,
        checkpoint_of(cluster, recipe, args.pretraining) as (files, checkpoint),
    ):
        for rate, variant, seed in missing:
            progress.update(task, description=f"{variant}, seed {seed}" + (f", {rate:g}" if rate else ""))
            own = ConstantRecipe(**vars(recipe) | {"learning_rate": rate}) if rate else recipe
            # Behind a checkpoint seeds are others than the checkpoint's, so that no run sees its batches again.
            with cluster.start(SERVED, variant, seed + (1000 if rate else 0), own, files, checkpoint) as ranks:
                row = train(ranks, args.steps, args.points, lambda: progress.advance(task))
            study.add("runs", {"rate": rate, "variant": variant, "seed": seed, **row})


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings of the checkpoint, and of all runs but for the learning rate."""
    return Recipe(shape_of(args), args.steps, args.batch_size, learning_rate=args.learning_rate)


def train(ranks: Ranks, steps: int, points: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Train one run to its end, and return its row: losses, bytes, and the curves of loss and density."""
    start = ranks.call("evaluate")[0]
    curve: dict[str, Any] = {"step": [], "train": [], "validation": [], "density": {}}
    done = 0
    for point in range(1, points + 1):
        upto = round(steps * point / points)
        if upto > done:
            curve["step"].append(upto)
            curve["train"].append(ranks.call("train", upto - done)[0])
            for unit, share in ranks.call("density")[0].items():
                curve["density"].setdefault(unit, []).append(share)
            curve["validation"].append(ranks.call("evaluate")[0])
        done = upto
        advance()
    return {"start": start, "final": curve["validation"][-1], **ranks.call("sent")[0], "curve": curve}


# --------------------------------------------------------------------------------------------------------------- report


def _find(study: Study, rate: float | None, variant: str, seed: int) -> dict[str, Any] | None:
    return study.find("runs", rate=rate, variant=variant, seed=seed)


def rates_of(study: Study) -> list[Any]:
    """Return the learning rates of runs behind a checkpoint, or None alone."""
    rates = {run["rate"] for run in study.rows("runs")}
    return [None] if rates == {None} else sorted(rates)


def runs_of(study: Study, rate: float | None, variant: str) -> list[dict[str, Any]]:
    """Return a variant's runs at a rate, one per seed."""
    return [run for run in study.rows("runs") if (run["rate"], run["variant"]) == (rate, variant)]


def variants_of(study: Study) -> list[str]:
    """Return the variants that have run, in the order in which they first did."""
    return list(dict.fromkeys(run["variant"] for run in study.rows("runs")))


def beside_stock(study: Study, runs: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each of the runs with stock's of the same rate and seed, where there is one."""
    pairs = [(run, _find(study, run["rate"], "stock", run["seed"])) for run in runs]
    return [(run, stock) for run, stock in pairs if stock is not None]


def change_of(study: Study, runs: list[dict[str, Any]]) -> float | None:
    """Return by how much the final losses exceed stock's with the same seed, relative, the mean over seeds."""
    changes = [run["final"] / stock["final"] - 1 for run, stock in beside_stock(study, runs)]
    return statistics.mean(changes) if changes else None


def progress_of(study: Study, runs: list[dict[str, Any]]) -> float | None:
    """Return what runs have learned over what stock has, the mean over seeds; None where no start is known."""
    shares = [
        (stock["start"] - run["final"]) / (stock["start"] - stock["final"])
        for run, stock in beside_stock(study, runs)
        if stock.get("start", 0.0) > stock["final"]
    ]
    return statistics.mean(shares) if shares else None


def sent_by(run: dict[str, Any]) -> tuple[float, float] | None:
    """Return the bytes of weights and gradients across nodes in a step, of M; None where older runs did not count them."""
    if run["variant"] == "stock":
        return 2.0, 1.0
    return (run["weights"], run["gradients"]) if run.get("weights") is not None else None


def loss_grid(study: Study) -> Grid:
    """Make the table of final validation losses, by learning rate and variant, and of bytes where they were counted."""
    counts = any(sent_by(run) for run in study.rows("runs") if run["variant"] != "stock")
    columns = ("seeds", "loss", "std", "to stock", "of stock's progress", "weights", "gradients", "whole step")
    title = f"validation loss after {study.conditions['recipe']['steps']} steps"
    if counts:
        title += ", and bytes across nodes in a step, of M"
    grid = Grid(title, ("variant", *columns[: None if counts else 5]))
    for rate in rates_of(study):
        for variant in variants_of(study):
            if not (runs := runs_of(study, rate, variant)):
                continue
            sent, losses = sent_by(runs[0]), [run["final"] for run in runs]
            change, progress = change_of(study, runs), progress_of(study, runs)
            row = [shown(variant) + ("" if rate is None else f", {rate:g}"), str(len(losses))]
            row += [f"{statistics.mean(losses):.4f}", f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""]
            row += ["" if change is None else f"{change:+.3%}", "" if progress is None else f"{progress:.1%}"]
            if counts:
                row += [f"{figure:.3f}" for figure in (*sent, sum(sent))] if sent else ["", "", ""]
            grid.rows.append(row)
    return grid


def density_grid(study: Study) -> Grid:
    """Make the table of changed weights by unit, in the first and in the last part of exact's runs."""
    rates = rates_of(study)
    grid = Grid("Weights that change in a step: first and last point of exact's runs", ("unit", *map(str, rates)))
    runs = [next(iter(runs_of(study, rate, "exact")), None) for rate in rates]
    for unit in next((run["curve"]["density"] for run in runs if run), []):
        curves = [run and run["curve"]["density"][unit] for run in runs]
        grid.rows.append([unit, *(f"{curve[0]:.1%} → {curve[-1]:.1%}" if curve else "" for curve in curves)])
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw losses over steps from scratch; behind a checkpoint, what was learned and sent over the learning rate."""
    recipe, rates = study.conditions["recipe"], rates_of(study)
    conditions = f"{model_text(recipe['shape'])}, 2 nodes x 2 ranks, {recipe['steps']} steps of one micro-step"
    heading = "Training from scratch" if rates == [None] else "Fine-tuning from a checkpoint"
    figure, axes = panels(2, f"{heading}, beside stock FSDP2\n{conditions}")
    for variant, color in colors_of(variants_of(study)).items():
        if rates == [None]:
            _plot_curves(axes, study, runs_of(study, None, variant), color)
        else:
            _plot_rates(axes, study, variant, color)
    save(figure, path)


def _plot_curves(axes: list[Any], study: Study, runs: list[dict[str, Any]], color: Any) -> None:
    """Draw the mean loss over seeds, and how far it is above stock's: the mean, and a band of all seeds."""
    import numpy as np

    losses, changes = axes
    steps, label = runs[0]["curve"]["step"], shown(runs[0]["variant"])
    losses.plot(steps, np.mean([run["curve"]["validation"] for run in runs], axis=0), color=color, label=label)
    losses.set(xlabel="step", ylabel="validation loss, mean over seeds")
    above = [
        100 * (np.divide(run["curve"]["validation"], stock["curve"]["validation"]) - 1)
        for run, stock in beside_stock(study, runs)
    ]
    changes.plot(steps, np.mean(above, axis=0), color=color, label=label)
    changes.fill_between(steps, np.min(above, 0), np.max(above, 0), color=color, alpha=0.15)
    changes.set(xlabel="step", ylabel="loss, % above stock FSDP2, same seed")


def _plot_rates(axes: list[Any], study: Study, variant: str, color: Any) -> None:
    """Draw the share of stock's progress, and the bytes of a step, over the learning rate."""
    learned, bytes_sent = axes
    rates = [rate for rate in rates_of(study) if runs_of(study, rate, variant)]
    shares = [progress_of(study, runs_of(study, rate, variant)) for rate in rates]
    learned.plot(
        rates, [100 * share if share else None for share in shares], color=color, marker="o", label=shown(variant)
    )
    learned.set(xlabel="learning rate", ylabel="% of stock's progress", xscale="log", ylim=(0, 110))
    if variant != "stock":
        sent = [sum(sent_by(runs_of(study, rate, variant)[0]) or ()) for rate in rates]
        bytes_sent.plot(rates, sent, color=color, marker="o", label=shown(variant))
    bytes_sent.set(xlabel="learning rate", ylabel="bytes across nodes in a step, of M (stock: 3)", xscale="log")
    bytes_sent.set_ylim(bottom=0)


def check_direction(study: Study) -> None:
    """Check the results of a quick form.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    rates = rates_of(study)
    stock = runs_of(study, rates[-1], "stock")[0]
    claims = {"stock learns": stock["final"] < stock["start"]}
    for variant in variants_of(study)[1:]:
        far = abs(change_of(study, runs_of(study, rates[-1], variant)) or 0.0)
        claims[f"{variant} stays within 3 % of stock"] = far < 0.03
    if rates == [None]:
        half, least = (sum(sent_by(runs_of(study, None, name)[0])) for name in ("half_model", "min_traffic"))
        claims["half a model crosses"] = 0.5 < half < 0.56
        claims["three eighths of a model cross"] = 0.375 < least < 0.44
    else:
        slow, fast = (runs_of(study, rate, "exact")[0] for rate in (rates[0], rates[-1]))
        claims["exact weights at the lowest rate take less than 2-bit deltas, 0.133 M"] = 0 < slow["weights"] < 0.133
        claims["they take more at the highest, and less than the model"] = slow["weights"] < fast["weights"] < 1.01
        claims["gradients take the bytes of INT4"] = 0.25 < slow["gradients"] < 0.30
        densities = [run["curve"]["density"] for run in (slow, fast)]
        claims["more weights of every unit change at the highest rate"] = all(
            densities[1][unit][-1] > shares[-1] > 0 for unit, shares in densities[0].items()
        )
    require(claims)


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    recipe = recipe_of(args)
    conditions = {"recipe": dataclasses.asdict(recipe), "pretraining": args.pretraining}
    study = study_of(args, __file__, conditions, FIXED, run_study)
    found = study.conditions["recipe"]
    common = COMMON.format(tokens=4 * found["batch_size"] * found["seq_len"])
    title, intro = (FINE_TUNING_TITLE, FINE_TUNING_INTRO) if args.rates else (TITLE, INTRO)
    grids = [loss_grid(study), *([density_grid(study)] if args.rates else [])]
    report(study, title, intro + common, grids, plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
