"""What studies of the training loss share: the text, the runs, and what is shown of their curves."""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster import Cluster, Ranks
from pages import Grid, headline, write_page
from rich.console import Console
from rich.progress import Progress, TaskID
from study import Study, make_parser, progress_bar, rank_environment


def loss_parser(description: str, default_output: str, variants: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with what these studies take."""
    parser = make_parser(description, default_output)
    parser.set_defaults(hidden_size=256, layers=4)
    parser.add_argument("--variants", nargs="+", default=list(variants), choices=list(variants))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--points", type=int, default=20, help="of each curve")
    return parser


def write_tokens(folder: Path, vocab_size: int) -> tuple[str, str]:
    """The standard library's modules, tokenized; every tenth goes to the validation text."""
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab_size, show_progress=False)
    paths = []
    for name, chosen in (("train", [i for i in range(len(texts)) if i % 10]), ("validation", range(0, len(texts), 10))):
        tokens = [token for i in chosen for token in tokenizer.encode(texts[i]).ids]
        paths.append(str(folder / f"{name}.npy"))
        np.save(paths[-1], np.array(tokens, dtype=np.uint16))
    return paths[0], paths[1]


def run_study(
    args: argparse.Namespace, study: Study, recipe: Any, served: str = "convergence_run:ConvergenceRun"
) -> None:
    """Seed by seed, so that a study that was stopped has whole comparisons. `served`: what a rank runs."""
    wanted = [(variant, seed) for seed in args.seeds for variant in args.variants]
    missing = [(variant, seed) for variant, seed in wanted if study.find("runs", variant=variant, seed=seed) is None]
    if not missing:
        return
    with (
        progress_bar(new_console()) as progress,
        tempfile.TemporaryDirectory(dir="/run") as folder,
        Cluster(2, 2, rank_environment(threads=1)) as cluster,
    ):
        task = progress.add_task("tokenizing", total=len(missing) * args.points)
        files = write_tokens(Path(folder), args.vocab_size)
        cluster.set_link()
        for variant, seed in missing:
            progress.update(task, description=f"{variant}, seed {seed}")
            with cluster.start(served, variant, seed, recipe, *files) as ranks:
                study.add("runs", {"variant": variant, "seed": seed, **_train(ranks, args, progress, task)})


def _train(ranks: Ranks, args: argparse.Namespace, progress: Progress, task: TaskID) -> dict[str, Any]:
    """One run: points of the curve, the last of them at the end, and whatever else it sums up to."""
    points = []
    done = 0
    for point in range(1, args.points + 1):
        upto = round(args.steps * point / args.points)
        if upto > done:
            points.append({"step": upto, "train": ranks.call("train", upto - done)[0], **ranks.call("evaluate")[0]})
        done = upto
        progress.advance(task)
    curve = {name: [point[name] for point in points] for name in points[0]}
    return {"final": curve["validation"][-1], **ranks.call("summary")[0], "curve": curve}


def losses_of(study: Study, variant: str) -> dict[int, float]:
    return {run["seed"]: run["final"] for run in study.rows("runs") if run["variant"] == variant}


def difference(study: Study, variant: str, rival: str = "stock") -> float | None:
    """Mean over seeds of the loss relative to the rival's with the same seed, minus one."""
    theirs, own = losses_of(study, rival), losses_of(study, variant)
    pairs = [own[seed] / theirs[seed] - 1 for seed in own if seed in theirs]
    return statistics.mean(pairs) if pairs else None


def loss_grid(study: Study, args: argparse.Namespace, rivals: Sequence[str] = ("stock",)) -> Grid:
    """Final validation loss by variant, and its distance to the rivals' with the same seeds."""
    columns = ("variant", "mean", "std over seeds", "min-max", "seeds", *(f"to {name}, same seed" for name in rivals))
    grid = Grid(f"validation loss after {args.steps} steps", columns)
    for variant in args.variants:
        losses = list(losses_of(study, variant).values())
        if losses:
            row = [
                variant,
                f"{statistics.mean(losses):.4f}",
                f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "",
                f"{min(losses):.4f}-{max(losses):.4f}",
                str(len(losses)),
                *(_percent(difference(study, variant, rival)) for rival in rivals),
            ]
            grid.rows.append(row)
    return grid


def _percent(change: float | None) -> str:
    return "" if change is None else f"{100 * change:+.2f} %"


def variants_of(study: Study) -> list[str]:
    return list(dict.fromkeys(run["variant"] for run in study.rows("runs")))


def plot_losses(axis: Any, study: Study, variant: str, color: str) -> None:
    """Validation loss over steps, mean over seeds."""
    runs = [run["curve"] for run in study.rows("runs") if run["variant"] == variant]
    losses = [statistics.mean(point) for point in zip(*(run["validation"] for run in runs), strict=True)]
    axis.plot(runs[0]["step"], losses, color=color, label=variant, linewidth=1)


def plot_change(axis: Any, study: Study, variant: str, color: Any) -> None:
    """How far above stock's with the same seed a variant's losses are: the mean over seeds, and all of them as a band."""
    import numpy as np

    changes = []
    for run in study.rows("runs"):
        stock = study.find("runs", variant="stock", seed=run["seed"])
        if run["variant"] == variant and stock:
            changes.append(100 * (np.divide(run["curve"]["validation"], stock["curve"]["validation"]) - 1))
            steps = run["curve"]["step"]
    if changes:
        axis.plot(steps, np.mean(changes, axis=0), color=color, label=variant, linewidth=1)
        axis.fill_between(steps, np.min(changes, 0), np.max(changes, 0), color=color, alpha=0.15)


def new_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 132)


def report(
    args: argparse.Namespace,
    study: Study,
    title: str,
    intro: str,
    grids: list[Grid],
    plot: Callable[[Study, Path], None],
) -> None:
    """Tables on the terminal; the JSON's neighbours, a plot and a page; and the plot where it was asked for."""
    console = new_console()
    console.print(headline(study.conditions))
    for grid in grids:
        console.print(grid.rich())
    if args.plot:
        plot(study, args.plot)
    if study.path:
        picture = study.path.with_suffix(".png")
        plot(study, picture)
        write_page(study.path.with_suffix(".md"), title, study.conditions, intro, grids, picture)


def require(checks: dict[str, bool]) -> None:
    """The quick form's verdict, for CI. Raises: SystemExit: a claim does not hold."""
    if failed := [claim for claim, holds in checks.items() if not holds]:
        raise SystemExit(f"It does not hold that: {'; '.join(failed)}")
