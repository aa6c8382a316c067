"""The cost of ZeRO++ in loss, and the errors that it adds: a small language model, several seeds, beside stock FSDP2.

    python scripts/benchmarks/bench_convergence.py                          the whole study
    python scripts/benchmarks/bench_convergence.py --variants stock balanced --seeds 0 1 2 --steps 300
    python scripts/benchmarks/bench_convergence.py --errors --variants stock paper half_model --output half_model.json

The model is trained on 2 nodes x 2 ranks at full network speed. The text is the source code of Python's standard library.
A seed sets the weights and the order of the text, the same for every variant. With ``--errors`` gathered weights are compared
with the fp32 masters in the same runs, and reduced gradients with exactly reduced ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from library.loss_study import (
    difference,
    loss_grid,
    loss_parser,
    losses_of,
    plot_change,
    plot_losses,
    run_study,
    runs_of,
    variants_of,
)
from library.pages import Grid, report
from library.plots import colors_of, model_text, panels, save
from library.study import Study, parse, require, shape_of, study_of
from library.variants import LOSS_VARIANTS, ProbedRecipe, Recipe, shown

VARIANTS = ["stock", "qwz", "hpz", "qgz", "balanced", "balanced, qgz_until 0.5", "unblocked"]
QUICK = {
    "variants": ["stock", "paper", "balanced", "half_model", "min_traffic"],
    "seeds": [0],
    "steps": 24,
    "batch_size": 2,
    "points": 2,
    "hidden_size": 128,
    "layers": 2,
    "learning_rate": 1e-3,
    "errors": True,
    "probe_steps": 20,
}
TITLE = "The loss of each preset beside stock FSDP2"
INTRO = """A Llama from scratch on the source code of Python's standard library (BPE of its own, every tenth module
held out), 2 nodes x 2 ranks, bf16 compute, AdamW, cosine schedule, steps of {tokens} tokens. A seed sets the weights and the
order of the text, the same for every variant. The shaded band of the plot is the spread over seeds. `paper` is ZeRO++ as
published (INT8 weights, INT4 gradients in both hops); the other presets send INT8 gradients inside the node. *One scale per
shard* is the paper's negative control: one for a rank's whole shard of each parameter."""
ERRORS = """

The errors are Frobenius norms over all matrices, relative, of the same runs. Weights: those a forward computes with,
against the fp32 masters, at every point of the curve (stock FSDP2: what rounding to bf16 costs). Gradients: the sum of
reduced gradients over the last {probe_steps} steps against the sum of exactly reduced ones (fp32, summed in fp64). Traffic:
payload bytes that cross nodes per step, scales included, over M (Y-1)/Y for a model of M bytes in bf16 on Y nodes;
counted, stock FSDP2's 3 computed."""
FIXED = ("recipe",)
STOCK_TRAFFIC = 3.0  # not counted: two gathers and one reduction of M each


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = loss_parser(__doc__, "convergence.json", list(LOSS_VARIANTS))
    parser.set_defaults(variants=VARIANTS)
    parser.add_argument("--errors", action="store_true", help="measure errors of weights and gradients, and bytes")
    parser.add_argument("--probe-steps", type=int, default=100, help="the last ones, in which gradients are compared")
    return parse(parser, QUICK, argv)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings of all runs."""
    recipe = Recipe(shape_of(args), args.steps, args.batch_size, learning_rate=args.learning_rate)
    return ProbedRecipe(**vars(recipe), probe_steps=args.probe_steps) if args.errors else recipe


def weight_errors(study: Study, variant: str) -> list[float]:
    """Return a variant's weight errors at every point of the curve and of every seed."""
    return [error for run in runs_of(study, variant) for error in run["curve"]["weight_error"]]


def gradient_error(study: Study, variant: str) -> float:
    """Return the error of a variant's longest sum of gradients, the mean over seeds."""
    return statistics.mean(run["gradient_error"]["error"][-1] for run in runs_of(study, variant))


def traffic(study: Study, variant: str) -> float:
    """Return a variant's bytes across nodes per step over M (Y-1)/Y."""
    counted = runs_of(study, variant)[0]["traffic"]
    return STOCK_TRAFFIC if counted is None else counted


