"""What ZeRO++ costs in loss: a small language model on real text, several seeds, each technique beside stock FSDP2.

    python scripts/bench_convergence.py                          the whole study
    python scripts/bench_convergence.py --variants stock all --seeds 0 1 2 --steps 300

2 nodes x 2 ranks as everywhere here, at full network speed. The text is the source code of Python's standard library; a
seed sets the weights and the order of the text, the same for every variant. "unblocked" is the negative control of the
paper: one scale for a rank's whole shard of a parameter, where otherwise 256 weights or 128 gradients share one.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from cluster import Cluster, Ranks, enter_sandbox
from pages import Grid, headline, write_page
from rich.console import Console
from rich.progress import Progress, TaskID
from study import ROOT, Study, command_line, make_parser, parse, progress_bar, rank_environment, shape_of

sys.path.insert(0, str(ROOT))

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
    from convergence_run import VARIANTS

    parser = make_parser(__doc__, "convergence.json")
    parser.set_defaults(hidden_size=256, layers=4)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--points", type=int, default=20, help="of each curve")
    return parse(parser, QUICK, argv)


def recipe_of(args: argparse.Namespace):
    from convergence_run import Recipe

    return Recipe(shape_of(args), args.steps, learning_rate=args.learning_rate)


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


def run_study(args: argparse.Namespace, study: Study, progress: Progress) -> None:
    """Seed by seed, so that a study that was stopped has whole comparisons."""
    wanted = [(variant, seed) for seed in args.seeds for variant in args.variants]
    missing = [(variant, seed) for variant, seed in wanted if study.find("runs", variant=variant, seed=seed) is None]
    if not missing:
        return
    task = progress.add_task("tokenizing", total=len(missing) * args.points)
    with tempfile.TemporaryDirectory(dir="/run") as folder, Cluster(2, 2, rank_environment(threads=1)) as cluster:
        files = write_tokens(Path(folder), args.vocab_size)
        cluster.set_link()
        for variant, seed in missing:
            progress.update(task, description=f"{variant}, seed {seed}")
            with cluster.start("convergence_run:ConvergenceRun", variant, seed, recipe_of(args), *files) as ranks:
                study.add("runs", {"variant": variant, "seed": seed, **_train(ranks, args, progress, task)})


def _train(ranks: Ranks, args: argparse.Namespace, progress: Progress, task: TaskID) -> dict[str, Any]:
    """One run: points of the curve, the last of them on the validation text at the end."""
    curve: dict[str, list[float]] = {"step": [], "train": [], "validation": []}
    done = 0
    for point in range(1, args.points + 1):
        upto = round(args.steps * point / args.points)
        if upto > done:
            curve["train"].append(round(ranks.call("train", upto - done)[0], 5))
            curve["validation"].append(round(ranks.call("evaluate")[0], 5))
            curve["step"].append(upto)
        done = upto
        progress.advance(task)
    return {"final": curve["validation"][-1], "curve": curve}


def losses_of(study: Study, variant: str) -> dict[int, float]:
    return {run["seed"]: run["final"] for run in study.rows("runs") if run["variant"] == variant}


def difference(study: Study, variant: str) -> float | None:
    """Mean over seeds of the loss relative to stock's with the same seed, minus one."""
    stock, own = losses_of(study, "stock"), losses_of(study, variant)
    pairs = [own[seed] / stock[seed] - 1 for seed in own if seed in stock]
    return statistics.mean(pairs) if pairs else None


def loss_grid(study: Study, args: argparse.Namespace) -> Grid:
    """Final validation loss by variant, and its distance to stock's with the same seeds."""
    columns = ("variant", "mean", "std over seeds", "min-max", "seeds", "to stock, same seed")
    grid = Grid(f"validation loss after {args.steps} steps", columns)
    for variant in args.variants:
        losses, change = list(losses_of(study, variant).values()), difference(study, variant)
        if losses:
            row = [
                variant,
                f"{statistics.mean(losses):.4f}",
                f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "",
                f"{min(losses):.4f}-{max(losses):.4f}",
                str(len(losses)),
                f"{100 * change:+.2f} %" if change is not None else "",
            ]
            grid.rows.append(row)
    return grid


def plot_curves(study: Study, path: Path) -> None:
    """Validation loss over steps, mean over seeds; and its difference to stock, with the spread over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    stock = {
        run["seed"]: np.array(run["curve"]["validation"]) for run in study.rows("runs") if run["variant"] == "stock"
    }
    for variant in dict.fromkeys(run["variant"] for run in study.rows("runs")):
        runs = [run for run in study.rows("runs") if run["variant"] == variant]
        steps = runs[0]["curve"]["step"]
        losses = np.mean([run["curve"]["validation"] for run in runs], axis=0)
        (line,) = left.plot(steps, losses, label=variant, linewidth=1)
        changes = [
            100 * (np.array(run["curve"]["validation"]) / stock[run["seed"]] - 1)
            for run in runs
            if run["seed"] in stock
        ]
        if changes and variant != "stock":
            color = line.get_color()
            right.plot(steps, np.mean(changes, axis=0), color=color, linewidth=1)
            right.fill_between(steps, np.min(changes, 0), np.max(changes, 0), color=color, alpha=0.15)
    left.set(xlabel="step", ylabel="validation loss")
    right.set(xlabel="step", ylabel="% above stock, same seed")
    right.axhline(0, color="black", linewidth=0.5)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def check_direction(study: Study) -> None:
    """The quick form's verdict, for CI: training works, and quantization in blocks stays near stock."""
    first = study.find("runs", variant="stock")["curve"]["validation"][0]
    checks = {
        "stock learns": losses_of(study, "stock")[0] < first,
        "all three stay within 3 % of stock after 30 steps": abs(difference(study, "all")) < 0.03,
        "one scale per shard is worse": difference(study, "unblocked") > difference(study, "all"),
    }
    if failed := [claim for claim, holds in checks.items() if not holds]:
        raise SystemExit(f"It does not hold that: {'; '.join(failed)}")


def main() -> None:
    args = parse_args(sys.argv[1:])
    enter_sandbox()
    console = Console(width=None if sys.stdout.isatty() else 132)
    conditions = {"command": command_line(__file__), "recipe": dataclasses.asdict(recipe_of(args))}
    study = Study(args.output, conditions, FIXED, fresh=args.fresh)
    with progress_bar(console) as progress:
        run_study(args, study, progress)
    console.print(headline(study.conditions))
    grid = loss_grid(study, args)
    console.print(grid.rich())
    if args.plot:
        plot_curves(study, args.plot)
    if study.path:
        plot = study.path.with_suffix(".png")
        plot_curves(study, plot)
        write_page(study.path.with_suffix(".md"), TITLE, study.conditions, INTRO, [grid], plot)
    if args.quick:
        check_direction(study)


if __name__ == "__main__":
    main()
