"""Loss curves of Transformers' Trainer with and without ZeRO++: same data, same seeds, several seeds.

    python scripts/benchmarks/compare_trainers.py --seeds 0 1 2 --steps 60 --results scripts/results/trainer_losses.json

Every run is ``examples/train_trainer.py`` as a user starts it, in four CPU processes treated as two nodes of two. Two
questions are asked: do the curves agree within 1 % in the first steps, and do the final validation losses differ by less
than the seeds make them differ?
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from library.launches import launch
from library.pages import Grid, show
from library.study import ROOT

SCRIPT = ROOT / "examples/train_trainer.py"
VARIANTS = {
    "stock FSDP2": False,
    "ZeRO++": {"ranks_per_node": 2},
    "ZeRO++, qgZ for the first half": {"ranks_per_node": 2, "qgz_until": 0.5},
}
"""The Trainer's ``zeropp`` setting by the variant's name."""
EARLY = 10  # first steps, in which curves are compared step by step


class Curves(NamedTuple):
    """Losses of one run.

    Attributes:
        loss: the training loss of every step.
        eval_loss: the validation loss after each third of the steps.
    """

    loss: list[float]
    eval_loss: list[float]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--results", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    """Run all variants with all seeds, and show and keep their losses."""
    args = parse_args(sys.argv[1:])
    runs = {name: [run(args, name, seed) for seed in args.seeds] for name in VARIANTS}
    show([summary(runs)])
    if args.results:
        settings = {key: value for key, value in vars(args).items() if key != "results"}
        rows = {name: [curves._asdict() for curves in seeds] for name, seeds in runs.items()}
        args.results.write_text(json.dumps({"settings": settings, "runs": rows}, indent=1) + "\n")


def run(args: argparse.Namespace, variant: str, seed: int) -> Curves:
    """Start the example in processes of its own, and return its losses."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "fsdp.json"
        settings.write_text(json.dumps({"zeropp": VARIANTS[variant]}))
        flags = {
            "fsdp_config": settings,
            "output_dir": folder,
            "seed": seed,
            "max_steps": args.steps,
            "logging_steps": 1,
            "eval_steps": args.steps // 3,
            "per_device_train_batch_size": args.batch_size,
            "seq_len": args.seq_len,
            "disable_tqdm": True,
        }
        texts = [text for key, value in flags.items() for text in (f"--{key}", str(value))]
        launch([str(SCRIPT), "--fsdp", *texts], {}, Path(folder))
        history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    print(f"{variant}, seed {seed}: done", file=sys.stderr)
    return Curves(*([entry[key] for entry in history if key in entry] for key in Curves._fields))


def summary(runs: dict[str, list[Curves]]) -> Grid:
    """Make the table of a study, from the runs by the variant's name, one per seed, in the same order for all."""
    columns = ("variant", "validation, end", "training, last tenth", f"largest difference in {EARLY} steps")
    grid = Grid("loss, mean over seeds ± standard deviation", columns)
    for name, seeds in runs.items():
        last = len(seeds[0].loss) // 10 or 1
        pairs = zip(seeds, runs["stock FSDP2"], strict=True)
        row = [
            name,
            mean_and_deviation([curves.eval_loss[-1] for curves in seeds]),
            mean_and_deviation([statistics.mean(curves.loss[-last:]) for curves in seeds]),
            f"{max(early_difference(ours, theirs) for ours, theirs in pairs):.2%}",
        ]
        grid.rows.append(row)
    return grid


def early_difference(ours: Curves, theirs: Curves) -> float:
    """Return the largest relative difference of training losses in the first steps."""
    return max(abs(a - b) / b for a, b in zip(ours.loss[:EARLY], theirs.loss[:EARLY], strict=True))


def mean_and_deviation(values: list[float]) -> str:
    """Format the mean and the standard deviation."""
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


if __name__ == "__main__":
    main()