def error_grid(study: Study) -> Grid:
    """Make the table of traffic and of the errors in weights and gradients, with a row per variant."""
    columns = ("variant", "traffic", "weight error, mean", "largest", "gradient error", "x paper's")
    steps = study.conditions["recipe"]["probe_steps"]
    grid = Grid(f"bytes across nodes per step in M, and errors; gradients summed over {steps} steps", columns)
    known = variants_of(study)
    for variant in known:
        weights, gradients = weight_errors(study, variant), gradient_error(study, variant)
        row = [
            shown(variant),
            f"{traffic(study, variant):.3f}",
            f"{statistics.mean(weights):.5f}",
            f"{max(weights):.5f}",
            f"{gradients:.5f}",
            f"{gradients / gradient_error(study, 'paper'):.3f}" if "paper" in known else "",
        ]
        grid.rows.append(row)
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw validation losses over steps and their differences to stock, and the errors where they were measured."""
    recipe = study.conditions["recipe"]
    has_errors = "probe_steps" in recipe
    conditions = f"{model_text(recipe['shape'])}, 2 nodes x 2 ranks, {recipe['steps']} steps of one micro-step"
    title = f"Training loss{' and errors of communication' if has_errors else ''}\n{conditions}"
    figure, (losses, changes, *errors) = panels(2, title, rows=2 if has_errors else 1)
    for variant, color in colors_of(variants_of(study)).items():
        plot_losses(losses, study, variant, color)
        plot_change(changes, study, variant, color)
        if has_errors:
            runs = runs_of(study, variant)
            curves, sums = [run["curve"] for run in runs], [run["gradient_error"] for run in runs]
            label = shown(variant)
            _plot_mean(errors[0], curves[0]["step"], [curve["weight_error"] for curve in curves], color, label)
            _plot_mean(errors[1], sums[0]["steps"], [each["error"] for each in sums], color, label)
    losses.set(xlabel="step", ylabel="validation loss, mean over seeds")
    changes.set(xlabel="step", ylabel="loss, % above stock FSDP2, same seed")
    if has_errors:
        errors[0].set(xlabel="step", ylabel="relative error of gathered weights", yscale="log")
        errors[1].set(xlabel="steps summed", ylabel="relative error of summed gradients", xscale="log", yscale="log")
    save(figure, path)


def _plot_mean(axis: Any, x: list[int], rows: list[list[float]], color: Any, label: str) -> None:
    means = [statistics.mean(point) for point in zip(*rows, strict=True)]
    axis.plot(x, means, color=color, label=label, marker=".", linewidth=1)


def check_direction(study: Study) -> None:
    """Check the results of the quick form: training works, and quantization stays near stock.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    first = study.find("runs", variant="stock")["curve"]["validation"][0]
    weights = {variant: weight_errors(study, variant)[-1] for variant in variants_of(study)}
    require(
        {
            "stock learns": losses_of(study, "stock")[0] < first,
            "the default stays within 3 % of stock": abs(difference(study, "balanced")) < 0.03,
            "4-bit deltas beat INT8 values": weights["half_model"] < 0.5 * weights["paper"],
            "2-bit deltas do too": weights["min_traffic"] < weights["paper"],
            "INT8 inside the node helps": gradient_error(study, "balanced") < 0.9 * gradient_error(study, "paper"),
            "half a model crosses": 0.5 < traffic(study, "half_model") < 0.56,
            "three eighths of a model cross": 0.375 < traffic(study, "min_traffic") < 0.44,
        }
    )


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    recipe = recipe_of(args)
    measure = functools.partial(run_study, recipe=recipe)
    study = study_of(args, __file__, {"recipe": dataclasses.asdict(recipe)}, FIXED, measure)
    found = study.conditions["recipe"]
    intro = INTRO.format(tokens=4 * found["batch_size"] * found["seq_len"])
    title, grids = TITLE, [loss_grid(study, ("stock", "paper") if "probe_steps" in found else ("stock",))]
    if "probe_steps" in found:
        title += ", and its errors of weights and gradients"
        intro += ERRORS.format(probe_steps=found["probe_steps"])
        grids.append(error_grid(study))
    report(study, title, intro, grids, plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
