"""How long is a step of fine-tuning with exact weights on a slow network, and what do the interfaces count?

    python scripts/benchmarks/bench_exact.py
    python scripts/benchmarks/bench_exact.py --rates 1e-5 --links 200mbit --variants half_model exact

A Llama is trained from scratch on the source code of Python's standard library first. From that checkpoint every variant goes on
at each learning rate, on an emulated cluster whose links are slow. At each link the variants take turns, as in
``bench_cluster.py``. What fine-tuning learns, and which weights change, is in ``bench_fine_tuning.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from library.checkpoint import SERVED, checkpoint_of
from library.cluster import Cluster, Ranks
from library.links import start_all
from library.loss_study import loss_parser
from library.pages import Grid, report
from library.plots import log_ticks, model_text, over_rates, panels, save
from library.rounds import cell_of, measure_in_turns
from library.study import Study, parse, rank_environment, require, shape_of, study_of
from library.variants import FINE_TUNING_VARIANTS, ConstantRecipe, ModelShape, Recipe, shown
from rich.progress import Progress

QUICK = {
    "variants": ["stock", "half_model", "exact"],
    "rates": [1e-5],
    "links": ["100mbit"],
    "steps": 3,
    "rounds": 1,
    "pretraining": 20,
    "warm_up": 2,
    "hidden_size": 256,
}
TITLE = "Step time of fine-tuning with exact weights"
INTRO = """A Llama with {millions:.1f} M parameters was trained from scratch on the source code of Python's standard library. From
that checkpoint each variant goes on over the same text with a new AdamW at a constant learning rate, with fp32 masters and bf16
compute. Nodes are network namespaces of one machine, their links shaped in both directions. Step times are medians, after steps
that do not count. M is the model in bf16 times (Y-1)/Y for Y nodes; bytes are those of the busiest node per step, by its
interface's counters, headers and acknowledgements included, and beside them the package's own count of its payload."""
FIXED = ("recipe", "pretraining", "warm_up", "nodes", "ranks_per_node")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = loss_parser(__doc__, "exact_steps.json", FINE_TUNING_VARIANTS)
    parser.set_defaults(hidden_size=512, layers=6, steps=12, batch_size=1, learning_rate=1e-3)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4], help="of AdamW, constant")
    parser.add_argument("--links", nargs="+", default=["unlimited", "1gbit", "200mbit", "100mbit"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--pretraining", type=int, default=300, help="steps before the checkpoint")
    parser.add_argument("--warm-up", type=int, default=15, help="steps of each variant and rate that do not count")
    parser.add_argument("--rounds", type=int, default=3, help="in which the variants take turns")
    parser.add_argument("--seconds", type=float, default=30, help="of timed steps; at least 3 steps are made")
    parser.add_argument("--seq-len", type=int, default=64)
    return parse(parser, QUICK, argv)


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the settings of the checkpoint, and of all runs but for the learning rate."""
    return Recipe(shape_of(args), args.pretraining, args.batch_size, args.seq_len, learning_rate=args.learning_rate)


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Make the checkpoint, and measure every rate, link and variant that the study lacks."""
    missing = {
        rate: [(link, name) for link in args.links for name in args.variants if not _find(study, rate, link, name)]
        for rate in args.rates
    }
    if not any(missing.values()):
        return
    task = progress.add_task("training the checkpoint", total=sum(map(len, missing.values())))
    recipe = recipe_of(args)
    with (
        Cluster(args.nodes, args.ranks_per_node, rank_environment(threads=1)) as cluster,
        checkpoint_of(cluster, recipe, args.pretraining) as checkpoint,
    ):
        for rate, cells in missing.items():
            at_rate = ConstantRecipe(**vars(recipe) | {"learning_rate": rate})

            @contextlib.contextmanager
            def start(cluster: Cluster, name: str, recipe: Recipe = at_rate) -> Iterator[Ranks]:
                with cluster.start(SERVED, name, 1000, recipe, *checkpoint) as ranks:
                    ranks.call("measure", args.warm_up)
                    yield ranks

            with contextlib.ExitStack() as stack:
                runs = start_all(stack, cluster, (name for _, name in cells), start)
                for link in dict.fromkeys(link for link, _ in cells):
                    progress.update(task, description=f"{link}, learning rate {rate:g}")
                    cluster.set_link(link)
                    group = {name: runs[name] for at, name in cells if at == link}
                    found = measure_in_turns(group, steps=args.steps, seconds=args.seconds, rounds=args.rounds)
                    for name, rounds in found.items():
                        cell = cell_of(rounds, args.ranks_per_node)
                        study.add("cells", {"rate": rate, "link": link, "variant": name, **cell})
                    progress.advance(task, len(group))
                cluster.set_link()


def _find(study: Study, rate: float, link: str, variant: str) -> dict[str, Any] | None:
    return study.find("cells", rate=rate, link=link, variant=variant)


def step_grid(study: Study, rate: float, link: str) -> Grid:
    """Make the table of one learning rate and link, with a row per variant."""
    columns = ("variant", "step s", "min-max", "x stock", "x half_model", "link MB", "of M", "counted, of M")
    grid = Grid(f"learning rate {rate:g}, {link}", columns)
    nodes = study.conditions["nodes"]
    whole = 2 * ModelShape(**study.conditions["recipe"]["shape"]).num_parameters * (nodes - 1) / nodes
    rivals = [_find(study, rate, link, name) for name in ("stock", "half_model")]
    for cell in study.rows("cells"):
        if cell["rate"] == rate and cell["link"] == link:
            faster = [f"{rival['step_s'] / cell['step_s']:.2f}" if rival else "" for rival in rivals]
            times = [f"{cell['step_s']:.3f}", f"{min(cell['steps_s']):.2f}-{max(cell['steps_s']):.2f}"]
            sent, counted = cell["link_bytes"], cell["counted_bytes"]
            shares = [f"{sent / whole:.4f}", f"{counted / whole:.4f}" if counted else ""]
            grid.rows.append([shown(cell["variant"]), *times, *faster, f"{sent / 1e6:.2f}", *shares])
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw step rates over the link, as ratios to half_model, one panel per learning rate. Stock is on the page alone."""
    cells = [cell for cell in study.rows("cells") if cell["variant"] != "stock"]
    rates = sorted({cell["rate"] for cell in cells})
    nodes = f"{study.conditions['nodes']} nodes x {study.conditions['ranks_per_node']} ranks"
    model = model_text(study.conditions["recipe"]["shape"])
    title = f"Fine-tuning: steps per second beside half_model (= 1)\n{model}, {nodes}, one micro-step per step"
    figure, axes = panels(len(rates), title, width=4, sharey=True)
    for axis, rate in zip(axes, rates, strict=True):

        def ratio(name: str, link: str, rate: float = rate) -> float | None:
            own, rival = (_find(study, rate, link, each) for each in (name, "half_model"))
            return rival["step_s"] / own["step_s"] if own and rival else None

        over_rates(axis, [cell["link"] for cell in cells], [cell["variant"] for cell in cells], ratio)
        axis.set_title(f"learning rate {rate:g}", fontsize=9)
        log_ticks(axis, (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8))
    axes[0].set_ylabel("steps per second, half_model = 1")
    save(figure, path)


def check_direction(study: Study) -> None:
    """Check the results of the quick form.

    Raises:
        SystemExit: the direction of a result is wrong.
    """
    stock, half, exact = (_find(study, 1e-5, "100mbit", name) for name in QUICK["variants"])
    require(
        {
            "exact sends less than half_model": exact["link_bytes"] < half["link_bytes"] < 0.3 * stock["link_bytes"],
            "both are faster than stock": max(exact["step_s"], half["step_s"]) < stock["step_s"],
        }
    )


def main() -> None:
    """Run the study, and report it."""
    args = parse_args(sys.argv[1:])
    conditions = {"recipe": dataclasses.asdict(recipe_of(args)), **{key: getattr(args, key) for key in FIXED[1:]}}
    study = study_of(args, __file__, conditions, FIXED, run_study)
    intro = INTRO.format(millions=ModelShape(**study.conditions["recipe"]["shape"]).num_parameters / 1e6)
    report(study, TITLE, intro, [step_grid(study, rate, link) for rate in args.rates for link in args.links], plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
