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
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_fine_tuning import SERVED, make_checkpoint
from library.cluster import Cluster, Ranks
from library.cluster_report import num_parameters
from library.loss_study import TokenFiles, loss_parser, write_tokens
from library.measurement import Round, busiest_link_bytes, largest_counted_bytes, step_seconds
from library.network import speed
from library.pages import Grid, pyplot, report
from library.sandbox import enter_sandbox
from library.study import Study, command_line, new_console, parse, progress_bar, rank_environment, require, shape_of
from library.variants import FINE_TUNING_VARIANTS, ConstantRecipe, Recipe
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
    parser = loss_parser(__doc__, "exact_steps.json", list(FINE_TUNING_VARIANTS))
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


def run_study(args: argparse.Namespace, study: Study, recipe: Recipe, progress: Progress) -> None:
    """Make the checkpoint, and measure every rate, link and variant that the study lacks."""
    missing = {
        rate: [(link, name) for link in args.links for name in args.variants if not _find(study, rate, link, name)]
        for rate in args.rates
    }
    if not any(missing.values()):
        return
    task = progress.add_task("training the checkpoint", total=sum(map(len, missing.values())))
    with (
        tempfile.TemporaryDirectory(dir="/run") as folder,  # the sandbox's own
        Cluster(args.nodes, args.ranks_per_node, rank_environment(threads=1)) as cluster,
    ):
        files = write_tokens(Path(folder), args.vocab_size)
        cluster.set_link()
        checkpoint = make_checkpoint(cluster, recipe, args, files, Path(folder))
        for rate, cells in missing.items():
            at_rate = ConstantRecipe(**vars(recipe) | {"learning_rate": rate})
            with contextlib.ExitStack() as stack:
                names = dict.fromkeys(name for _, name in cells)
                runs = {
                    name: stack.enter_context(_start(cluster, name, at_rate, files, checkpoint, args)) for name in names
                }
                for link in dict.fromkeys(link for link, _ in cells):
                    progress.update(task, description=f"{link}, learning rate {rate:g}")
                    cluster.set_link(link)
                    group = {name: runs[name] for at, name in cells if at == link}
                    for name, cell in _measure(group, args).items():
                        study.add("cells", {"rate": rate, "link": link, "variant": name, **cell})
                    progress.advance(task, len(group))
                cluster.set_link()


@contextlib.contextmanager
def _start(
    cluster: Cluster, name: str, recipe: Recipe, files: TokenFiles, checkpoint: str, args: argparse.Namespace
) -> Any:
    with cluster.start(SERVED, name, 1000, recipe, *files, checkpoint) as ranks:
        ranks.call("measure", args.warm_up)
        yield ranks


def _measure(runs: dict[str, Ranks], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure variants in turns at the link that is set, behind one step of each that shows how many steps there is time for."""
    first = {name: step_seconds(ranks.call("measure", 1))[0] for name, ranks in runs.items()}
    left = {name: max(3, min(args.steps, int(args.seconds / seconds))) for name, seconds in first.items()}
    rounds: dict[str, list[Round]] = {name: [] for name in runs}
    for rounds_left in range(args.rounds, 0, -1):
        for name, ranks in runs.items():
            if steps := -(-left[name] // rounds_left):
                rounds[name].append(ranks.call("measure", steps))
                left[name] -= steps
    return {name: _cell(found, args) for name, found in rounds.items()}


def _cell(rounds: list[Round], args: argparse.Namespace) -> dict[str, Any]:
    seconds = [second for ranks in rounds for second in step_seconds(ranks)]
    counted = largest_counted_bytes(rounds, args.ranks_per_node)
    return {
        "step_s": statistics.median(seconds),
        "steps_s": [round(second, 5) for second in seconds],
        "link_bytes": busiest_link_bytes(rounds, args.ranks_per_node) / len(seconds),
        "counted_bytes": counted / len(seconds) if counted else None,
    }


def _find(study: Study, rate: float, link: str, variant: str) -> dict[str, Any] | None:
    return study.find("cells", rate=rate, link=link, variant=variant)


def step_grid(study: Study, rate: float, link: str) -> Grid:
    """Make the table of one learning rate and link, with a row per variant."""
    columns = ("variant", "step s", "min-max", "x stock", "x half_model", "link MB", "of M", "counted, of M")
    grid = Grid(f"learning rate {rate:g}, {link}", columns)
    nodes = study.conditions["nodes"]
    whole = 2 * num_parameters(study.conditions["recipe"]["shape"]) * (nodes - 1) / nodes
    rivals = [_find(study, rate, link, name) for name in ("stock", "half_model")]
    for cell in study.rows("cells"):
        if cell["rate"] == rate and cell["link"] == link:
            faster = [f"{rival['step_s'] / cell['step_s']:.2f}" if rival else "" for rival in rivals]
            times = [f"{cell['step_s']:.3f}", f"{min(cell['steps_s']):.2f}-{max(cell['steps_s']):.2f}"]
            sent, counted = cell["link_bytes"], cell["counted_bytes"]
            shares = [f"{sent / whole:.4f}", f"{counted / whole:.4f}" if counted else ""]
            grid.rows.append([cell["variant"], *times, *faster, f"{sent / 1e6:.2f}", *shares])
    return grid


def plot(study: Study, path: Path) -> None:
    """Draw step rates over the link, as ratios to half_model, one panel per learning rate."""
    rates = sorted({cell["rate"] for cell in study.rows("cells")})
    figure, axes = pyplot().subplots(1, len(rates), figsize=(4.5 * len(rates), 4), squeeze=False)
    for axis, rate in zip(axes[0], rates, strict=True):
        links = sorted({cell["link"] for cell in study.rows("cells")}, key=speed)
        for name in dict.fromkeys(cell["variant"] for cell in study.rows("cells")):
            pairs = [(_find(study, rate, link, name), _find(study, rate, link, "half_model")) for link in links]
            points = [(i, rival["step_s"] / own["step_s"]) for i, (own, rival) in enumerate(pairs) if own and rival]
            if points and name != "stock":
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_xticks(range(len(links)), links)
        axis.set(
            title=f"learning rate {rate:g}", xlabel="link between nodes", ylabel="steps per second, half_model = 1"
        )
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


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
    """Run the study in the sandbox, and report it."""
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    recipe = Recipe(shape_of(args), args.pretraining, args.batch_size, args.seq_len, learning_rate=args.learning_rate)
    conditions = {
        "command": command_line(__file__),
        "recipe": dataclasses.asdict(recipe),
        "pretraining": args.pretraining,
        "warm_up": args.warm_up,
        "nodes": args.nodes,
        "ranks_per_node": args.ranks_per_node,
    }
    study = Study(args.output, conditions, FIXED, fresh=args.fresh)
    with progress_bar(new_console()) as progress:
        run_study(args, study, recipe, progress)
    intro = INTRO.format(millions=num_parameters(study.conditions["recipe"]["shape"]) / 1e6)
    grids = [step_grid(study, rate, link) for rate in args.rates for link in args.links]
    report(args, study, TITLE, intro, grids, plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
