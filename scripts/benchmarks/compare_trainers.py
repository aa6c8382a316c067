"""Loss curves of transformers' Trainer with and without ZeRO++: same data, same seeds, several seeds.

    python scripts/compare_trainers.py --seeds 0 1 2 --steps 60 --results scripts/results/trainer_losses.json

Every run is examples/train_trainer.py as a user starts it, in four CPU processes treated as two nodes of two. It asks
two things: do the curves agree within 1 % early on, and does the final validation loss agree within seed noise?
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, "-m", "hf_zeropp.cli", "launch"]
CONFIG = ROOT / "examples/configs/cpu_2_nodes_x_2_ranks.yaml"
SCRIPT = ROOT / "examples/train_trainer.py"
VARIANTS = {
    "stock FSDP2": False,
    "ZeRO++": {"ranks_per_node": 2},
    "ZeRO++, qgZ for the first half": {"ranks_per_node": 2, "qgz_until": 0.5},
}
EARLY = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    runs = {name: [run(args, name, seed) for seed in args.seeds] for name in VARIANTS}
    Console().print(summary(runs))
    if args.results:
        settings = {key: value for key, value in vars(args).items() if key != "results"}
        args.results.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")


def run(args: argparse.Namespace, variant: str, seed: int) -> dict[str, list[float]]:
    """Training losses of every step, and validation losses before the end of each third."""
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
        command = [*LAUNCH, "--config_file", str(CONFIG), str(SCRIPT), "--fsdp"]
        command += [text for key, value in flags.items() for text in (f"--{key}", str(value))]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if finished.returncode:
            raise SystemExit(f"{variant}, seed {seed} failed:\n{finished.stderr[-4000:]}")
        history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    print(f"{variant}, seed {seed}: done", file=sys.stderr)
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss")}


def summary(runs: dict[str, list[dict[str, list[float]]]]) -> Table:
    table = Table(title="loss, mean over seeds ± standard deviation")
    for column in ("", "validation, end", "training, last tenth", f"largest difference in {EARLY} steps"):
        table.add_column(column, justify="left" if not column else "right")
    stock = runs["stock FSDP2"]
    for name, seeds in runs.items():
        last = len(seeds[0]["loss"]) // 10 or 1
        table.add_row(
            name,
            mean_and_deviation([seed["eval_loss"][-1] for seed in seeds]),
            mean_and_deviation([statistics.mean(seed["loss"][-last:]) for seed in seeds]),
            f"{max(early_difference(ours, theirs) for ours, theirs in zip(seeds, stock, strict=True)):.2%}",
        )
    return table


def early_difference(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    return max(abs(a - b) / b for a, b in zip(ours["loss"][:EARLY], theirs["loss"][:EARLY], strict=True))


def mean_and_deviation(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


if __name__ == "__main__":
    main()
