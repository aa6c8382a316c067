"""Half a model per step: cost and gain of weight deltas, and of INT8 inside the node.

    python scripts/benchmarks/bench_half_model.py                                   the whole study
    python scripts/benchmarks/bench_half_model.py --variants stock paper half --seeds 0
    python scripts/benchmarks/bench_half_model.py --repeat --output half_model_repeat.json     the same text at every step

Each technique runs alone, beside the paper's configuration, and together with others. As in ``bench_convergence.py``, a
small language model learns Python's standard library from scratch on 2 nodes x 2 ranks. In the same runs, gathered weights
are compared with the fp32 masters, and reduced gradients with exactly reduced ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

from library.loss_study import loss_grid, loss_parser, losses_of, plot_change, run_study, runs_of, variants_of
from library.pages import Grid, pyplot, report
from library.sandbox import enter_sandbox
from library.study import Study, command_line, parse, require, shape_of
from library.variants import HALF_MODEL_VARIANTS, ProbedRecipe

QUICK = {
    "variants": ["stock", "paper", "half-values", "three-eighths-values"],
    "seeds": [0],
    "steps": 24,
    "batch_size": 2,
    "probe_steps": 20,
    "points": 2,
}
TITLE = "Half a model per step"
INTRO = """A Llama from scratch on the source code of Python's standard library (BPE of its own, every tenth module
held out), 2 nodes x 2 ranks, bf16 compute and reduction, AdamW, cosine schedule. A seed sets the weights and the order of
the text, the same for every variant. The model is small and its steps are large ones ({tokens} tokens), so that two runs with
the same seed part by less than quantization moves them.

`paper` is ZeRO++ as published: INT8 weights, INT4 gradients in both hops. `int8-inside` (the package's default), `delta-4` and
`delta-2` change one thing in it. With INT8 inside the node: `half-values` sends 4-bit deltas (the preset `half_model`),
`half-values-hpz-8` the same with the copy of the weights in INT8, and `three-eighths-values` (the preset `min_traffic`) 2-bit
deltas.

The errors are Frobenius norms over all matrices, relative, of the same runs. Weights: those a forward computes with,
against the fp32 masters, at every point of the curve (`stock`: what rounding to bf16 costs). Gradients: the sum of
reduced gradients over the last {probe_steps} steps against the sum of exactly reduced ones (fp32, summed in fp64);
`scaled`: the same of every element over the root mean square of its gradients, which is how AdamW weighs it. Traffic:
payload bytes that cross nodes per step, scales included, over M (Y-1)/Y for a model of M bytes in bf16 on Y nodes;
counted, `stock`'s 3 computed."""
REPEATED = """

Here every step sees the same sequences, and the loss below is the loss on them: gradients have no noise of their own."""
FIXED = ("recipe",)
STOCK_TRAFFIC = 3.0  # not counted: two gathers and one reduction of M each


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = loss_parser(__doc__, "half_model.json", list(HALF_MODEL_VARIANTS))
    parser.set_defaults(hidden_size=128, layers=2, steps=300, batch_size=8, learning_rate=1e-3, points=10)
    parser.add_argument("--probe-steps", type=int, default=100, help="the last ones, in which gradients are compared")
    parser.add_argument("--repeat", action="store_true", help="every step sees the same sequences")
    return parse(parser, QUICK, argv)


def recipe_of(args: argparse.Namespace) -> ProbedRecipe:
    """Return the settings of all runs."""
    sizes = {"batch_size": args.batch_size, "learning_rate": args.learning_rate, "probe_steps": args.probe_steps}
    return ProbedRecipe(shape_of(args), args.steps, **sizes, repeat=args.repeat)


def intro_of(recipe: ProbedRecipe) -> str:
    """Return the first paragraphs of the study's page."""
    tokens = 4 * recipe.batch_size * recipe.seq_len
    return INTRO.format(tokens=tokens, probe_steps=recipe.probe_steps) + (REPEATED if recipe.repeat else "")


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


def error_grid(study: Study, args: argparse.Namespace) -> Grid:
    """Make the table of traffic and of the errors in weights and gradients, with a row per variant."""
    columns = ("variant", "traffic", "weight error, mean", "largest", "gradient error", "x paper's", "scaled")
    grid = Grid(
        f"bytes across nodes per step in M, and errors; gradients summed over {args.probe_steps} steps", columns
    )
    known = variants_of(study)
    for variant in (name for name in args.variants if name in known):
        weights, gradients = weight_errors(study, variant), gradient_error(study, variant)
        row = [
            variant,
            f"{traffic(study, variant):.3f}",
            f"{statistics.mean(weights):.5f}",
            f"{max(weights):.5f}",
            f"{gradients:.5f}",
            f"{gradients / gradient_error(study, 'paper'):.3f}" if "paper" in known else "",
            f"{statistics.mean(run['scaled_error'] for run in runs_of(study, variant)):.5f}",
        ]
        grid.rows.append(row)
    return grid


def plot_study(study: Study, path: Path) -> None:
    """Draw losses beside stock's, weight errors over steps, and gradient errors over the number of steps summed."""
    plt = pyplot()
    figure, (losses, weights, gradients) = plt.subplots(1, 3, figsize=(15, 4.5))
    for index, variant in enumerate(variants_of(study)):
        color = plt.cm.tab20(index - 1) if index else "black"
        curves = [run["curve"] for run in runs_of(study, variant)]
        sums = [run["gradient_error"] for run in runs_of(study, variant)]
        plot_change(losses, study, variant, color)
        _plot_mean(weights, curves[0]["step"], [curve["weight_error"] for curve in curves], color, variant)
        _plot_mean(gradients, sums[0]["steps"], [each["error"] for each in sums], color, variant)
    losses.set(xlabel="step", ylabel="validation loss, % above stock, same seed")
    weights.set(xlabel="step", ylabel="relative error of gathered weights", yscale="log")
    gradients.set(xlabel="steps summed", ylabel="relative error of summed gradients", xscale="log", yscale="log")
    gradients.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _plot_mean(axis: Any, x: list[int], rows: list[list[float]], color: Any, label: str) -> None:
    means = [statistics.mean(point) for point in zip(*rows, strict=True)]
    axis.plot(x, means, color=color, label=label, marker=".", linewidth=1)


def check_direction(study: Study) -> None:
    """Check the results of the quick form.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    first = study.find("runs", variant="stock")["curve"]["validation"][0]
    weights = {variant: weight_errors(study, variant)[-1] for variant in variants_of(study)}
    require(
        {
            "stock learns": losses_of(study, "stock")[0] < first,
            "4-bit deltas beat INT8 values": weights["half-values"] < 0.5 * weights["paper"],
            "2-bit deltas do too": weights["three-eighths-values"] < weights["paper"],
            "half a model crosses": 0.5 < traffic(study, "half-values") < 0.56,
            "three eighths of a model cross": 0.375 < traffic(study, "three-eighths-values") < 0.44,
        }
    )


def main() -> None:
    """Run the study in the sandbox, and report it."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    recipe = recipe_of(args)
    conditions = {"command": command_line(__file__), "recipe": dataclasses.asdict(recipe)}
    study = Study(args.output, conditions, FIXED, fresh=args.fresh)
    run_study(args, study, recipe, "library.half_model_run:HalfModelRun")
    grids = [loss_grid(study, args, rivals=("stock", "paper")), error_grid(study, args)]
    report(args, study, TITLE, intro_of(recipe), grids, plot_study)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
