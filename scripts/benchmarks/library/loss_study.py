"""Parts that the studies of the training loss share: the text, the runs, and tables and plots of their curves.

Every run keeps a *curve*: the losses at a number of points, the last of which is the end. All comparisons are between
runs with the same seed, which start from the same weights and see the same text.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress, TaskID

from library.cluster import Cluster, Ranks
from library.pages import Grid
from library.study import Study, make_parser, rank_environment
from library.variants import Recipe, shown

SERVED = "library.text_run:TextRun"


def loss_parser(description: str, default_output: str, variants: Sequence[str]) -> argparse.ArgumentParser:
    """Make a parser with the flags of a loss study.

    Args:
        description: the study's module docstring.
        default_output: name of the JSON file in ``scripts/results``.
        variants: names of variants, all of which run by default.
    """
    parser = make_parser(description, default_output)
    parser.set_defaults(hidden_size=256, layers=4)
    parser.add_argument("--variants", nargs="+", default=list(variants), choices=list(variants))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--points", type=int, default=20, help="points of each curve")
    return parser


class TokenFiles(NamedTuple):
    """Paths of token files, as text."""

    train: str
    validation: str


def write_tokens(folder: Path, vocab_size: int) -> TokenFiles:
    """Write the source code of Python's standard library as tokens; every tenth module is validation text.

    Args:
        folder: for the files.
        vocab_size: of the tokenizer, which is trained on the same text.
    """
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab_size, show_progress=False)

    def write(name: str, chosen: list[str]) -> str:
        path = folder / f"{name}.npy"
        np.save(path, np.array([token for text in chosen for token in tokenizer.encode(text).ids], dtype=np.uint16))
        return str(path)

    training = [text for i, text in enumerate(texts) if i % 10]
    return TokenFiles(write("train", training), write("validation", texts[::10]))


def run_study(
    args: argparse.Namespace,
    study: Study,
    progress: Progress,
    *,
    recipe: Recipe,
) -> None:
    """Run every variant with every seed that the study lacks, on 2 nodes x 2 ranks at full network speed.

    Seeds are the outer loop, so that a study that is stopped has complete comparisons for some seeds.

    Args:
        args: the command line.
        study: takes one row of kind ``runs`` per variant and seed.
        progress: shows how far it is.
        recipe: the settings that all runs share.
    """
    wanted = [(variant, seed) for seed in args.seeds for variant in args.variants]
    missing = [(variant, seed) for variant, seed in wanted if study.find("runs", variant=variant, seed=seed) is None]
    if not missing:
        return
    with (
        tempfile.TemporaryDirectory(dir="/run") as folder,  # the sandbox's own
        Cluster(2, 2, rank_environment(threads=1)) as cluster,
    ):
        task = progress.add_task("tokenizing", total=len(missing) * args.points)
        files = write_tokens(Path(folder), args.vocab_size)
        cluster.set_link()
        for variant, seed in missing:
            progress.update(task, description=f"{variant}, seed {seed}")
            with cluster.start(SERVED, variant, seed, recipe, *files) as ranks:
                study.add("runs", {"variant": variant, "seed": seed, **_train(ranks, args, progress, task)})


def _train(ranks: Ranks, args: argparse.Namespace, progress: Progress, task: TaskID) -> dict[str, Any]:
    """Train one run to its end, and return its row: curve, final loss and summary."""
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


def variants_of(study: Study) -> list[str]:
    """Return the variants that have run, in the order in which they first did."""
    return list(dict.fromkeys(run["variant"] for run in study.rows("runs")))


def runs_of(study: Study, variant: str) -> list[dict[str, Any]]:
    """Return a variant's runs, one per seed."""
    return [run for run in study.rows("runs") if run["variant"] == variant]


def losses_of(study: Study, variant: str) -> dict[int, float]:
    """Return a variant's final validation losses by seed."""
    return {run["seed"]: run["final"] for run in runs_of(study, variant)}


def difference(study: Study, variant: str, rival: str = "stock") -> float | None:
    """Return by how much a variant's final loss exceeds the rival's with the same seed, relative, the mean over seeds.

    The seed moves the loss more than most variants do, so losses are compared within a seed and averaged afterwards.

    Returns:
        The mean of loss / rival's loss - 1; None where no seed has both.
    """
    theirs, own = losses_of(study, rival), losses_of(study, variant)
    pairs = [own[seed] / theirs[seed] - 1 for seed in own if seed in theirs]
    return statistics.mean(pairs) if pairs else None


def loss_grid(study: Study, rivals: Sequence[str]) -> Grid:
    """Make the table of final validation losses by variant, and of their distance to each rival's."""
    columns = ("variant", "mean", "std over seeds", "min-max", "seeds", *(f"to {name}, same seed" for name in rivals))
    grid = Grid(f"validation loss after {study.conditions['recipe']['steps']} steps", columns)
    for variant in variants_of(study):
        losses = list(losses_of(study, variant).values())
        row = [
            shown(variant),
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


def plot_losses(axis: Any, study: Study, variant: str, color: str) -> None:
    """Draw a variant's validation loss over steps, the mean over seeds."""
    curves = [run["curve"] for run in runs_of(study, variant)]
    losses = [statistics.mean(point) for point in zip(*(curve["validation"] for curve in curves), strict=True)]
    axis.plot(curves[0]["step"], losses, color=color, label=shown(variant), linewidth=1)


def plot_change(axis: Any, study: Study, variant: str, color: Any) -> None:
    """Draw how far a variant's losses are above stock's with the same seed: the mean over seeds, and a band of all."""
    import numpy as np

    changes = []
    for run in runs_of(study, variant):
        if stock := study.find("runs", variant="stock", seed=run["seed"]):
            changes.append(100 * (np.divide(run["curve"]["validation"], stock["curve"]["validation"]) - 1))
            steps = run["curve"]["step"]
    if changes:
        axis.plot(steps, np.mean(changes, axis=0), color=color, label=shown(variant), linewidth=1)
        axis.fill_between(steps, np.min(changes, 0), np.max(changes, 0), color=color, alpha=0.15)
