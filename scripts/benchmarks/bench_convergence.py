"""The cost of ZeRO++ in loss: a small language model on real text, several seeds, each technique beside stock FSDP2.

    python scripts/benchmarks/bench_convergence.py                          the whole study
    python scripts/benchmarks/bench_convergence.py --variants stock all --seeds 0 1 2 --steps 300

The model is trained on 2 nodes x 2 ranks at full network speed. The text is the source code of Python's standard library.
A seed sets the weights and the order of the text, the same for every variant. "unblocked" is the paper's negative
control: one scale for a rank's whole shard of a parameter, where otherwise 256 weights or 128 gradients share one.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from library.loss_study import (
    difference,
    loss_grid,
    loss_parser,
    losses_of,
    plot_change,
    plot_losses,
    run_study,
    variants_of,
)
from library.pages import pyplot, report
from library.sandbox import enter_sandbox
from library.study import Study, command_line, parse, require, shape_of
from library.variants import LOSS_VARIANTS, Recipe

QUICK = {
    "variants": ["stock", "all", "unblocked"],
    "seeds": [0],
    "steps": 30,
    "points": 3,
    "hidden_size": 128,
    "layers": 2,
}
TITLE = "What it costs in loss"
INTRO = """A Llama from scratch on the source code of Python's standard library (BPE of its own, every tenth module
held out), 2 nodes x 2 ranks, bf16 compute, AdamW, cosine schedule. A seed sets the weights and the order of the text,
the same for every variant. `unblocked` is the paper's negative control: one scale for a rank's whole shard of each
parameter. The shaded band of the plot is the spread over seeds."""
FIXED = ("recipe",)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    return parse(loss_parser(__doc__, "convergence.json", list(LOSS_VARIANTS)), QUICK, argv)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings of all runs."""
    return Recipe(shape_of(args), args.steps, args.batch_size, learning_rate=args.learning_rate)


def plot_curves(study: Study, path: Path) -> None:
    """Draw validation losses over steps, and their differences to stock."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for index, variant in enumerate(variants_of(study)):
        plot_losses(left, study, variant, f"C{index}")
        plot_change(right, study, variant, f"C{index}")
    left.set(xlabel="step", ylabel="validation loss")
    right.set(xlabel="step", ylabel="% above stock, same seed")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def check_direction(study: Study) -> None:
    """Check the results of the quick form: training works, and quantization in blocks stays near stock.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    first = study.find("runs", variant="stock")["curve"]["validation"][0]
    require(
        {
            "stock learns": losses_of(study, "stock")[0] < first,
            "all three stay within 3 % of stock after 30 steps": abs(difference(study, "all")) < 0.03,
            "one scale per shard is worse": difference(study, "unblocked") > difference(study, "all"),
        }
    )


def main() -> None:
    """Run the study in the sandbox, and report it."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    recipe = recipe_of(args)
    conditions = {"command": command_line(__file__), "recipe": dataclasses.asdict(recipe)}
    study = Study(args.output, conditions, FIXED, fresh=args.fresh)
    run_study(args, study, recipe)
    report(args, study, TITLE, INTRO, [loss_grid(study, args)], plot_curves)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
